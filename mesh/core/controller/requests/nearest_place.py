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

from mesh.core.controller.instances.fairness import must_give_way
from mesh.core.controller.instances.kv_cache import Room, room_for
from mesh.core.controller.instances.placement import InstanceNeeds
from mesh.core.controller.instances.pricing import Price
from mesh.core.controller.requests.outlook import Outlook
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.reasons import RefusalReason, Verdict

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


def lack_of_nearest(ctx: EventContext, outlook: Outlook, request: RequestEntry) -> Lack | None:
    """What the nearest place lacks, or `None` when every place is full. Only some of many places
    are looked at (see `EventContext.looks_left`): without a look, what the last try found holds.
    """
    entry = outlook.entry
    as_new = RequestEntry(
        original=request.original,
        slo=request.slo,
        has_own_slo=request.has_own_slo,
        pace=request.pace,
        arrival_s=ctx.now_s,
        output_tokens=list(request.output_tokens),
        slack_s=request.slack_s,
    )
    may_be_late = ctx.policy.may_be_late(as_new, outlook.of(as_new, as_new.due_s - request.due_s))
    found = [(place, _room_at(ctx, entry, place, as_new)) for place in _places(ctx, entry)]
    nearest: Verdict | None = None
    for place, room in sorted(found, key=lambda of: of[1] is None):
        if not ctx.looks_left:
            break
        verdict = _verdict(ctx, entry, place, as_new, room, late=may_be_late)
        if room is None:
            if verdict is Verdict.PASSES:
                return _memory_of(place)
            continue
        if verdict is Verdict.PASSES and must_give_way(ctx, _node_of(place), request):
            verdict = Verdict.DELAYS_RUNNING
        if verdict is Verdict.PASSES:
            late = _verdict(ctx, entry, place, request, room)
            return _by_last_try(request) if late is Verdict.PASSES else _of_time(late)
        nearest = min(nearest or verdict, verdict, key=_NEAREST_FIRST.index)
    if nearest is not None:
        return _of_time(nearest)
    if any(room is not None for _, room in found):
        return _by_last_try(request)
    return _memory_of(found[0][0]) if found else None


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
    if not ctx.may_start(entry):
        return
    for node in ctx.cell.nodes.values():
        if ctx.takes_another(node, entry):
            yield node


def _room_at(
    ctx: EventContext, entry: DeploymentEntry, place: Place, request: RequestEntry
) -> Room | None:
    """The memory for it there; None where that is lacking."""
    if isinstance(place, InstanceEntry):
        return room_for(ctx, entry, place, request)
    return InstanceNeeds(ctx, entry, (request,)).room(place)


def _node_of(place: Place) -> NodeEntry:
    return place.node if isinstance(place, InstanceEntry) else place


def _verdict(
    ctx: EventContext,
    entry: DeploymentEntry,
    place: Place,
    request: RequestEntry,
    room: Room | None,
    *,
    late: bool = False,
) -> Verdict:
    """What validation says; `late`: the request may be late."""
    if not ctx.policy.promises:
        return Verdict.PASSES
    ctx.note_look()
    instance = place if isinstance(place, InstanceEntry) else None
    price = Price(ctx, None, entry, _node_of(place), instance, request, room, late=late)
    return price.forecast().verdict
