"""The queues: requests wait per deployment for a place where every SLO is kept, or for a load.

Whenever room appears, and every few hundredths of a second while requests wait, the event ends by
placing what it can, the longest waiting first, and by seeing to loads for what is left. A request
waits as long as there is a way for its first token to be in time; then it is refused, with the
reason. A later request may overtake one that cannot be computed in time yet, but not forever.

A load is promised only to a request that will be in time by it, its place in the lane of its node
and the load's own time included. Where that fails for the sake of the load alone, as for the first
caller of a deployment at zero, the request may be taken late, if its deployment wants that and
nobody else pays for it; it is told at once by how much.

What an event may cost is bounded: the end of a request is looked at on its node alone, and an event
validates `CellLimits.validations_max` times at most; the next one goes on from there.
"""

from collections.abc import Sequence
from math import inf

from mesh.core.controller.instances.kv_cache import Room, missing_bytes, room_for, shrink
from mesh.core.controller.instances.lifecycle import note_idle, start
from mesh.core.controller.instances.pricing import Price
from mesh.core.controller.requests.ending import evict_best_effort, refuse_all_queued
from mesh.core.controller.requests.outlook import (
    Outlook,
    refuse_past_deadline,
    stops_longer,
    without_time,
)
from mesh.core.controller.requests.preemption import may_be_preempted, move_and_unload, preempt
from mesh.core.controller.requests.replicas import keep_minima
from mesh.core.controller.requests.search import InstanceNeeds, Search, StartNodes
from mesh.core.controller.requests.submitting import take
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.actions import TellWaiting
from mesh.domain.events import PlaceRetryDue
from mesh.domain.ids import NodeId
from mesh.domain.lifecycle import InstanceState, RequestState
from mesh.domain.reasons import RefusalReason, Verdict
from mesh.domain.units import format_bytes
from mesh.memory.station import ReservationKind
from mesh.policy.plans import Start

RETRY_SHARE_LEAST = 0.2
"""The least time between two tries, as a share of the usual one, however soon a request would have
to begin.
"""


def retry(ctx: EventContext) -> None:
    """Some time has passed for those who wait: try them, over several events if need be."""
    cell = ctx.cell
    cell.set_retry(None)
    ctx.note_retries()
    waiting = cell.with_queues()
    waiting.sort(key=lambda entry: (entry.spec.name <= cell.retried, entry.spec.name))
    for entry in waiting:
        _place_promised(ctx, entry)
    for entry in waiting:
        if ctx.validations_left > 0:
            _place_waiting(ctx, entry)
            cell.note_retried(entry)
    _see_to(ctx, waiting, whole_queues=True)


def offer(ctx: EventContext, instance: InstanceEntry) -> None:
    """Place what waits for an instance before it is parked or unloaded: the pause after a failed
    grow may just be over.
    """
    owner = ctx.cell.deployments.get(instance.deployment)
    if owner is not None and owner.queue:
        _place_all(ctx, [(owner, instance)])


def fill(ctx: EventContext) -> None:
    """Place what waits, where memory or a node came free, or the queue itself may find a place."""
    waiting = ctx.take_woken()
    if len(waiting) > 1:
        waiting.sort(key=lambda d: (d.queue[0].rank, d.spec.name))
    _place_all(ctx, [(entry, None) for entry in waiting])
    # Only after every queue has been tried: an idle instance that its own queue can use must not
    # be unloaded for another deployment.
    _see_to(ctx, waiting)


def _see_to(
    ctx: EventContext, waiting: list[DeploymentEntry], *, whole_queues: bool = False
) -> None:
    """For requests that were not placed: load instances, refuse what is too late, try again."""
    for entry in waiting:
        if entry.queue:
            find_loads(ctx, entry)
    # Only then is it known what is left for whom.
    lanes: dict[tuple[NodeId, ReservationKind], float] = {}
    for entry in waiting:
        if entry.queue:
            # Only a look at the whole queue tells it of those who were not tried.
            without = without_time(ctx, entry) if whole_queues else frozenset()
            refuse_past_deadline(Outlook(ctx=ctx, entry=entry, lanes=lanes, without_time=without))
    if ctx.cell.retry_at_s is None and any(entry.queue for entry in waiting):
        at_s = _retry_at_s(ctx, waiting)
        ctx.cell.set_retry(at_s)
        ctx.set_timer(at_s, PlaceRetryDue())


def _retry_at_s(ctx: EventContext, waiting: list[DeploymentEntry]) -> float:
    """Soon; sooner where somebody would have to begin by then, so that a refusal is with its client
    before the first token was due.
    """
    after_s = ctx.limits.place_retry_s
    latest = (ctx.latest_start_s(request) for entry in waiting for request in entry.queue)
    first_s = min((at_s for at_s in latest if at_s and at_s > ctx.now_s), default=inf)
    return ctx.now_s + min(after_s, max(first_s - ctx.now_s, after_s * RETRY_SHARE_LEAST))


def fill_released(ctx: EventContext) -> None:
    """Place what waits for instances that lost a request, or for others on their nodes."""
    if not ctx.released:
        return
    nodes = {instance.node.node_id: instance.node for instance in ctx.released.values()}
    found = [
        (owner, instance)
        for node in nodes.values()
        for instance in node.instances.values()
        if (owner := ctx.cell.deployments.get(instance.deployment)) and owner.queue
    ]
    found.sort(key=lambda of: (of[0].queue[0].rank, of[1].instance_id))
    _place_all(ctx, found)


def settle_released(ctx: EventContext) -> None:
    """What the queues did not refill shrinks, and idles if it has no request."""
    for instance in ctx.take_released():
        shrink(ctx, instance)
        alive = instance.state in (InstanceState.READY, InstanceState.DRAINING)
        if alive and not instance.requests:
            note_idle(ctx, instance)
            ctx.wake_all()
    if ctx.all_woken:
        keep_minima(ctx)


def _place_all(
    ctx: EventContext, tried: Sequence[tuple[DeploymentEntry, InstanceEntry | None]]
) -> None:
    """Place what waits, on one instance alone if it is given. Those whose load is over come first:
    nobody else takes the time that they were promised.
    """
    for entry, only in tried:
        if entry.instances:
            _place_promised(ctx, entry, only)
    for entry, only in tried:
        _place_waiting(ctx, entry, only)


def _place_promised(
    ctx: EventContext, entry: DeploymentEntry, only: InstanceEntry | None = None
) -> None:
    loaded = [r for r in entry.queue if r.waits_for is not None and r.waits_for.takes_now]
    tries = TRIES_MAX
    for request in loaded:
        if not _place(ctx, entry, request, only):
            tries -= 1
            if not tries:
                return


def _place_waiting(
    ctx: EventContext, entry: DeploymentEntry, only: InstanceEntry | None = None
) -> None:
    """Place what can be placed, in order, each class as if it waited alone. Behind a request that
    would be late, or that a policy without promises has no place for, another may fit; behind one
    that was TPOT_EXCEEDED only a shorter one, and of a deployment without classes, under a policy
    that promises, none: in overload those that overtake cost more than they are (docs/compute.md).
    Behind one that lacks memory alone none is tried: smaller ones would keep taking what it waits
    for.
    """
    if not entry.instances and entry.queue:
        entry.queue[0].refusals.try_again()
        return
    tries: dict[str, int] = {}
    exceeded: dict[str, int] = {}
    for request in list(entry.queue):
        name, own = request.slo.name, request.has_own_slo
        tried = tries.get(name, 0)
        if request.waits_for is not None or request.follows or tried == TRIES_MAX:
            continue
        if request.state is not RequestState.QUEUED:
            continue  # A plan for one before it has refused it.
        if not own and request.tokens >= exceeded.get(name, inf):
            continue
        if not (_place(ctx, entry, request, only) or _evict_for(ctx, entry, request, only)):
            tries[name] = tried + 1
            refusals = request.refusals
            if stops_longer(request):
                if name in exceeded:  # As if it had not been tried: no load is looked for.
                    refusals.try_again()
                exceeded[name] = request.tokens
                if ctx.policy.promises and not entry.spec.classes:
                    tries[name] = TRIES_MAX
            elif not (own or refusals.verdict) and (
                ctx.policy.promises or refusals.short_of_memory
            ):
                tries[name] = TRIES_MAX
            if not entry.spec.classes and tries[name] == TRIES_MAX:
                return


def _evict_for(
    ctx: EventContext, entry: DeploymentEntry, request: RequestEntry, only: InstanceEntry | None
) -> bool:
    """Place a request with limits on an instance where best effort has the memory or the places
    that it lacks, and where it passes: as many of those leave as need be.
    """
    if request.slo.best_effort or request.state is not RequestState.QUEUED or not ctx.may_evict:
        return False

    def room(instance: InstanceEntry, without: Sequence[RequestEntry] = ()) -> Room | None:
        if instance.free_places + len(without) <= len(request.mates):
            return None
        return room_for(ctx, entry, instance, request, request.mates, without)

    tried = [i for i in (entry.candidates if only is None else (only,)) if i.best_effort]
    open_ = [i for i in tried if i.takes_now and not room(i) and room(i, i.best_effort)]
    if not open_:
        return False
    price = next(Search(ctx=ctx, entry=entry, request=request).without_room(open_), None)
    if price is None:
        return False
    assert price.instance is not None
    while (found := room(price.instance)) is None:
        evict_best_effort(ctx, price.instance)
    price.room = found
    take(ctx, price)
    return True


def _place(
    ctx: EventContext, entry: DeploymentEntry, request: RequestEntry, only: InstanceEntry | None
) -> bool:
    refusals = request.refusals
    before = refusals.try_again()
    joins = None if only is None else (only,)
    search = Search(ctx=ctx, entry=entry, request=request, joins=joins, loaded=True)
    price = search.first()
    if price is not None:
        take(ctx, price)
        return True
    if search.deferred and only is not None:
        ctx.wake(entry.spec.name)
    if request.state is RequestState.ENDED:
        return False
    whole = only is None and not search.stopped
    if whole and refusals.short_of_memory and request is entry.queue[0]:
        return _preempt(ctx, entry, request)
    if not whole:
        # Not every instance was tried: what the others said before still holds.
        refusals.keep(before)
    return False


def _preempt(ctx: EventContext, entry: DeploymentEntry, request: RequestEntry) -> bool:
    """Place a request in the memory of smaller neighbours."""

    def lacking_bytes(instance: InstanceEntry) -> int:
        return missing_bytes(ctx, entry, instance, request, request.mates)

    open_ = [i for i in entry.candidates if i.takes_now and i.has_places_for(request)]
    lacking = (i for i in open_ if lacking_bytes(i))
    for price in Search(ctx=ctx, entry=entry, request=request).without_room(lacking):
        assert price.instance is not None
        if preempt(ctx, price.instance, lacking_bytes(price.instance)):
            price.room = price.room_now()
            if price.room is not None:
                take(ctx, price)
            # If not, an idle instance beside it has to stay now; see `requests.preemption`.
            return price.room is not None
    return False


def tell_waiting(ctx: EventContext, entry: DeploymentEntry, phase: str, share: float) -> None:
    for request in entry.queue:
        if request.request_id in ctx.cell.orphans:
            continue
        ctx.act(TellWaiting(request_id=request.original.request_id, phase=phase, share=share))


TRIES_MAX = 4
"""Waiting requests of a deployment that an event tries in vain one after the other, for a place or
for a load, before the others wait for the next one.
"""


def find_loads(ctx: EventContext, entry: DeploymentEntry) -> None:
    """Promise loads to those who wait, under way or begun for them. Under a policy that does not
    promise only those are looked at by themselves for whom it would rather start an instance.
    """
    waiting = [request for request in entry.queue if request.waits_for is None]
    if not ctx.policy.promises:
        waiting = [request for request in waiting if request.request_id in ctx.deferred]
    tries = TRIES_MAX
    for request in waiting:
        if not tries or not ctx.validations_left or _tries_estimate(entry, request):
            break
        if request.follows or request.state is not RequestState.QUEUED:
            continue  # Looking for another one's may have refused it.
        if not _find_load(ctx, entry, request):
            tries -= 1
    if not ctx.policy.promises and entry.queue:
        _load_for_all(ctx, entry)


def _find_load(ctx: EventContext, entry: DeploymentEntry, request: RequestEntry) -> bool:
    """Whether one is promised to the request now."""
    if _look(ctx, entry, request):
        return True
    if request.slo.best_effort or request.accepted or request.state is not RequestState.QUEUED:
        return False
    outlook = Outlook(ctx=ctx, entry=entry).of(request)
    late = ctx.policy.may_be_late(request, outlook)
    if late and _look(ctx, entry, request, late=True):
        return True
    if not _displace_best_effort(ctx, entry, request, late=late and not entry.replicas()):
        return False
    return _look(ctx, entry, request) or (late and _look(ctx, entry, request, late=True))


def _displace_best_effort(
    ctx: EventContext, entry: DeploymentEntry, request: RequestEntry, *, late: bool
) -> bool:
    """Have instances with best effort alone go from a node that lacks memory and nothing else for a
    load, where that makes it fit; whether they do.
    """
    deployment = entry.made
    if request.state is not RequestState.QUEUED:
        return False  # The policy has refused it meanwhile.
    if request.slo.best_effort or not ctx.mixed_nodes or not ctx.may_start(entry):
        return False
    needs: InstanceNeeds | None = None
    for node in ctx.mixed_nodes:
        alone = [i for i in node.instances.values() if 0 < i.batch == len(i.best_effort)]
        alone = [i for i in alone if may_be_preempted(ctx, i)]
        if not alone or not ctx.may_evict or not ctx.may_validate:
            continue
        needs = needs or InstanceNeeds(ctx, entry, (request,))
        if not ctx.takes_another(node, entry) or needs.room(node) is not None:
            continue
        footprint, share = node.footprint_of(deployment), node.shared_weights_of(deployment)
        least_bytes = footprint.instance_bytes(needs.kv_blocks(node, footprint)[0])
        lacks_bytes = least_bytes - node.free_bytes_for(deployment)
        idle = [i.instance_id for i in node.instances.values() if node.may_go(i)]
        alone.sort(key=lambda i: (i.batch, i.instance_id))
        for count in range(1, len(alone) + 1):
            gone = [*idle, *(i.instance_id for i in alone[:count])]
            if node.station.freed_bytes(gone, share) < lacks_bytes:
                continue
            plan = Start(request=request, node=node)
            price = Price(ctx, plan, entry, node, None, request, late=late)
            if price.verdict() is Verdict.PASSES and move_and_unload(ctx, alone[:count]):
                return True
            break
    return False


def _look(
    ctx: EventContext, entry: DeploymentEntry, request: RequestEntry, *, late: bool = False
) -> bool:
    """Try loads that are under way, and starts, in the order in which the policy has them; loaded
    instances too, where it has asked for starts before them, or the request may be `late`. One that
    is loaded for a request that will be late is the first of its deployment, where memory is free,
    or where idle instances can go and no other load is promised.
    """
    may_start = ctx.may_start(entry) and not (late and entry.replicas())
    on = StartNodes(ctx.cell.nodes.values, free=late or request.slo.best_effort)
    search = Search(
        ctx=ctx,
        entry=entry,
        request=request,
        late=late,
        start_nodes=on if may_start else None,
    )
    price = search.first()
    if price is not None:
        take(ctx, price)
    elif not late:
        _refuse_in_vain(ctx, entry, search.never_has_room())
    return price is not None


def _tries_estimate(entry: DeploymentEntry, request: RequestEntry) -> bool:
    """Whether time is lacking where the first request of an instance is just showing how far the
    estimate of its times is off.
    """
    return request.refusals.verdict is not None and any(
        instance.takes_now and instance.requests and instance.correction.trial_left
        for instance in entry.instances.values()
    )


def _load_for_all(ctx: EventContext, entry: DeploymentEntry) -> None:
    """Under a policy that does not validate: load another instance for those who wait, unless those
    that load will hold them all.
    """
    loading = (i for i in entry.instances.values() if i.state is InstanceState.LOADING)
    coming = sum(instance.batch_max for instance in loading)
    if coming < len(entry.queue) and ctx.may_start(entry):
        request = entry.queue[0]
        search = Search(
            ctx=ctx,
            entry=entry,
            request=request,
            joins=(),
            start_nodes=StartNodes(ctx.cell.nodes.values),
        )
        price = search.first()
        if request.state is not RequestState.QUEUED:
            ctx.wake(entry.spec.name)  # The policy has refused it.
        elif price is None and _displace_best_effort(ctx, entry, request, late=True):
            ctx.wake(entry.spec.name)
        elif price is not None:
            start(ctx, price)
        else:
            _refuse_in_vain(ctx, entry, search.never_has_room())


def _refuse_in_vain(
    ctx: EventContext, entry: DeploymentEntry, lacks: tuple[int, int] | None
) -> None:
    """No node could ever hold an instance: nobody needs to wait for one."""
    if lacks is not None and not entry.instances:
        needed_bytes, largest_bytes = lacks
        message = (
            f"{entry.spec.name!r} needs {format_bytes(needed_bytes)} on a node; "
            f"the largest has {format_bytes(largest_bytes)}"
        )
        hint = "lower spec.context_tokens_max, or start a node with more --memory"
        refuse_all_queued(ctx, entry, RefusalReason.MEMORY_FULL, message, hint=hint)
