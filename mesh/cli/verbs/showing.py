"""The verbs that show what the cell has and change nothing: `get`, `describe`, `models`, `nodes`,
`requests`, `status`.
"""

import click

from mesh.cli import output, tables
from mesh.cli.options import controller_option, format_option
from mesh.cli.output import Format
from mesh.domain.errors import NotFound
from mesh.domain.ids import DeploymentName
from mesh.domain.lifecycle import DeploymentState, NodeState
from mesh.domain.model import ModelInfo
from mesh.domain.views import CellStatus, DeploymentSnapshot, NodeSnapshot, PrefetchView
from mesh.report.cell_state import status_fields
from mesh.report.plain import plain_fields
from mesh.wire.client import MeshClient


@click.command()
@click.argument("name", required=False)
@format_option
@controller_option
def get(name: str | None, form: Format, address: str) -> None:
    """List deployments, or show one."""
    with MeshClient(address) as client:
        found = client.list() if name is None else (client.get(DeploymentName(name)),)
    phases = (tables.UNDER_WAY,) if any(map(tables.under_way, found)) else ()
    columns = (*tables.DEPLOYMENTS, *phases)
    output.answer(form, columns, found, found if name is None else found[0])


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
        said = [("precision", found.precision)] * bool(found.precision)
        output.fields([*said, ("energy", tables.energy_words(found.energy))])
        output.next_table(tables.NODE_MEMORY, [found])
        output.next_table(tables.LOAD_TIMES, found.load_times)
        if found.footprints:
            output.next_table(tables.FOOTPRINTS, found.footprints)
    else:
        output.fields(tables.deployment_fields(found))
        if found.classes:
            output.next_table(tables.CLASSES, tables.class_rows([found]))
    columns = (tables.INSTANCES, tables.KV_CACHES, tables.CORRECTIONS, tables.PACE)
    for shown in columns if found.instances else ():
        output.next_table(shown, found.instances)


def _find(client: MeshClient, name: str) -> DeploymentSnapshot | NodeSnapshot:
    """Where a node has the name of a deployment, that is meant. Raises NotFound."""
    try:
        return client.get(DeploymentName(name))
    except NotFound:
        for node in client.nodes():
            if node.node_id == name:
                return node
        raise


@click.command()
@format_option
@controller_option
def models(form: Format, address: str) -> None:
    """List the models that the cell serves."""
    found: dict[str, tuple[ModelInfo, list[str]]] = {}
    with MeshClient(address) as client:
        for deployment in client.list():
            if deployment.model is not None:
                _, users = found.setdefault(deployment.model.model_id, (deployment.model, []))
                users.append(deployment.spec.name)
    whole = [{**plain_fields(model), "deployments": names} for model, names in found.values()]
    output.answer(form, tables.MODELS, list(found.values()), whole)


@click.command()
@format_option
@controller_option
def nodes(form: Format, address: str) -> None:
    """List the cell's nodes and the books of their memory."""
    with MeshClient(address) as client:
        found = client.nodes()
    output.answer(form, tables.NODES, found)
    if form is not Format.TABLE:
        return
    joined = [node for node in found if node.state is not NodeState.STARTING]
    if joined:
        output.next_table(tables.NODE_MEMORY, joined)
    for node in found:
        if node.phase:
            output.message(f"{node.node_id} {node.phase} ({node.share:.0%}) before it joins")


@click.command()
@format_option
@controller_option
def requests(form: Format, address: str) -> None:
    """List the requests whose clients wait, the oldest first."""
    with MeshClient(address) as client:
        output.answer(form, tables.REQUESTS, client.requests())


@click.command()
@format_option
@controller_option
def status(form: Format, address: str) -> None:
    """Show whether the cell serves, what it refused, and how its instances keep up."""
    with MeshClient(address) as client:
        found = client.status()
        deployments = client.list()
        instances = [instance for node in client.nodes() for instance in node.instances]
    failed = [one for one in deployments if one.state is DeploymentState.FAILED]
    if form is not Format.TABLE:
        # `instances` is their number; those that are still loading stand in `by_instance` alone.
        output.structured({**status_fields(found, deployments), "by_instance": instances}, form)
        return
    reasons = [("failed", f"{one.spec.name}: {one.phase}") for one in failed]
    planned = [
        ("planned", f"{one.spec.name}: {tables.planned_words(one)}")
        for one in deployments
        if one.spec.scaling.plan is not None
    ]
    output.fields([*_status_fields(address, found), *planned, *reasons])
    if classes := tables.class_rows(deployments):
        output.next_table(tables.CLASSES, classes)
    for columns in (tables.PACE, tables.KV_CACHES) if instances else ():
        output.next_table(columns, instances)


def _prefetches(said: PrefetchView) -> str:
    text = f"{said.begun} begun, {said.used} used, {said.wasted} wasted"
    if not said.loads:
        return text
    return f"{text}; of {said.loads} loads {said.hit_rate:.0%} found one, {said.felt} were felt"


def _status_fields(address: str, found: CellStatus) -> list[tuple[str, str]]:
    refused = ", ".join(f"{reason} {count}" for reason, count in found.refused)
    return [
        ("controller", address),
        ("version", found.version),
        ("uptime_s", f"{found.uptime_s:.1f}"),
        ("nodes_ready", f"{found.nodes_ready} of {found.nodes}"),
        *[("nodes_wanted", tables.wanted_words(found.wanted))] * bool(found.wanted),
        ("deployments", str(found.deployments)),
        ("instances", str(found.instances)),
        ("running", str(found.running)),
        ("queued", str(found.queued)),
        ("served", str(found.served)),
        ("refused", refused or "0"),
        ("prefetches", _prefetches(found.prefetches)),
        ("energy", tables.energy_words(found.energy)),
        *[("batches", tables.batches_words(found.batches))] * bool(found.batches),
        ("state_path", found.state_path),
    ]
