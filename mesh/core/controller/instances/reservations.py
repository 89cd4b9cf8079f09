"""Loads, resizes and unloads of a node: promised against its memory, and sent when they may start.

Every one is issued to the node's reservation station (`mesh.memory.station`), which refuses what
does not fit and holds back what has to wait until memory has come free; what it says may start is
sent to the node. Before: `kv_cache` and `search`, which decide sizes. After: the node.
"""

from collections.abc import Iterable, Sequence

from mesh.compute.times import Times
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.ids import InstanceId
from mesh.domain.lifecycle import NodeState
from mesh.domain.messages import LoadInstance, ResizeKv, UnloadInstance
from mesh.domain.model import NOTHING, Size
from mesh.domain.values import replace
from mesh.memory.demand import expected_tokens
from mesh.memory.station import LOADS, Reservation, ReservationKind


def issue(
    ctx: EventContext, instance: InstanceEntry, kind: ReservationKind, size: Size, needed_s: float
) -> None:
    """Promise a reservation that fits, and start what may start."""
    node = instance.node
    started = node.station.issue(
        kind, instance.instance_id, size, needed_s, shared=instance.shared_weights
    )
    assert started is not None, f"{kind} of {instance.instance_id} to {size} does not fit"
    send_started(ctx, node, started)


def send_started(ctx: EventContext, node: NodeEntry, reservations: Iterable[Reservation]) -> None:
    """Send what the station has started to the node. A lost one is told nothing any more."""
    if node.state is NodeState.LOST:
        return
    for reservation in reservations:
        instance = node.instances[reservation.instance_id]
        if reservation.kind in LOADS:
            instance.note_load_begun(begun_load_s(ctx, instance), ctx.now_s)
        ctx.send(node, _command(instance, reservation))


def _command(
    instance: InstanceEntry, reservation: Reservation
) -> LoadInstance | ResizeKv | UnloadInstance:
    kv_blocks = instance.footprint.kv_blocks(reservation.size)
    match reservation.kind:
        case ReservationKind.LOAD | ReservationKind.WAKE | ReservationKind.IMPORT:
            assert instance.to_load is not None
            node, size = instance.node, reservation.size
            needs_bytes = size.bytes if node.hello.loads_on_device else size.kv_bytes
            swapped_bytes = needs_bytes if node.swaps else 0
            return replace(instance.to_load, kv_blocks=kv_blocks, swapped_bytes=swapped_bytes)
        case ReservationKind.RESIZE:
            return ResizeKv(instance_id=reservation.instance_id, kv_blocks=kv_blocks)
        case ReservationKind.UNLOAD:
            return UnloadInstance(instance_id=reservation.instance_id)


def unload_idle(ctx: EventContext, node: NodeEntry, instance_ids: Sequence[InstanceId]) -> None:
    """Unload idle instances of the node: their memory is wanted."""
    for instance_id in instance_ids:
        unload_loaded(ctx, node.instances[instance_id])


def unload_loaded(ctx: EventContext, instance: InstanceEntry) -> None:
    """Unload a loaded instance; what it holds is promised to others at once, and theirs when its
    node says that it is gone.
    """
    instance.note_unloading()
    issue(ctx, instance, ReservationKind.UNLOAD, NOTHING, ctx.now_s)
    ctx.wake_all()


def begun_load_s(ctx: EventContext, instance: InstanceEntry) -> float:
    """How many seconds a load that begins is expected to take, as likely more as less: beside what
    its node computes meanwhile, for those whom it has, and for those who waited for what has just
    been loaded. Who comes meanwhile is not known. People are told this; promises rest on more
    (`node_schedule`).
    """
    owner, node = ctx.cell.deployments.get(instance.deployment), instance.node
    if owner is None or owner.deployment is None:
        return instance.load_s
    tier = node.tier_of(owner.deployment, without=(instance.instance_id,))
    return ctx.cell.expectations.estimate_s(
        node.hello,
        node.load_bytes(instance.footprint.weights_bytes, tier),
        tier,
        computes_s=_computes_s(ctx, node),
    )


def _computes_s(ctx: EventContext, node: NodeEntry) -> float:
    """For how long the node has work, beside a load."""
    return node.load_slowdown * sum(_work_s(ctx, i) for i in node.instances.values())


def _work_s(ctx: EventContext, instance: InstanceEntry) -> float:
    """The work of the requests that an instance has, and of those that get a place on it now, in
    seconds.
    """
    loads = instance.node.station.load_kind(instance.instance_id) is not None
    coming = {} if loads else instance.expected
    requests = [*instance.requests.values(), *coming.values()]
    if not requests or instance.profile is None:
        return 0.0
    times = Times(instance.profile, instance.correction.factor(ctx.now_s))
    prompts = (r.prefill_left or (0 if r.instance else r.tokens) for r in requests)
    prefill_s = sum(times.prefill_s(tokens, 0) for tokens in prompts if tokens)
    decodes = max(_tokens_left(ctx, request) for request in requests)
    context = sum(r.tokens for r in requests) / len(requests)
    return prefill_s + decodes * times.decode_s(len(requests), context)


def _tokens_left(ctx: EventContext, request: RequestEntry) -> int:
    """As its class's answers have had lately; one at least."""
    prompt = len(request.original.prompt_tokens)
    owner = ctx.cell.deployments.get(request.deployment)
    whole = expected_tokens(
        prompt,
        len(request.output_tokens) + 1,
        output_tokens_max=request.original.sampling.max_tokens,
        output_tokens_mean=owner.history.mean_of(request.slo.name) if owner else 0.0,
    )
    return max(whole - request.tokens, 1)
