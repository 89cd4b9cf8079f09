"""What is shown of a snapshot of the cell: a few numbers, and what its core does not know, which
nodes are starting and which deployments' texts cannot be used.
"""

from collections.abc import Callable, Iterable, Sequence

from mesh import __version__
from mesh.domain.ids import ModelId
from mesh.domain.lifecycle import DeploymentState, InstanceState, NodeState
from mesh.domain.messages import NodeStarting
from mesh.domain.values import replace
from mesh.domain.views import (
    CellSnapshot,
    CellStatus,
    DeploymentSnapshot,
    NodeSnapshot,
    OpenBatches,
)

LOADED = (InstanceState.READY, InstanceState.PARKED, InstanceState.DRAINING)


def cell_status(
    snapshot: CellSnapshot, batches: Sequence[OpenBatches], *, uptime_s: float, state_path: str
) -> CellStatus:
    """`instances` counts those that are loaded, `nodes` those that are in the cell."""
    instances = [instance for node in snapshot.nodes for instance in node.instances]
    return CellStatus(
        version=__version__,
        uptime_s=uptime_s,
        nodes_ready=sum(node.state is NodeState.READY for node in snapshot.nodes),
        nodes=len(snapshot.nodes),
        deployments=len(snapshot.deployments),
        instances=sum(instance.state in LOADED for instance in instances),
        queued=snapshot.queued,
        running=snapshot.running,
        served=snapshot.served,
        refused=tuple(sorted(snapshot.refused)),
        state_path=state_path,
        prefetches=snapshot.prefetches,
        wanted=snapshot.wanted,
        energy=snapshot.energy,
        batches=tuple(batches),
    )


def with_failed(snapshot: CellSnapshot, failure: Callable[[ModelId], str]) -> CellSnapshot:
    """The cell with those deployments as failed whose models' texts cannot be used, and why."""

    def shown(one: DeploymentSnapshot) -> DeploymentSnapshot:
        if one.model is None or one.state is not DeploymentState.READY:
            return one
        why = failure(one.model.model_id)
        return replace(one, state=DeploymentState.FAILED, phase=why) if why else one

    return replace(snapshot, deployments=tuple(map(shown, snapshot.deployments)))


def with_starting(
    nodes: Iterable[NodeSnapshot], starting: Iterable[NodeStarting]
) -> tuple[NodeSnapshot, ...]:
    """The cell's nodes and those that have not joined it yet, by name. One that has joined under a
    name is shown, and not one that starts under it.
    """
    found = {one.node_id: _starting(one) for one in starting}
    found |= {node.node_id: node for node in nodes}
    return tuple(found[node_id] for node_id in sorted(found))


def _starting(said: NodeStarting) -> NodeSnapshot:
    return NodeSnapshot(
        node_id=said.node_id,
        state=NodeState.STARTING,
        device=said.device,
        hardware=said.hardware,
        cores=said.cores,
        engine=said.engine,
        memory_bytes=said.memory_bytes,
        base_bytes=0,
        promised_bytes=0,
        tracked_bytes=0,
        rss_bytes=0,
        unaccounted_bytes=0,
        operations=(),
        silent_s=0.0,
        instances=(),
        phase=said.phase,
        share=said.share,
    )
