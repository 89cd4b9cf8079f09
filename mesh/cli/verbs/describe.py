"""`mesh describe`: everything about one deployment, or one node."""

from collections.abc import Sequence

import click

from mesh.cli import memory_tables, output, tables
from mesh.cli.options import controller_option, format_option
from mesh.cli.output import Format
from mesh.domain.errors import NotFound
from mesh.domain.ids import DeploymentName
from mesh.domain.views import DeploymentSnapshot, InstanceSnapshot, NodeSnapshot
from mesh.wire.client import MeshClient


@click.command()
@click.argument("name")
@format_option
@controller_option
def describe(name: str, form: Format, address: str) -> None:
    """Show one deployment in full, or a node: limits, memory, loads, and how they keep up."""
    with MeshClient(address) as client:
        found = _find(client, name)
    if form is not Format.TABLE:
        output.structured(found, form)
        return
    if isinstance(found, NodeSnapshot):
        output.table(tables.NODES, [found])
        output.text("")
        if found.precision:
            output.fields([("precision", found.precision)])
            output.text("")
        output.table(memory_tables.NODE_MEMORY, [found])
        output.text("")
        output.table(tables.LOAD_TIMES, found.load_times)
        if found.footprints:
            output.text("")
            output.table(memory_tables.FOOTPRINTS, found.footprints)
    else:
        output.fields(tables.deployment_fields(found))
    if found.instances:
        _instances(found.instances)


def _find(client: MeshClient, name: str) -> DeploymentSnapshot | NodeSnapshot:
    """Where a node has the name of a deployment, that is meant. Raises NotFound."""
    try:
        return client.get(DeploymentName(name))
    except NotFound:
        for node in client.nodes():
            if node.node_id == name:
                return node
        raise


def _instances(instances: Sequence[InstanceSnapshot]) -> None:
    output.text("")
    output.table(tables.INSTANCES, instances)
    output.text("")
    output.table(memory_tables.KV_CACHES, instances)
    output.text("")
    output.table(tables.CORRECTIONS, instances)
    output.text("")
    output.table(tables.PACE, instances)
