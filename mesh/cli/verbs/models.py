"""`mesh models`: the models of the cell's deployments, or those in this machine's store."""

from pathlib import Path

import click

from mesh.cli import output, tables
from mesh.cli.options import controller_option, format_option, home_option
from mesh.cli.output import Format
from mesh.cli.plain import plain_fields
from mesh.domain.model import ModelInfo
from mesh.wire.client import MeshClient
from mesh_loader.store import ModelStore


@click.command()
@click.option("--store", "local", is_flag=True, help="What this machine's model store holds.")
@format_option
@controller_option
@home_option
def models(local: bool, form: Format, address: str, home: Path) -> None:
    """List models: those that the cell serves, or with --store those on this disk."""
    found = _in_store(home) if local else _in_cell(address)
    if form is Format.TABLE:
        output.table(tables.MODELS, found)
    else:
        output.structured(
            [{**plain_fields(model), "deployments": names} for model, names in found], form
        )


def _in_cell(address: str) -> list[tuple[ModelInfo, list[str]]]:
    """Each model once, with the names of its deployments."""
    with MeshClient(address) as client:
        deployments = client.list()
    models: dict[str, ModelInfo] = {}
    users: dict[str, list[str]] = {}
    for deployment in deployments:
        if deployment.model is not None:
            models.setdefault(deployment.model.model_id, deployment.model)
            users.setdefault(deployment.model.model_id, []).append(deployment.spec.name)
    return [(models[model_id], users[model_id]) for model_id in models]


def _in_store(home: Path) -> list[tuple[ModelInfo, list[str]]]:
    return [(stored.info, []) for stored in ModelStore(home / "store").models()]
