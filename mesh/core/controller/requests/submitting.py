"""Places: a request gets one when it is entered into the books of an instance and sent to its node,
or has one promised on an instance that loads, and its client is told which deadlines hold. Before:
`search`, which has found the price of a place.
"""

from math import inf

from mesh.core.controller.instances.kv_cache import Room, claim, expect
from mesh.core.controller.instances.lifecycle import start
from mesh.core.controller.instances.pricing import Price, note_overtaken
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.actions import TellAccepted
from mesh.domain.lifecycle import InstanceState
from mesh.domain.messages import OfferKv, SubmitRequest
from mesh.domain.request import KvSource, RequestOrder
from mesh.policy.plans import Join


def take(ctx: EventContext, price: Price) -> None:
    """Submit a request that waits to the instance of a price, or promise it a load."""
    instance, request, room = price.instance, price.request, price.room
    if instance is not None and isinstance(price.plan, Join) and price.plan.label is not None:
        instance.note_label(price.plan.label)
    if instance is None or instance.state is InstanceState.LOADING:
        promise(ctx, price)
        return
    assert request is not None
    assert room is not None
    note_overtaken(ctx, price.node, request)
    submit(ctx, price.entry, request, instance, room, price.grace_s())
    price.entry.dequeue(request)


def submit(
    ctx: EventContext,
    entry: DeploymentEntry,
    request: RequestEntry,
    instance: InstanceEntry,
    room: Room,
    grace_s: float = 0.0,
) -> None:
    """Submit a queued request to a loaded instance that has this room for it; its first token comes
    so much after its limit.
    """
    _accept(ctx, request, instance, grace_s, cached=instance.cached_tokens(request))
    if request.waits_for is not None:
        ctx.note_released(request.waits_for)
        request.waits_for.expect_no_more(request, instance)
    claim(ctx, entry, instance, request, room)
    entry.rank(instance)
    _send(ctx, request, instance)


def compute_ahead(
    ctx: EventContext,
    entry: DeploymentEntry,
    copy: RequestEntry,
    instance: InstanceEntry,
    room: Room,
    source: InstanceEntry | None = None,
    source_attempt: int = 0,
) -> None:
    """Have a loaded instance compute the copy of a request that is to move there. It fetches the
    blocks that are to come along from a `source` that is given, where the request is an attempt of
    its own.
    """
    claim(ctx, entry, instance, copy, room)
    entry.rank(instance)
    kv = None
    if source is not None:
        hello, request_id = source.node.hello, copy.original.request_id
        ticket = f"{request_id}/{copy.attempt}"
        kv = KvSource(
            node_id=hello.node_id,
            address=hello.kv_address,
            attempt=source_attempt,
            ticket=ticket,
            blocks=copy.carried_tokens // instance.footprint.block_tokens,
        )
        offer = OfferKv(
            instance_id=source.instance_id,
            request_id=request_id,
            attempt=source_attempt,
            to=instance.node.node_id,
            ticket=ticket,
            expires_s=ctx.limits.migration_s_max,
        )
        ctx.send(source.node, offer)
    _send(ctx, copy, instance, paused=True, kv=kv)


def _send(
    ctx: EventContext,
    request: RequestEntry,
    instance: InstanceEntry,
    *,
    paused: bool = False,
    kv: KvSource | None = None,
) -> None:
    order = RequestOrder(
        request=request.original,
        attempt=request.attempt,
        output_tokens=tuple(request.output_tokens),
        slo=request.slo,
        age_s=ctx.now_s - request.arrival_s,
        due_in_s=request.due_s - ctx.now_s,
        pace_share=request.pace.share,
        slack_s=request.slack_s,
        paused=paused,
        cached_tokens=request.tokens - request.prefill_left,
        kv=kv,
    )
    ctx.send(instance.node, SubmitRequest(instance_id=instance.instance_id, order=order))


def promise(ctx: EventContext, price: Price) -> None:
    """Promise a queued request its place once a load is over, which begins now unless it is under
    way.
    """
    grace_s = price.grace_s()
    request, instance, room, needed_s = price.wanted_by, price.instance, price.room, inf
    if instance is None:
        instance, room = start(ctx, price), None
    else:
        needed_s = price.needed_s(grace_s)
    _accept(ctx, request, instance, grace_s)
    expect(ctx, price.entry, instance, request, room, needed_s)


def _accept(
    ctx: EventContext,
    request: RequestEntry,
    instance: InstanceEntry,
    grace_s: float,
    cached: int = 0,
) -> None:
    if not request.accepted:
        request.accept(grace_s)
        ctx.note_placed(instance.node)
        told = TellAccepted(
            request_id=request.original.request_id, grace_s=grace_s, cached_tokens=cached
        )
        ctx.act(told)
