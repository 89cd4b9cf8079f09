"""`mesh pull`: import a model into this machine's store, so that its nodes need not.

Whoever types it can reach the host of a URL by other means, too, so that host may be a private one;
what it redirects to may not.
"""

from pathlib import Path
from urllib.parse import urlsplit

import click

from mesh.cli import output, tables
from mesh.cli.options import format_option, home_option
from mesh.cli.output import Format
from mesh.cli.progress import progress
from mesh.report.plain import plain_fields
from mesh_loader.download_rate import parse_rate
from mesh_loader.reach import Reach
from mesh_loader.sources import check_source
from mesh_loader.store import ModelStore


@click.command()
@click.argument("source")
@click.option(
    "--download-rate",
    metavar="SIZE",
    callback=lambda _, __, value: value and parse_rate(value),
    help="A second, together with all imports into the store that are bounded; not of pkg://.",
)
@format_option
@home_option
def pull(source: str, download_rate: int | None, form: Format, home: Path) -> None:
    """Import SOURCE: pkg://package/file, file:///path, hf://org/name@revision, https://host/file or
    s3://bucket/prefix."""
    check_source(source)
    own = (urlsplit(source).netloc,) if source.startswith(("http://", "https://")) else ()
    store = ModelStore(home / "store", download_bytes_per_s=download_rate, reach=Reach(named=own))
    with progress(source) as report:
        stored = store.import_model(source, report)
    if form is Format.TABLE:
        pairs = [*tables.model_fields(stored.info), ("path", str(stored.path))]
        output.fields(pairs)
        return
    output.structured({**plain_fields(stored.info), "path": str(stored.path)}, form)
