"""`mesh status`: the cell in a few numbers, how its instances keep up, and their KV caches."""

import click

from mesh.cli import memory_tables, output, tables
from mesh.cli.options import controller_option, format_option
from mesh.cli.output import Format
from mesh.domain.lifecycle import DeploymentState
from mesh.domain.views import CellStatus, PrefetchView
from mesh.report.cell_state import status_fields
from mesh.wire.client import MeshClient


@click.command()
@format_option
@controller_option
def status(form: Format, address: str) -> None:
    """Show whether the cell serves, what it refused, and how its instances keep up."""
    with MeshClient(address) as client:
        found = client.status()
        failed = [one for one in client.list() if one.state is DeploymentState.FAILED]
        instances = [instance for node in client.nodes() for instance in node.instances]
    if form is not Format.TABLE:
        # `instances` is their number; those that are still loading stand in `by_instance` alone.
        output.structured({**status_fields(found, failed), "by_instance": instances}, form)
        return
    reasons = [("failed", f"{one.spec.name}: {one.phase}") for one in failed]
    output.fields([*_fields(address, found), *reasons])
    if instances:
        output.text("")
        output.table(tables.PACE, instances)
        output.text("")
        output.table(memory_tables.KV_CACHES, instances)


def _prefetches(said: PrefetchView) -> str:
    text = f"{said.begun} begun, {said.used} used, {said.wasted} wasted"
    return f"{text}; of {said.loads} loads {said.hit_rate:.0%} found one" if said.loads else text


def _fields(address: str, status: CellStatus) -> list[tuple[str, str]]:
    refused = ", ".join(f"{reason} {count}" for reason, count in status.refused)
    return [
        ("controller", address),
        ("version", status.version),
        ("uptime_s", f"{status.uptime_s:.1f}"),
        ("nodes_ready", f"{status.nodes_ready} of {status.nodes}"),
        ("deployments", str(status.deployments)),
        ("instances", str(status.instances)),
        ("running", str(status.running)),
        ("queued", str(status.queued)),
        ("served", str(status.served)),
        ("refused", refused or "0"),
        ("prefetches", _prefetches(status.prefetches)),
        ("state_path", status.state_path),
    ]
