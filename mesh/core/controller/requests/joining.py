"""A place for a request: whether there is room, what becomes of it there, and whether the policy
lets it join.

A place is an instance, loaded or not, or a node that may have another one. What an instance has
refused is remembered and not validated again. Before: `queueing` and `cold_starts`, which look for
places, and `nearest_place`, which tells what they lack. After: `submitting`.
"""

from math import inf

from mesh.core.controller.instances.kv_cache import Room, room_for
from mesh.core.controller.instances.node_schedule import Forecast
from mesh.core.controller.instances.offer import Offer
from mesh.core.controller.instances.placement import MARGIN_SHARE, Demand
from mesh.core.controller.instances.prefixes import cached_tokens
from mesh.core.controller.instances.pricing import Price
from mesh.core.controller.requests.fairness import must_give_way, note_overtaken
from mesh.core.controller.requests.plan_books import joined
from mesh.core.controller.requests.submitting import promise, submit
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.lifecycle import InstanceState
from mesh.domain.reasons import Verdict
from mesh.policy.plans import Plan

Place = InstanceEntry | NodeEntry

_UNSEEN = {verdict: Forecast(verdict=verdict) for verdict in Verdict}
"""What is said of a place without a forecast."""


def join(
    ctx: EventContext,
    entry: DeploymentEntry,
    plan: Plan,
    request: RequestEntry,
    offer: Offer,
    *,
    loaded: bool | None = None,
    late: bool = False,
) -> bool | None:
    """Submit a request to the loaded instance of a plan, or promise it a load that is under way,
    where it has room and time there, or may be `late`; `loaded` alone, or not, if that is given.
    None: no validations are left to try instances that are `loaded`.
    """
    instance = joined(ctx, plan, request, offer, loaded=loaded)
    if instance is None:
        return False
    room = room_for(ctx, entry, instance, request)
    if room is None:
        request.refusals.note_no_room()
        return False
    if loaded and ctx.policy.promises and not ctx.validations_left:
        return None
    price = priced(ctx, entry, plan, instance, request, room, late=late)
    if price is None:
        return False
    if instance.state is InstanceState.LOADING:
        promise(ctx, price, late_s(ctx, request, price.first_token_s) if late else 0.0)
        return True
    first_token_s = inf if price.seen is None else price.seen.first_token_s
    take(ctx, entry, request, instance, room, late_s(ctx, request, first_token_s) if late else 0.0)
    return True


def take(
    ctx: EventContext,
    entry: DeploymentEntry,
    request: RequestEntry,
    instance: InstanceEntry,
    room: Room,
    grace_s: float = 0.0,
) -> None:
    """Submit a request that waits to a loaded instance; its first token comes so much after its
    limit.
    """
    note_overtaken(ctx, instance.node, request)
    submit(ctx, entry, request, instance, room, grace_s)
    entry.dequeue(request)


def late_s(ctx: EventContext, request: RequestEntry, first_token_s: float) -> float:
    """By how much it is told to be late, with a margin: loads take longer as often as not. Where
    nothing forecasts its first token, it is not expected to be.
    """
    if first_token_s == inf:
        return 0.0
    margin_s = MARGIN_SHARE * (first_token_s - ctx.now_s)
    return max(first_token_s + margin_s - request.due_s, 0.0)


def priced(
    ctx: EventContext,
    entry: DeploymentEntry,
    plan: Plan,
    instance: InstanceEntry,
    request: RequestEntry,
    room: Room | None = None,
    *,
    late: bool = False,
) -> Price | None:
    """The price of a join, if the policy lets it be; if not, the request knows why. What was
    promised with the load was tested then, and others with it in mind, unless by an estimate that
    the first of them is to try out.
    """
    late, node = late or request.accepted, instance.node
    price = _Remembered(ctx, plan, entry, node, instance, request, room, late=late)
    if request.waits_for is instance and instance.profile and instance.profile.measured:
        return price
    verdict = price.verdict()
    if verdict is Verdict.PASSES:
        return price
    request.refusals.note(verdict)
    return None


class _Remembered(Price):
    """A refusal of a loaded instance is known without a validation if an earlier request has to be
    let through, or it has refused one that was no longer; see `state.refusals`.
    """

    def validate(self) -> Forecast:
        ctx, instance, request = self.ctx, self.instance, self.request
        assert instance is not None
        assert request is not None
        if instance.state is InstanceState.LOADING:
            ctx.note_validation(self.node)
            return self.forecast()
        if must_give_way(ctx, self.node, request):
            return _UNSEEN[Verdict.DELAYS_RUNNING]
        refusals, left = ctx.cell.refusals, request.tokens - cached_tokens(instance, request)
        known = refusals.why_refuses(instance, request, left)
        if known is not None:
            if known is Verdict.TPOT_EXCEEDED:
                # Counts as one all the same: an event must not go through every full instance.
                ctx.note_validation()
            return _UNSEEN[known]
        ctx.note_validation(self.node)
        forecast = self.forecast()
        if forecast.verdict is not Verdict.PASSES:
            refusals.note_refused(instance, request, left, forecast.verdict)
            care = self.node.rule.overestimate
            if forecast.in_time_as_predicted(request.due_s, ctx.now_s, care):
                request.refusals.note_in_time_as_predicted()
        return forecast


def room_at(
    ctx: EventContext, entry: DeploymentEntry, place: Place, request: RequestEntry
) -> Room | None:
    """The memory for it there; None where that is lacking."""
    if isinstance(place, InstanceEntry):
        return room_for(ctx, entry, place, request)
    return Demand(ctx, entry, (request,)).room(place)


def node_of(place: Place) -> NodeEntry:
    """The node of a place."""
    return place.node if isinstance(place, InstanceEntry) else place
