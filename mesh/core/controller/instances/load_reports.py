"""What a load tells once it has ended: what its instance takes, how long the next one will take,
and how long to wait before the next one if it failed.

The engine of the node that imported a model has stated its footprint there. What another engine
takes for it is an estimate, which may be too little by multiples, until the first instance is
there: vLLM on a CPU packs matrices beside the weights and takes 200 MiB for itself. Before: a
node's report. After: the deployment's footprints and pauses, and `Expectations`.
"""

from dataclasses import replace

from mesh.core.controller.instances.reservations import send_started
from mesh.core.controller.state.cell import DeploymentEntry, InstanceEntry, NodeEntry
from mesh.core.controller.state.context import EventContext
from mesh.domain.actions import SetTimer
from mesh.domain.events import RetryLoadDue
from mesh.domain.messages import InstanceLoaded
from mesh.domain.model import Footprint
from mesh.domain.steps import LoadTier, SleepingModel


def take_over_size(ctx: EventContext, instance: InstanceEntry, said: InstanceLoaded) -> bool:
    """Enter what a load has led to. False where its size was an estimate, and there is no room for
    what it came to: it has to go, and the next one knows. One that went by what is known stays:
    the next one would come out no smaller.
    """
    node, promised = instance.node, instance.footprint
    instance.footprint, instance.kv_blocks = said.footprint, said.kv_blocks
    size_bytes = said.footprint.instance_bytes(said.kv_blocks)
    smaller = size_bytes < instance.promised_bytes
    send_started(ctx, node, node.station.done(instance.instance_id, size_bytes))
    ctx.room_appeared = ctx.room_appeared or smaller
    owner = ctx.cell.deployments.get(instance.deployment)
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


def note_loaded(ctx: EventContext, instance: InstanceEntry, said: InstanceLoaded) -> None:
    node, model_id = instance.node, instance.model_id
    instance.tier = said.tier
    ctx.cell.expectations.learn_load(model_id, node.hello.fingerprint, said.elapsed_s, said.tier)
    owner = ctx.cell.deployments.get(instance.deployment)
    if owner is not None:
        owner.paused_until_s = 0.0
        owner.avoided.clear()
    if said.tier is LoadTier.HOST:
        woken = SleepingModel(model_id=model_id, context_tokens_max=instance.context_tokens_max)
        left = list(node.asleep)
        if woken in left:
            left.remove(woken)
        node.asleep = tuple(left)


def note_load_failure(
    ctx: EventContext, entry: DeploymentEntry, node: NodeEntry, message: str
) -> None:
    """Remember a failed load, and pause before the next: longer after each, up to a bound."""
    entry.load_failures += 1
    entry.load_error = message
    entry.avoided[node.node_id] = message
    doublings = min(entry.load_failures - 1, ctx.limits.load_retry_doublings_max)
    entry.paused_until_s = ctx.now_s + ctx.limits.load_retry_s * 2**doublings
    ctx.act(SetTimer(at_s=entry.paused_until_s, timer=RetryLoadDue(name=entry.spec.name)))
