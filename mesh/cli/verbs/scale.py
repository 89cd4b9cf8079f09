"""`mesh scale`: other scaling limits for a deployment, without deploying it again."""

import click

from mesh.cli import output
from mesh.cli.options import controller_option
from mesh.domain.ids import DeploymentName
from mesh.wire.client import MeshClient


@click.command()
@click.argument("name")
@click.option("--min", "replicas_min", type=click.IntRange(min=0), help="Instances that stay.")
@click.option("--max", "replicas_max", type=click.IntRange(min=1), help="Instances at most.")
@click.option(
    "--keep-alive",
    "keep_alive_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    help="How long an idle instance stays loaded.",
)
@controller_option
def scale(
    name: str,
    replicas_min: int | None,
    replicas_max: int | None,
    keep_alive_s: float | None,
    address: str,
) -> None:
    """Change a deployment's scaling limits; what is not given stays as it is."""
    if replicas_min is None and replicas_max is None and keep_alive_s is None:
        raise click.UsageError("nothing to change: give --min, --max or --keep-alive")
    with MeshClient(address) as client:
        client.scale(
            DeploymentName(name),
            replicas_min=replicas_min,
            replicas_max=replicas_max,
            keep_alive_s=keep_alive_s,
        )
    output.message(f"{name}: scaled")
