"""How much KV cache each instance has: grown for requests, shrunk late, given back when parked.

Admission asks `room_for` a request and takes it with `claim`; requests that turn out longer than
expected make their cache `grow`; what ends lets it `shrink`, late. Sizes follow LLM-Mesh §6: demand
by eq. 2, the watermark, M_require where M_recommend does not fit. Before: `requests`. After:
`reservations`, which promises the resizes and sends them.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from mesh.core.controller.instances.open_options import idle_to_unload
from mesh.core.controller.instances.reservations import issue, unload_idle
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.events import KeepAliveExpired
from mesh.domain.ids import InstanceId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.model import Footprint
from mesh.domain.values import dataclass
from mesh.memory.demand import expected_tokens
from mesh.memory.station import ReservationKind
from mesh.policy.interface import KvDemand, KvSize, StartDemand

PARKED_BLOCKS = 1
"""The least that an engine keeps of a KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """An instance can have so many KV blocks, once these idle instances have gone."""

    kv_blocks: int
    unloads: tuple[InstanceId, ...] = ()
    least_blocks: int = 0
    """The least that one which starts can do with."""


def request_blocks(
    owner: DeploymentEntry,
    request: RequestEntry,
    footprint: Footprint,
    context_tokens_max: int,
    *,
    led: bool = False,
) -> int:
    """KV blocks that a request is expected to need: its term of eq. 2. `led`: it shares the full
    blocks of its prompt with the answer of its call that computes them.
    """
    prompt = len(request.original.prompt_tokens)
    tokens = expected_tokens(
        prompt,
        # One more than there are: its next token has to be written somewhere.
        len(request.output_tokens) + 1,
        output_tokens_max=min(prompt + request.original.sampling.max_tokens, context_tokens_max)
        - prompt,
        output_tokens_mean=owner.history.mean_of(request.slo.name),
    )
    shared = request.led_tokens(footprint.block_tokens) if led else 0
    return -(-(tokens - shared) // footprint.block_tokens)


def blocks_for_load(
    ctx: EventContext,
    entry: DeploymentEntry,
    waiting: Iterable[RequestEntry],
    footprint: Footprint,
    node: NodeEntry | None = None,
) -> tuple[int, int]:
    """KV blocks of a new instance: the least that serves the first of those who wait, with all
    answers of its call, and what is wanted for as many as it would take. The policy may size it for
    the `node` where it starts, if that is known.
    """
    deployment = entry.made
    context, most = deployment.context_tokens_max, ctx.limits.batch_max
    among = list(islice(waiting, most))
    first = [request for one in among[:1] for request in (one, *one.mates)]
    # Those of its mates that have come are counted with it.
    others = [r for r in among[1:] if len(first) == 1 or r.leader is not first[0]]
    demands = [
        request_blocks(entry, r, footprint, context, led=r.leader is first[0])
        for r in [*first, *others][:most]
    ]
    least = start_size(ctx, entry, sum(demands[: len(first)]), footprint, node)
    if len(demands) > len(first):
        wanted = start_size(ctx, entry, sum(demands), footprint, node)
    else:
        wanted = least
    return max(least.required_blocks, 1), wanted.wanted_blocks


def start_size(
    ctx: EventContext,
    entry: DeploymentEntry,
    blocks: int,
    footprint: Footprint,
    node: NodeEntry | None,
) -> KvSize:
    """How large the policy has the KV cache of a new instance be, for so many blocks needed."""
    deployment = entry.made
    context, start = deployment.context_tokens_max, None
    if node is not None:
        start = StartDemand(
            node=node,
            footprint=footprint,
            profile=lambda: ctx.cell.profile_on(node, deployment),
            context_tokens=context,
            tpot_s=entry.spec.slo.tpot_s,
        )
    demand = KvDemand(
        required_blocks=blocks,
        block_tokens=footprint.block_tokens,
        context_tokens=context,
        tokens_least=ctx.limits.kv_tokens_least,
        watermark_share=ctx.limits.kv_watermark_share,
        swaps=node is not None and node.swaps,
        start=start,
    )
    return ctx.policy.kv(demand)


def batch_max(ctx: EventContext, entry: DeploymentEntry, node: NodeEntry) -> int:
    """What the node's engine can carry, and the policy has an instance there serve at a time."""
    deployment = entry.made
    most = min(node.hello.batch_max, ctx.limits.batch_max)
    served_max = start_size(ctx, entry, 0, node.footprint_of(deployment), node).batch_max
    return most if served_max is None else min(served_max, most)


def room_for(
    ctx: EventContext,
    owner: DeploymentEntry,
    instance: InstanceEntry,
    request: RequestEntry,
    beside: Sequence[RequestEntry] = (),
    without: Sequence[RequestEntry] = (),
) -> Room | None:
    """How an instance would have the KV cache for one more request, and for those `beside` it,
    `without` some of its requests; `None` if it cannot.
    """
    blocks = _blocks_with(owner, instance, request, beside)
    return _room(ctx, instance, blocks - sum(other.required_blocks for other in without))


def missing_bytes(
    ctx: EventContext,
    owner: DeploymentEntry,
    instance: InstanceEntry,
    request: RequestEntry | None = None,
    beside: Sequence[RequestEntry] = (),
) -> int:
    """What M_require lacks, with one more request and those `beside` it or without, though all
    idle instances went; 0 where it lacks nothing then, or where a grow has just failed: it is not
    memory that is missing.
    """
    blocks = instance.required_blocks
    if request is not None:
        blocks = _blocks_with(owner, instance, request, beside)
    if ctx.now_s < instance.grow_again_s or _room(ctx, instance, blocks) is not None:
        return 0
    return _lacking_bytes(instance, _size(ctx, instance, blocks).required_blocks)


def _blocks_with(
    owner: DeploymentEntry,
    instance: InstanceEntry,
    request: RequestEntry,
    beside: Sequence[RequestEntry],
) -> int:
    """What all on an instance need, with a request and those `beside` it."""
    footprint, context = instance.footprint, instance.context_tokens_max
    blocks = _others_blocks(instance, request)
    for one in (request, *beside):
        led = one.follows_to(instance)
        blocks += request_blocks(owner, one, footprint, context, led=led)
    return blocks


def _others_blocks(instance: InstanceEntry, request: RequestEntry | None = None) -> int:
    """What those on an instance need, and those who are expected, but for this one."""
    others = instance.required_blocks + instance.expected_blocks
    if request is not None and request.waits_for is instance:
        others -= request.required_blocks
    return others


def _size(ctx: EventContext, instance: InstanceEntry, blocks: int) -> KvSize:
    block_tokens, context_tokens = instance.footprint.block_tokens, instance.context_tokens_max
    return ctx.policy.kv_of(blocks, block_tokens, context_tokens, instance.node.swaps)


def _room(ctx: EventContext, instance: InstanceEntry, requested_blocks: int) -> Room | None:
    """What its cache has, if that will do; else what is wanted, else what is required, else that in
    the place of idle instances. None where there is no room, or where a grow has just failed. Where
    weights are swapped, it is as much of what is wanted as there is room for: one block at a time,
    a cache of 12 GB took four fifths of a node's time to be copied.
    """
    size, station = _size(ctx, instance, requested_blocks), instance.node.station
    if size.required_blocks <= instance.promised_blocks:
        return Room(kv_blocks=instance.promised_blocks)
    if ctx.now_s < instance.grow_again_s:
        return None
    least_blocks = size.required_blocks
    if instance.node.swaps:
        free_blocks = instance.node.free_bytes // instance.footprint.kv_block_bytes
        most_blocks = min(instance.promised_blocks + free_blocks, size.wanted_blocks)
        least_blocks = max(most_blocks, least_blocks)
    for kv_blocks in (size.wanted_blocks, least_blocks):
        if station.fits(instance.instance_id, instance.footprint.size(kv_blocks)):
            return Room(kv_blocks=kv_blocks)
    required = size.required_blocks
    owner = ctx.cell.deployments.get(instance.deployment)
    unloads = idle_to_unload(ctx, owner, instance, _lacking_bytes(instance, required))
    return Room(kv_blocks=required, unloads=unloads) if unloads else None


def _lacking_bytes(instance: InstanceEntry, kv_blocks: int) -> int:
    """The bytes that its node lacks for a cache of so many blocks."""
    more_bytes = instance.footprint.instance_bytes(kv_blocks) - instance.promised_bytes
    return more_bytes - instance.node.free_bytes


def claim(
    ctx: EventContext,
    owner: DeploymentEntry,
    instance: InstanceEntry,
    request: RequestEntry,
    room: Room,
) -> None:
    """Enter a request and its demand, and resize the cache if the room says so. The request may be
    submitted right after: if the resize has to wait, it waits on its node for missing blocks.
    """
    footprint, led = instance.footprint, request.follows_to(instance)
    blocks = request_blocks(owner, request, footprint, instance.context_tokens_max, led=led)
    if instance.prefetched:
        ctx.cell.prefetches.note_load(nearer=True, felt=False)
    cached = instance.cached_tokens(request)
    shared = cached // footprint.block_tokens if led else 0
    instance.add(
        request, blocks=blocks, now_s=ctx.now_s, cached_tokens=cached, shared_blocks=shared
    )
    _take(ctx, instance, room, request.due_s)


def expect(
    ctx: EventContext,
    owner: DeploymentEntry,
    instance: InstanceEntry,
    request: RequestEntry,
    room: Room | None,
    needed_s: float,
) -> None:
    """Enter a request that waits for a load, which has to be over by `needed_s` for it. The cache
    is resized after the load if the room says so; no room: it has been sized for the request.
    """
    footprint, led = instance.footprint, request.follows_to(instance)
    blocks = request_blocks(owner, request, footprint, instance.context_tokens_max, led=led)
    if instance.prefetched:
        ctx.cell.prefetches.note_load(nearer=True, felt=True)
    instance.expect(request, blocks)
    sooner = needed_s < instance.needed_s
    if sooner:
        instance.note_needed(needed_s)
    if room is not None:
        _take(ctx, instance, room, instance.needed_s)
    if instance.node.station.running(instance.instance_id):
        return
    if sooner:
        resize(ctx, instance, instance.promised_blocks, instance.needed_s)
    if room is not None:
        # The load has not begun: it brings the larger cache.
        instance.note_size(instance.promised_blocks)


def note_longer(ctx: EventContext, instance: InstanceEntry, request: RequestEntry) -> None:
    """Where a request is longer than expected its demand grows with it, and so does the cache."""
    if request.tokens < request.held_blocks * instance.footprint.block_tokens:
        return
    tokens = min(request.tokens + 1, request.original.tokens_max, instance.context_tokens_max)
    blocks = instance.footprint.blocks_for(tokens)
    if blocks > request.held_blocks:
        instance.note_demand(request, blocks, request.shared_blocks)
        grow(ctx, instance, request.due_s)


def grow(ctx: EventContext, instance: InstanceEntry, needed_s: float) -> bool:
    """Have the cache hold what its requests need; False when there is no room for that."""
    room = _room(ctx, instance, instance.required_blocks)
    if room is None:
        return False
    _take(ctx, instance, room, needed_s)
    return True


def growth_bytes(ctx: EventContext, node: NodeEntry) -> int:
    """The bytes that the caches of a node lack of what is wanted for the requests on them."""
    wanted = [
        (i, _size(ctx, i, _others_blocks(i)).wanted_blocks)
        for i in node.instances.values()
        if i.requests
    ]
    return sum(
        max(blocks - i.promised_blocks, 0) * i.footprint.kv_block_bytes for i, blocks in wanted
    )


def shrink(ctx: EventContext, instance: InstanceEntry) -> None:
    """Give back what is far more than its requests need: late, for the next ones may come soon."""
    if instance.state is not InstanceState.READY or instance.profiling:
        return
    size = _size(ctx, instance, _others_blocks(instance))
    if size.kept_blocks_max < instance.promised_blocks:
        resize(ctx, instance, size.wanted_blocks, ctx.now_s)
        ctx.wake_all()


def park(ctx: EventContext, instance: InstanceEntry) -> None:
    """An idle instance keeps its weights, for so long at most, and gives its KV cache back."""
    instance.advance(InstanceState.PARKED)
    since_s, at_s = instance.idle_since_s, ctx.now_s + ctx.limits.parked_s_max
    timer = KeepAliveExpired(instance_id=instance.instance_id, idle_since_s=since_s, parked=True)
    ctx.set_timer(at_s, timer)
    park_cache(ctx, instance)


def park_cache(ctx: EventContext, instance: InstanceEntry) -> None:
    """See to it that a parked instance holds next to no KV cache."""
    if instance.state is InstanceState.PARKED and instance.promised_blocks > PARKED_BLOCKS:
        resize(ctx, instance, PARKED_BLOCKS, ctx.now_s)
        ctx.wake_all()


def resize(ctx: EventContext, instance: InstanceEntry, kv_blocks: int, needed_s: float) -> None:
    """Have a KV cache of so many blocks, which must fit."""
    if kv_blocks < instance.promised_blocks:
        instance.node.touch()
    issue(ctx, instance, ReservationKind.RESIZE, instance.footprint.size(kv_blocks), needed_s)


def _take(ctx: EventContext, instance: InstanceEntry, room: Room, needed_s: float) -> None:
    unload_idle(ctx, instance.node, room.unloads)
    if room.kv_blocks > instance.promised_blocks:
        resize(ctx, instance, room.kv_blocks, needed_s)
