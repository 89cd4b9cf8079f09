"""When waiting has become pointless, and what the client is told then.

A request waits as long as one way is open for its first token to be in time: a place on a loaded
instance, which comes free when those that run are expected to end, or a load that would be over
early enough. What a place has time for is looked at for the whole queue at once. As soon as none
is, it is refused, with the time at which a place is expected. One that was accepted has a promise,
and waits for as long as any request may.
"""

from collections.abc import Iterator
from itertools import islice
from math import inf

from mesh.core.controller.instances.loading_lane import lane_ends_s, plan_load
from mesh.core.controller.instances.node_schedule import alone_s, without_time_on
from mesh.core.controller.instances.placement import Demand
from mesh.core.controller.instances.prefixes import cached_tokens
from mesh.core.controller.requests.departures import Departures
from mesh.core.controller.requests.ending import refuse
from mesh.core.controller.requests.nearest_place import NO_PLACE, Lack, lack_of_nearest
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.ids import NodeId, RequestId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.reasons import RefusalReason, Verdict
from mesh.domain.steps import LoadTier
from mesh.memory.station import ReservationKind

RETRY_S_LEAST, RETRY_S_MOST = 0.5, 60.0
"""Clients that are refused for want of a place are told to come again after a time within these
bounds.
"""
LOOKED_AT = 8
"""This many requests of a queue that are looked at together cost what the validation of one
does.
"""
GUESSED_SHARE_MOST = 0.5
"""An estimated profile may say that a request takes this share of the time until its first token is
due, and no more: an estimate may be off by a multiple, and a request that was never tried is not
refused by one alone.
"""


class LaneEnds:
    """When all loads of each node are over, by their kind, worked out once while none begins."""

    def __init__(self, now_s: float) -> None:
        self._now_s = now_s
        self._known: dict[tuple[NodeId, ReservationKind], float] = {}

    def at_s(self, node: NodeEntry, kind: ReservationKind) -> float:
        known_s = self._known.get((node.node_id, kind))
        if known_s is None:
            known_s = self._known[node.node_id, kind] = lane_ends_s(node, self._now_s, kind)
        return known_s


def refuse_hopeless(
    ctx: EventContext, entry: DeploymentEntry, lanes: LaneEnds, *, whole_queue: bool = False
) -> None:
    """Refuse the requests in the deployment's queue that cannot be in time any more. Only with a
    look at the `whole_queue` is it known of those who were not tried.
    """
    without_time = _without_time(ctx, entry) if whole_queue else frozenset()
    departures, loads = Departures(ctx.cell, entry, ctx.now_s), _Loads(ctx, entry, lanes)
    # Behind a head that was TPOT_EXCEEDED none was tried: it holds for requests of any length.
    head = next((request for request in entry.queue if request.waits_for is None), None)
    none_tried = head is not None and _stops_queue(head)
    ahead = ahead_without_time = 0
    lack: Lack | None = None
    for request in list(entry.queue):
        waited_out = ctx.now_s - request.waits_since_s >= ctx.limits.queue_wait_s_max
        if request.waits_for is not None and not (waited_out and request.waits_for.is_loaded):
            continue
        if none_tried and request.refusals.verdict is None and not request.has_own_slo:
            request.refusals.note(Verdict.TPOT_EXCEEDED)
        no_time_left = request.original.request_id in without_time
        before = ahead_without_time if no_time_left else ahead
        if not waited_out and (
            request.accepted
            or not ctx.policy.refuses_late
            or _may_be_in_time(
                ctx, entry, request, loads, departures, before, no_time_left=no_time_left
            )
        ):
            ahead += 1
            ahead_without_time += no_time_left
            continue
        lack, message = _why(ctx, entry, request, lack)
        reason = lack.reason
        if _too_long(ctx, request):
            too_slow = ctx.cell.refusals.latest_start_s(request) == -inf
            raises = "raise its SLO" if request.has_own_slo else "raise spec.slo.tpot_s"
            remedy = raises if too_slow else "shorten the prompt, or raise its SLO"
            refuse(ctx, request, reason, message, hint=f"no node is quick enough: {remedy}")
        elif reason is RefusalReason.LOAD_FAILED:
            retry_s = max(entry.pause_left_s(ctx.now_s), RETRY_S_LEAST)
            refuse(ctx, request, reason, message, retry_after_s=retry_s)
        else:
            expected_s = min(departures.at_s(ahead), loads.earliest_s())
            told_s = entry.note_told_to_return(
                expected_s, departures.apart_s, now_s=ctx.now_s, wait_s_max=RETRY_S_MOST
            )
            retry_s = max(told_s - ctx.now_s, RETRY_S_LEAST)
            refuse(ctx, request, reason, message, retry_after_s=retry_s)


def _stops_queue(head: RequestEntry) -> bool:
    """Whether what it was refused for holds for all behind it."""
    return head.refusals.verdict is Verdict.TPOT_EXCEEDED and not head.has_own_slo


def _may_be_in_time(
    ctx: EventContext,
    entry: DeploymentEntry,
    request: RequestEntry,
    loads: "_Loads",
    departures: Departures,
    ahead: int,
    *,
    no_time_left: bool,
) -> bool:
    """Whether a way is open: a load, or a place when so many `ahead` have theirs."""
    latest_s = latest_start_s(ctx, entry, request)
    if latest_s < request.arrival_s:
        return False
    if not ctx.policy.promises:
        # It is served late by the load that it waits for.
        coming = any(i.state is InstanceState.LOADING for i in entry.instances.values())
        return coming or ctx.now_s < latest_s
    if ctx.now_s >= latest_s:
        return False
    if loads.lost or loads.one_over_by(latest_s):
        return True
    instances = entry.instances.values()
    if not no_time_left and any(_may_change(instance, request) for instance in instances):
        return True
    return min(departures.at_s(ahead), loads.grows_s) <= latest_s


def _without_time(ctx: EventContext, entry: DeploymentEntry) -> frozenset[RequestId]:
    """The waiting requests for which no loaded instance will have time unless another request ends,
    with those ahead of them computed first. Only the first of a long queue are looked at: so many
    that all of it costs no more than the validations that are left to the event.
    """
    if not ctx.policy.promises:
        return frozenset()
    looks = sum(instance.takes_now for instance in entry.candidates)
    most = LOOKED_AT * (ctx.validations_left // max(looks, 1))
    waiting = (r for r in entry.queue if r.waits_for is None and not r.has_own_slo)
    left = list(islice(waiting, most))
    for instance in entry.candidates:
        if not left:
            break
        if not instance.takes_now:
            continue
        ctx.note_validations(-(-len(left) // LOOKED_AT))
        left = without_time_on(instance, left, now_s=ctx.now_s, limits=ctx.limits)
    return frozenset(request.original.request_id for request in left)


def _may_change(instance: InstanceEntry, request: RequestEntry) -> bool:
    """Whether an instance may take it soon though nobody ends: those that run get ahead of their
    deadlines and leave time for its prompt, or memory comes free that is on its way.
    """
    said, station = request.refusals, instance.node.station
    if not instance.takes_now:
        return False
    if said.short_of_memory:
        return bool(station.waiting() or station.running_reservations())
    passing = None, Verdict.DELAYS_RUNNING, Verdict.POLICY
    return said.in_time_as_predicted or said.verdict in passing


def latest_start_s(ctx: EventContext, entry: DeploymentEntry, request: RequestEntry) -> float:
    """When it has to begin on the quickest node of the cell for its first token to be in time."""
    latest_start_s = ctx.cell.refusals.latest_start_s(request)
    if latest_start_s is None:
        latest_start_s = request.due_s - _quickest_s(ctx, entry, request)
        ctx.cell.refusals.note_latest_start(request, latest_start_s)
    return latest_start_s


class _Loads:
    """When one more load of a deployment could be over, and what else holds for all who wait. Of a
    large cell some nodes are looked at; most of the time the first of them says enough.
    """

    def __init__(self, ctx: EventContext, entry: DeploymentEntry, lanes: LaneEnds) -> None:
        self.lost = not has_node(ctx, entry)
        """No node may hold it: the one that did may come back."""
        full = entry.replicas() >= entry.spec.scaling.replicas_max
        self._ends_s = iter(()) if full else _loads_end_s(ctx, entry, lanes)
        self._earliest_s = next(self._ends_s, inf)
        grow_s = (i.grow_again_s for i in entry.instances.values())
        self.grows_s = min((at_s for at_s in grow_s if at_s > ctx.now_s), default=inf)
        """When the next of its KV caches may be tried to grow again."""

    def one_over_by(self, at_s: float) -> bool:
        return self._earliest_s <= at_s or self.earliest_s() <= at_s

    def earliest_s(self) -> float:
        """Infinite if there may be none."""
        self._earliest_s = min((self._earliest_s, *self._ends_s))
        return self._earliest_s


def _loads_end_s(ctx: EventContext, entry: DeploymentEntry, lanes: LaneEnds) -> Iterator[float]:
    deployment, looks = entry.deployment, ctx.limits.validations_max
    assert deployment is not None
    taken = [i.node for i in entry.instances.values() if i.state is not InstanceState.UNLOADING]
    most = ctx.policy.instances_per_node
    demand = Demand(ctx, entry, entry.queue)
    for node in ctx.cell.nodes.values():
        if not looks:
            return
        if ctx.takes(node, entry.spec) and taken.count(node) < most:
            looks -= 1
            # Weights that the host has may go with those who make room.
            in_host = node.tier_of(deployment) is LoadTier.HOST
            room = demand.room(node) if in_host else None
            without = room.reclaim if room is not None else ()
            planned = plan_load(ctx, deployment, node, without)
            begins_s = max(lanes.at_s(node, planned.kind), entry.paused_until_s)
            yield begins_s + planned.load_s


def _too_long(ctx: EventContext, request: RequestEntry) -> bool:
    """Whether it would have been late even if it had computed at once, and alone."""
    latest_start_s = ctx.cell.refusals.latest_start_s(request)
    return latest_start_s is not None and latest_start_s < request.arrival_s


def _quickest_s(ctx: EventContext, entry: DeploymentEntry, request: RequestEntry) -> float:
    """Seconds to its first token on the quickest node. Measured profiles count alone: a correction
    is of one instance, and passes. An estimate counts as iterations have corrected it, the quickest
    instance first, and for a part of the time that there is; where none has been tried it says
    nothing. It never takes less than the way to the client, so that a refusal is there before the
    first token was due.
    """
    deployment = entry.deployment
    assert deployment is not None
    seen: dict[str, float] = {}
    cached = max((cached_tokens(i, request) for i in entry.instances.values()), default=0)
    most_s = GUESSED_SHARE_MOST * (request.due_s - request.arrival_s)
    for node in ctx.cell.nodes.values():
        fingerprint = node.hello.fingerprint
        if fingerprint in seen or not ctx.takes(node, entry.spec):
            continue
        footprint = node.footprint_of(deployment)
        profile = ctx.cell.expectations.profile(deployment.model, footprint, node.hello)
        if profile.measured:
            seen[fingerprint] = alone_s(profile, request, node.rule, ctx.limits, cached=cached)
        else:
            seen[fingerprint] = min(_tried_s(ctx, entry, request, fingerprint, cached), most_s)
    return min(seen.values(), default=min(ctx.limits.delivery_s_max, most_s))


def _tried_s(
    ctx: EventContext, entry: DeploymentEntry, request: RequestEntry, fingerprint: str, cached: int
) -> float:
    """The same by estimates that iterations on such nodes have corrected; the way to the client
    where there are none.
    """
    seconds = (
        alone_s(i.profile, request, i.node.rule, ctx.limits, i.correction.latest, cached)
        for i in entry.instances.values()
        if i.profile and i.node.hello.fingerprint == fingerprint and not i.correction.trial_left
    )
    return min(seconds, default=ctx.limits.delivery_s_max)


def _why(
    ctx: EventContext, entry: DeploymentEntry, request: RequestEntry, before: Lack | None
) -> tuple[Lack, str]:
    """What it is refused for, and in words. `before`: what the one before it was."""
    waited = f"{ctx.now_s - request.queued_at_s:.1f} s"
    if not has_node(ctx, entry):
        if request.attempt:
            message = f"its node was lost, and no other came up within {waited}"
            return Lack(reason=RefusalReason.NODE_LOST), message
        return Lack(reason=RefusalReason.NO_NODE), f"no node came up within {waited}"
    if entry.load_failures and not entry.replicas():
        message = f"not loaded within {waited}: {entry.load_error}"
        return Lack(reason=RefusalReason.LOAD_FAILED), message
    if request.refusals.last is Verdict.POLICY:
        return Lack(reason=RefusalReason.POLICY), request.refusals.message
    if _too_long(ctx, request):
        never = ctx.cell.refusals.latest_start_s(request) == -inf
        lack = Lack(reason=RefusalReason.TPOT_EXCEEDED if never else RefusalReason.FIRST_TOKEN_LATE)
    else:
        known = before if not ctx.looks_left else None
        lack = known or lack_of_nearest(ctx, entry, request) or NO_PLACE
    return lack, _words(entry, request, lack, waited)


def _words(entry: DeploymentEntry, request: RequestEntry, lack: Lack, waited: str) -> str:
    slo, prompt = request.slo, len(request.original.prompt_tokens)
    match lack.reason:
        case RefusalReason.FIRST_TOKEN_LATE:
            limit = f"{slo.ttft_limit_s(prompt):.3g} s"
            return f"its first token would come after its limit, {limit} for {prompt} tokens"
        case RefusalReason.DELAYS_RUNNING:
            return "it would make a request late that came before it"
        case RefusalReason.TPOT_EXCEEDED:
            name = repr(entry.spec.name)
            return f"there is no time left to give {name} its tokens every {slo.tpot_s:.3g} s"
        case RefusalReason.MEMORY_FULL:
            where = "for its KV cache" if lack.loaded else "on a node"
            return f"no memory came free {where} within {waited}"
        case _:
            return f"no place came free within {waited}"


def has_node(ctx: EventContext, entry: DeploymentEntry) -> bool:
    """Whether any node that takes new work may hold the deployment."""
    return any(ctx.takes(node, entry.spec) for node in ctx.cell.nodes.values())
