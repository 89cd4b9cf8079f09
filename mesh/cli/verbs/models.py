"""`mesh models`: the models of the cell's deployments."""

import click

from mesh.cli import output, tables
from mesh.cli.options import controller_option, format_option
from mesh.cli.output import Format
from mesh.domain.model import ModelInfo
from mesh.report.plain import plain_fields
from mesh.wire.client import MeshClient


@click.command()
@format_option
@controller_option
def models(form: Format, address: str) -> None:
    """List the models that the cell serves."""
    found = _in_cell(address)
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
