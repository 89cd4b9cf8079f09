"""What the place that is nearest to taking a request lacks: why it is refused.

A place is an instance of its deployment that is not full, loading ones too, or a node that may have
another. Each is asked as if the request came this moment, for what it lacks has nothing to do with
how long this one has waited. Nearest is, in this order, a place that

1. would take it, late if need be: this one has waited for too long. One that would be in time even
   so is refused for what its last try found: it was tried again too late, or not at all;
2. lacks memory alone, were all that idles there to go;
3. lacks time alone: for its own first token, else for others', else for all further ones;
4. lacks both.

Before: `deadlines`, which has found that the request waits in vain. After: its client.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mesh.core.controller.instances.kv_cache import Room, room_for
from mesh.core.controller.instances.lifecycle import may_start
from mesh.core.controller.instances.placement import Demand
from mesh.core.controller.instances.pricing import Price
from mesh.core.controller.requests.fairness import must_give_way
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.reasons import RefusalReason, Verdict
from mesh.domain.slo import ColdStart

Place = InstanceEntry | NodeEntry

_NEAREST_FIRST = (Verdict.FIRST_TOKEN_LATE, Verdict.DELAYS_RUNNING, Verdict.TPOT_EXCEEDED)
"""The order of the verdicts about time: the first is the nearest to a place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    reason: RefusalReason
    loaded: bool = True
    """The place is an instance that is there."""


NO_PLACE = Lack(reason=RefusalReason.QUEUE_TIMEOUT)
"""Where every instance is full and no further one may start, or none was tried."""


def lack_of_nearest(
    ctx: EventContext, entry: DeploymentEntry, request: RequestEntry
) -> Lack | None:
    """What the nearest place lacks, or `None` when every place is full. Only some of many places
    are looked at (see `EventContext.looks_left`): without a look, what the last try found holds.
    """
    as_new = RequestEntry(
        original=request.original,
        slo=request.slo,
        has_own_slo=request.has_own_slo,
        pace=request.pace,
        arrival_s=ctx.now_s,
        output_tokens=list(request.output_tokens),
        slack_s=request.slack_s,
    )
    loaded = any(instance.is_loaded for instance in entry.instances.values())
    may_be_late = request.slo.cold_start is ColdStart.LATE and not loaded
    roomy: list[tuple[Place, Room]] = []
    full: list[Place] = []
    for place in _places(ctx, entry):
        room = _room(ctx, entry, place, as_new)
        if room is None:
            full.append(place)
        else:
            roomy.append((place, room))
    said: list[Verdict] = []
    for place, room in roomy:
        if not ctx.looks_left:
            break
        verdict = _verdict(ctx, entry, place, as_new, late=may_be_late, room=room)
        if verdict is Verdict.PASSES and must_give_way(ctx, _node(place), request):
            verdict = Verdict.DELAYS_RUNNING
        if verdict is Verdict.PASSES:
            late = _verdict(ctx, entry, place, request, room=room)
            return _by_last_try(request) if late is Verdict.PASSES else _of_time(late)
        said.append(verdict)
    for place in full:
        if not ctx.looks_left:
            break
        if _verdict(ctx, entry, place, as_new, late=may_be_late) is Verdict.PASSES:
            return _memory_of(place)
    if said:
        return _of_time(min(said, key=_NEAREST_FIRST.index))
    if roomy:
        return _by_last_try(request)
    return _memory_of(full[0]) if full else None


def _of_time(verdict: Verdict) -> Lack:
    return Lack(reason=RefusalReason(verdict))


def _by_last_try(request: RequestEntry) -> Lack:
    """Why it has no place, by the last node that it was tried on; it waited in vain for a try if
    there was none.
    """
    last = request.refusals.last
    return NO_PLACE if last is None else _of_time(last)


def _memory_of(place: Place) -> Lack:
    loaded = isinstance(place, InstanceEntry)
    return Lack(reason=RefusalReason.MEMORY_FULL, loaded=loaded)


def _places(ctx: EventContext, entry: DeploymentEntry) -> Iterator[Place]:
    for instance in entry.instances.values():
        if instance.takes_requests and not instance.is_full:
            yield instance
    if not may_start(ctx, entry):
        return
    for node in ctx.cell.nodes.values():
        if ctx.takes_another(node, entry):
            yield node


def _node(place: Place) -> NodeEntry:
    return place.node if isinstance(place, InstanceEntry) else place


def _room(
    ctx: EventContext, entry: DeploymentEntry, place: Place, request: RequestEntry
) -> Room | None:
    if isinstance(place, InstanceEntry):
        return room_for(ctx, entry, place, request)
    return Demand(ctx, entry, (request,)).room(place)


def _verdict(
    ctx: EventContext,
    entry: DeploymentEntry,
    place: Place,
    request: RequestEntry,
    *,
    late: bool = False,
    room: Room | None = None,
) -> Verdict:
    """What validation says; `late`: the request may wait for a load though it will be late."""
    if not ctx.policy.promises:
        return Verdict.PASSES
    ctx.note_look()
    instance = place if isinstance(place, InstanceEntry) else None
    price = Price(ctx, None, entry, _node(place), instance, request, room, late=late)
    return price.forecast().verdict
