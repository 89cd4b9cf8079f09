"""What instances turn out to take, against what their loads were promised.

The engine of the node that imported a model has stated its footprint there. What another engine
takes for it is an estimate, which may be too little by multiples, until the first instance is
there: vLLM on a CPU packs matrices beside the weights and takes 200 MiB for itself. Before: a
node's report.
"""

from dataclasses import replace

from mesh.core.controller.instances.kv_cache import start as start_operations
from mesh.core.controller.state.cell import DeploymentEntry, InstanceEntry
from mesh.core.controller.state.context import Turn
from mesh.domain.messages import InstanceLoaded
from mesh.domain.model import Footprint


def take_over_size(turn: Turn, instance: InstanceEntry, said: InstanceLoaded) -> bool:
    """Enter what a load has led to. False where its size was an estimate, and there is no room for
    what it came to: it has to go, and the next one knows. One that went by what is known stays:
    the next one would come out no smaller.
    """
    node, promised = instance.node, instance.footprint
    instance.footprint, instance.kv_blocks = said.footprint, said.kv_blocks
    size_bytes = said.footprint.instance_bytes(said.kv_blocks)
    smaller = size_bytes < instance.promised_bytes
    start_operations(turn, node, node.station.done(instance.instance_id, size_bytes))
    turn.room_appeared = turn.room_appeared or smaller
    owner = turn.cell.deployments.get(instance.deployment)
    if owner is None or owner.deployment is None:
        return True
    state_footprint(owner, node.hello.engine, said.footprint)
    # Another instance may have said it while this one was loading.
    estimated = promised != node.footprint_of(owner.deployment)
    return not (estimated and node.free_bytes < 0)


def state_footprint(owner: DeploymentEntry, engine: str, footprint: Footprint) -> None:
    """An instance says what the deployment takes on its engine, unless that is known."""
    deployment = owner.deployment
    if deployment is not None and engine not in dict(deployment.footprints):
        footprints = (*deployment.footprints, (engine, footprint))
        owner.deployment = replace(deployment, footprints=footprints)
