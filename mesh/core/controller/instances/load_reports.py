"""What a load tells once it has ended: what its instance takes, how long the next one will take,
and how long to wait before the next one if it failed.

The engine of the node that imported a model has stated its footprint there. What another engine
takes for it is an estimate, which may be too little by multiples, until the first instance is
there: vLLM on a CPU packs matrices beside the weights and takes 200 MiB for itself. Before: a
node's report. After: the deployment's footprints and pauses, and `Expectations`.
"""

from mesh.core.controller.instances.loading_lane import plan_load
from mesh.core.controller.instances.reservations import send_started
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.domain.actions import SetTimer
from mesh.domain.events import RetryLoadDue
from mesh.domain.lifecycle import InstanceState
from mesh.domain.messages import InstanceLoaded
from mesh.domain.steps import HeldModel, LoadTier


def take_over_size(ctx: EventContext, instance: InstanceEntry, said: InstanceLoaded) -> bool:
    """Enter what a load has led to. False where its size was an estimate, and there is no room for
    what it came to: it has to go, and the next one knows. One that went by what is known stays:
    the next one would come out no smaller.
    """
    node, promised = instance.node, instance.footprint
    instance.note_size(said.kv_blocks, said.footprint)
    size = said.footprint.size(said.kv_blocks)
    smaller, free_bytes = size.bytes < instance.promised_bytes, node.free_bytes
    started = node.station.done(instance.instance_id, size, instance.shares)
    send_started(ctx, node, started)
    if smaller or node.free_bytes > free_bytes:
        ctx.wake_all()
    owner = ctx.cell.deployments.get(instance.deployment)
    if owner is None or owner.deployment is None:
        return True
    owner.note_footprint(node.hello.engine, said.footprint)
    # Another instance may have said it while this one was loading.
    known = node.footprint_of(owner.deployment)
    estimated = promised != known.at_context(instance.context_tokens_max)
    node.note_footprint(owner.deployment.model, said.footprint)
    return not (estimated and node.free_bytes < 0)


def note_loaded(ctx: EventContext, instance: InstanceEntry, said: InstanceLoaded) -> None:
    node, model_id = instance.node, instance.model_id
    instance.note_loaded(said.tier, ctx.now_s)
    instance.note_all_prefixes(said.prefixes)
    # What the node has told of since the load began is of what this one found.
    node.take_left(instance.deployment)
    weights_bytes = node.load_bytes(instance.footprint.weights_bytes, said.tier)
    ctx.cell.expectations.learn_load(
        node.hello, weights_bytes, said.elapsed_s, said.tier, computed_s=said.computed_s
    )
    owner = ctx.cell.deployments.get(instance.deployment)
    if owner is not None:
        owner.note_loaded()
    if said.tier is LoadTier.REMOTE:
        node.note_stored(model_id)
    elif said.tier is LoadTier.HOST:
        context_tokens_max = instance.context_tokens_max
        held = HeldModel(model_id=model_id, tier=said.tier, context_tokens_max=context_tokens_max)
        node.note_woken(held)


def expect_loads(ctx: EventContext, node: NodeEntry) -> None:
    """The node has said which models it has at hand: of loads that wait for their turn some may
    come from nearer than when they were issued. A shape that the first of them has compiled is
    what the others import.
    """
    for instance in node.instances.values():
        owner = ctx.cell.deployments.get(instance.deployment)
        kind = node.station.load_kind(instance.instance_id)
        if instance.state is not InstanceState.LOADING or kind is None:
            continue
        if node.station.running(instance.instance_id) or owner is None or owner.deployment is None:
            continue
        planned = plan_load(ctx, owner.deployment, node)
        if planned.kind is kind:
            instance.plan_load(planned.load_s)


def note_load_failure(
    ctx: EventContext, entry: DeploymentEntry, node: NodeEntry, message: str
) -> None:
    """Remember a failed load, and try again after its pause."""
    entry.note_load_failure(node.node_id, message, ctx.now_s, ctx.limits)
    ctx.act(SetTimer(at_s=entry.paused_until_s, timer=RetryLoadDue(name=entry.spec.name)))
