"""A place for a request: whether there is room, what becomes of it there, and whether the policy
lets it join.

A place is an instance, loaded or not, or a node that may have another one. What an instance has
refused is remembered and not validated again. Before: `queueing` and `cold_starts`, which look for
places, and `nearest_place`, which tells what they lack. After: `submitting`.
"""

from collections.abc import Collection
from math import inf

from mesh.core.controller.instances.kv_cache import Room, room_for
from mesh.core.controller.instances.loading_lane import loads_end_s
from mesh.core.controller.instances.node_schedule import (
    Forecast,
    forecast_on,
    forecast_on_loading,
)
from mesh.core.controller.instances.offer import Offer
from mesh.core.controller.instances.placement import (
    MARGIN_SHARE,
    Demand,
    Site,
    forecast_on_node,
)
from mesh.core.controller.instances.plan_tests import PlanTests
from mesh.core.controller.instances.prefixes import cached_tokens
from mesh.core.controller.requests.fairness import must_give_way, note_overtaken
from mesh.core.controller.requests.plan_books import joined
from mesh.core.controller.requests.submitting import submit, wait_for
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.ids import InstanceId
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
    there = bool(loaded) or instance.is_loaded
    forecast = forecast_of(ctx, entry, plan, instance, request, loaded=there, late=late)
    if forecast is None:
        return False
    if there:
        grace_s = late_s(ctx, request, forecast.first_token_s) if late else 0.0
        take(ctx, entry, request, instance, room, grace_s)
        return True
    ready_s = loads_end_s(instance.node, ctx.now_s)[instance.instance_id]
    first_token_s = forecast.first_token_s if forecast.first_token_s < inf else ready_s
    grace_s = late_s(ctx, request, first_token_s) if late else 0.0
    spare_s = max(request.due_s + grace_s - first_token_s, 0.0)
    wait_for(ctx, entry, request, instance, room, grace_s, ready_s + spare_s)
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


def forecast_of(
    ctx: EventContext,
    entry: DeploymentEntry,
    plan: Plan,
    instance: InstanceEntry,
    request: RequestEntry,
    *,
    loaded: bool,
    late: bool = False,
) -> Forecast | None:
    """What becomes of the request on the instance of a plan, if the policy lets it join there; if
    not, the request knows why. What was promised with the load was tested then, and others with it
    in mind, unless by an estimate that the first of them is to try out.
    """
    forecast = _UNSEEN[Verdict.PASSES]
    promised = request.waits_for is instance
    if promised and instance.profile and instance.profile.measured:
        return forecast

    def shadow() -> Verdict:
        nonlocal forecast
        may_be_late = late or request.accepted
        forecast = _validate(ctx, entry, instance, request, loaded=loaded, late=may_be_late)
        return forecast.verdict

    tests = PlanTests(ctx, plan, entry, instance, request, shadow)
    verdict = ctx.policy.passes(plan, tests)
    if verdict is Verdict.PASSES:
        return forecast
    request.refusals.note(verdict)
    return None


def _validate(
    ctx: EventContext,
    entry: DeploymentEntry,
    instance: InstanceEntry,
    request: RequestEntry,
    *,
    loaded: bool,
    late: bool,
) -> Forecast:
    """Whether every SLO would be kept with the request there. For a loaded instance a refusal is
    known without a validation if an earlier request has to be let through, or it has refused one
    that was no longer; see `state.refusals`.
    """
    if not loaded:
        ctx.note_validation(instance.node)
        return forecast_at(ctx, entry, instance, request, late=late)
    if must_give_way(ctx, instance.node, request):
        return _UNSEEN[Verdict.DELAYS_RUNNING]
    refusals, left = ctx.cell.refusals, request.tokens - cached_tokens(instance, request)
    known = refusals.why_refuses(instance, request, left)
    if known is not None:
        if known is Verdict.TPOT_EXCEEDED:
            # Counts as one all the same: an event must not go through every full instance.
            ctx.note_validation()
        return _UNSEEN[known]
    ctx.note_validation(instance.node)
    forecast = forecast_on(instance, request, now_s=ctx.now_s, limits=ctx.limits, late=late)
    if forecast.verdict is not Verdict.PASSES:
        refusals.note_refused(instance, request, left, forecast.verdict)
        if forecast.in_time_as_predicted(request.due_s, ctx.now_s, instance.node.rule.overestimate):
            request.refusals.note_in_time_as_predicted()
    return forecast


def forecast_at(
    ctx: EventContext,
    entry: DeploymentEntry,
    place: Place,
    request: RequestEntry,
    *,
    late: bool = False,
    without: Collection[InstanceId] = (),
) -> Forecast:
    """What validation says of a request at a place, `without` the instances that go for a start
    there; `late`: its first token may come after its deadline.
    """
    if isinstance(place, NodeEntry):
        return forecast_on_node(ctx, entry, place, request, late=late, without=without)[1]
    look = forecast_on if place.is_loaded else forecast_on_loading
    return look(place, request, now_s=ctx.now_s, limits=ctx.limits, late=late)


def room_at(
    ctx: EventContext, entry: DeploymentEntry, place: Place, request: RequestEntry
) -> Room | Site | None:
    """The memory for it there; None where that is lacking."""
    if isinstance(place, InstanceEntry):
        return room_for(ctx, entry, place, request)
    return Demand(ctx, entry, (request,)).site(place)


def node_of(place: Place) -> NodeEntry:
    """The node of a place."""
    return place.node if isinstance(place, InstanceEntry) else place
