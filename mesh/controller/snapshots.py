"""The cell in a few numbers, from a snapshot of it."""

from mesh import __version__
from mesh.domain.lifecycle import InstanceState, NodeState
from mesh.domain.views import CellSnapshot, CellStatus

_LOADED = (InstanceState.READY, InstanceState.PARKED, InstanceState.DRAINING)


def cell_status(snapshot: CellSnapshot, *, uptime_s: float, state_path: str) -> CellStatus:
    """`instances` counts those that are loaded, `nodes` those that are in the cell."""
    instances = [instance for node in snapshot.nodes for instance in node.instances]
    return CellStatus(
        version=__version__,
        uptime_s=uptime_s,
        nodes_ready=sum(node.state is NodeState.READY for node in snapshot.nodes),
        nodes=len(snapshot.nodes),
        deployments=len(snapshot.deployments),
        instances=sum(instance.state in _LOADED for instance in instances),
        queued=snapshot.queued,
        running=snapshot.running,
        served=snapshot.served,
        refused=tuple(sorted(snapshot.refused)),
        state_path=state_path,
        prefetches=snapshot.prefetches,
    )
