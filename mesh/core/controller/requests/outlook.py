"""What a request that waits may hope for, and what it is refused for once that is nothing.

It may hope for a place on an instance, or for one more load. An answer is expected to become as
long as those of its deployment have been, and a token of it to take as long as one decode of every
instance of its node; a place comes free when it ends. A policy reads this
(`mesh.policy.views.Outlook`) to decide who waits and who may be late. As soon as it sees no way,
the request is refused, with the time at which a place is expected: what a place has time for is
looked at for the whole queue at once. One that was accepted has a promise, and nobody waits for
longer than any request may. Before: `queueing`. After: `ending`.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import Self

from mesh.core.controller.instances.kv_cache import room_for
from mesh.core.controller.instances.node_schedule import (
    alone_s,
    lane_ends_s,
    loads_end_s,
    plan_load,
    round_s,
    without_time_on,
)
from mesh.core.controller.instances.pricing import MEMORY_ALONE, Price
from mesh.core.controller.requests.ending import refuse
from mesh.core.controller.requests.search import InstanceNeeds
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.ids import NodeId, RequestId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.reasons import RefusalReason, Verdict
from mesh.domain.slo import Slo
from mesh.domain.steps import LoadTier
from mesh.memory.station import ReservationKind
from mesh.policy.plans import Shortage

GUESSED_SHARE_MOST = 0.5
"""An estimated profile may say that a request takes this share of the time until its first token is
due, and no more: an estimate may be off by a multiple, and a request that was never tried is not
refused by one alone.
"""
LEFT_SHARE_LEAST = 0.25
"""A request is expected to have at least this share of a mean answer left: it may be longer than
the mean.
"""
APART_SHARE = 1.25
"""Clients that are told to come again are spread out by this much of the mean time between two
ends.
"""


@dataclass(slots=True, kw_only=True, eq=False)
class Outlook:
    """The outlook of one request of a deployment after the other, in the order of its queue."""

    ctx: EventContext
    entry: DeploymentEntry
    lanes: dict[tuple[NodeId, ReservationKind], float] = field(default_factory=dict)
    """When all loads of a kind on a node are over, worked out once while none begins."""
    without_time: Collection[RequestId] = ()
    """Those for whom no loaded instance will have time unless another request ends."""
    now_s: float = field(init=False)
    _request: RequestEntry = field(init=False)
    _later_s: float = 0.0
    no_time: bool = False
    earlier: int = 0
    earlier_without_time: int = 0
    """Those who wait on before the request; how many of them are `without_time`."""
    _departures_s: list[float] | None = None
    _loads_s: Iterator[float] | None = None
    """When loads could be over on the nodes that were not looked at yet: in a large cell the first
    ones most often say enough.
    """
    _load_s: float = inf
    """The earliest of those that were."""

    def of(self, request: RequestEntry, later_s: float = 0.0) -> Self:
        """The same, for a request, or for one that has its id and is due by so much later."""
        self._request, self._later_s, self.now_s = request, later_s, self.ctx.now_s
        self.no_time = request.original.request_id in self.without_time
        return self

    @property
    def latest_start_s(self) -> float:
        request, known_s = self._request, self.ctx.latest_start_s(self._request)
        if known_s is None:
            known_s = request.due_s - self._later_s - self._quickest_s(request)
            request.note_latest_start(self.ctx.cell.fleet_changes, known_s)
        return known_s + self._later_s

    def has_just_come(self) -> bool:
        return self.ctx.now_s - self._request.arrival_s <= self.ctx.limits.place_retry_s

    def is_loaded(self) -> bool:
        return any(instance.is_loaded for instance in self.entry.instances.values())

    def is_loading(self) -> bool:
        instances = self.entry.instances.values()
        return any(instance.state is InstanceState.LOADING for instance in instances)

    def has_node(self) -> bool:
        return self.ctx.has_node(self.entry.spec)

    def may_load_by(self, at_s: float) -> bool:
        if self._loads_s is None:
            self._loads_s = self._loads_end_s()
            self._load_s = next(self._loads_s, inf)
        return self._load_s <= at_s or self.load_s() <= at_s

    def load_s(self) -> float:
        """When one more load of the deployment could be over; infinite if there may be none."""
        if self._loads_s is None:
            self._loads_s = self._loads_end_s()
        self._load_s = min((self._load_s, *self._loads_s))
        return self._load_s

    def may_change(self) -> bool:
        if self.no_time:
            return False
        refusals = self._request.refusals
        passing = None, Verdict.DELAYS_RUNNING, Verdict.POLICY
        may_pass = refusals.in_time_as_predicted or refusals.verdict in passing
        for instance in self.entry.instances.values():
            station = instance.node.station
            if not instance.takes_now:
                continue
            if not refusals.short_of_memory:
                if may_pass:
                    return True
            elif station.waiting() or station.running_reservations():
                return True
        return False

    def place_s(self) -> float:
        grow_s = [i.grow_again_s for i in self.entry.instances.values()]
        grows_s = min([at_s for at_s in grow_s if at_s > self.ctx.now_s], default=inf)
        earlier = self.earlier_without_time if self.no_time else self.earlier
        return min(self._departs_s(earlier), grows_s)

    def place_or_load_s(self) -> float:
        """When a place or a load is expected for one more than those who wait."""
        return min(self._departs_s(self.earlier), self.load_s())

    @property
    def interval_s(self) -> float:
        """Seconds from one end to the next, over those that run."""
        ends_s = self._departures()
        if not ends_s:
            return 0.0
        return APART_SHARE * max(ends_s[-1] - self.ctx.now_s, 0.0) / len(ends_s)

    def _loads_end_s(self) -> Iterator[float]:
        ctx, entry, looks = self.ctx, self.entry, self.ctx.limits.validations_max
        if entry.replicas() >= entry.spec.scaling.replicas_max:
            return
        needs: InstanceNeeds | None = None
        unloading, most = InstanceState.UNLOADING, ctx.policy.instances_per_node
        taken = [i.node for i in entry.instances.values() if i.state is not unloading]
        for node in ctx.cell.nodes.values():
            if not looks:
                return
            if ctx.takes(node, entry.spec) and taken.count(node) < most:
                looks -= 1
                # Weights that the host has may go with those who make room.
                in_host = node.tier_of(entry.made) is LoadTier.HOST
                if in_host and needs is None:
                    needs = InstanceNeeds(ctx, entry, entry.queue)
                room = needs.room(node) if in_host and needs is not None else None
                without = room.unloads if room is not None else ()
                planned = plan_load(ctx, entry.made, node, without)
                lane = node.node_id, planned.kind
                if lane not in self.lanes:
                    self.lanes[lane] = lane_ends_s(node, ctx.now_s, planned.kind)
                weights_bytes = node.footprint_of(entry.made).weights_bytes
                copy_s = node.copy_s(weights_bytes) if node.swaps else 0.0
                yield max(self.lanes[lane], entry.paused_until_s) + planned.load_s + copy_s

    def _departs_s(self, earlier: int) -> float:
        """When one more place has come free than so many who wait will have taken; infinite if
        fewer run.
        """
        ends_s = self._departures()
        return ends_s[earlier] if earlier < len(ends_s) else inf

    def _departures(self) -> list[float]:
        """When those end that run on the nodes of the deployment's instances."""
        if self._departures_s is None:
            nodes = {i.node.node_id: i.node for i in self.entry.instances.values()}
            self._departures_s = sorted(s for node in nodes.values() for s in self._ends_on(node))
        return self._departures_s

    def _ends_on(self, node: NodeEntry) -> Iterator[float]:
        token_s, ready_s = round_s(node, self.ctx.now_s), loads_end_s(node, self.ctx.now_s)
        for instance in node.instances.values():
            begun_s = ready_s.get(instance.instance_id, self.ctx.now_s)
            owner = self.ctx.cell.deployments.get(instance.deployment)
            for request in (instance.coming or instance.requests).values():
                most = request.original.sampling.max_tokens
                known = owner.history.mean_of(request.slo.name) if owner is not None else most
                mean = min(known, most)
                left = max(mean - len(request.output_tokens), mean * LEFT_SHARE_LEAST)
                yield begun_s + left * token_s

    def _quickest_s(self, request: RequestEntry) -> float:
        """Seconds to its first token on the quickest node. Measured profiles count alone: a
        correction is of one instance, and passes. An estimate counts as iterations have corrected
        it, the quickest instance first, and for a part of the time that there is; where none has
        been tried it says nothing. It never takes less than the way to the client, so that a
        refusal is there before the first token was due.
        """
        ctx, entry = self.ctx, self.entry
        seen: dict[str, float] = {}
        cached = max((i.cached_tokens(request) for i in entry.instances.values()), default=0)
        most_s = GUESSED_SHARE_MOST * (request.due_s - request.arrival_s)
        for node in ctx.cell.nodes.values():
            fingerprint = node.hello.fingerprint
            if fingerprint in seen or not ctx.takes(node, entry.spec):
                continue
            profile = ctx.cell.profile_on(node, entry.made)
            if profile.measured:
                seen[fingerprint] = alone_s(profile, request, node.rule, ctx.limits, cached=cached)
            else:
                seen[fingerprint] = min(self._tried_s(request, fingerprint, cached), most_s)
        return min(seen.values(), default=min(ctx.limits.delivery_s_max, most_s))

    def _tried_s(self, request: RequestEntry, fingerprint: str, cached: int) -> float:
        """The same by estimates that iterations on such nodes have corrected; the way to the client
        where there are none.
        """
        limits = self.ctx.limits
        seconds = (
            alone_s(i.profile, request, i.node.rule, limits, i.correction.latest, cached)
            for i in self.entry.instances.values()
            if i.profile and i.node.hello.fingerprint == fingerprint and not i.correction.trial_left
        )
        return min(seconds, default=limits.delivery_s_max)


RETRY_S_LEAST, RETRY_S_MOST = 0.5, 60.0
"""Clients that are refused for want of a place are told to come again after a time within these
bounds.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a request is refused: what the place that is nearest to taking it lacks."""

    reason: RefusalReason
    loaded: bool = True
    """The place is an instance that is there."""


NO_PLACE = Cause(reason=RefusalReason.QUEUE_TIMEOUT)
"""Every instance is full and no further one may start, or none was tried."""
LOOKED_AT = 8
"""This many requests of a queue that are looked at together cost what the validation of one
does.
"""


def refuse_past_deadline(outlook: Outlook) -> None:
    """Refuse the requests in the deployment's queue that the policy does not have wait on."""
    ctx, entry = outlook.ctx, outlook.entry
    # Behind a head that was TPOT_EXCEEDED none that is as long was tried, or none at all, and what
    # was noted of shorter ones that were it, too, was cleared (`queueing`). Others lack memory.
    heads: dict[str, RequestEntry] = {}
    for request in entry.queue:
        if request.waits_for is None:
            heads.setdefault(request.slo.name, request)
    untried = [name for name, head in heads.items() if stops_longer(head)]
    causes: dict[tuple[Slo, Verdict | None], tuple[int, Cause]] = {}
    for request in list(entry.queue):
        best_effort = request.slo.best_effort
        most_s = request.slo.ttft_s if best_effort else ctx.limits.queue_wait_s_max
        waited_out = ctx.now_s - request.waits_since_s >= most_s
        if request.waits_for is not None and not (waited_out and request.waits_for.is_loaded):
            continue
        name = request.slo.name
        known = request.refusals
        tried = known.verdict is not None or known.short_of_memory
        if name in untried and not (tried or request.has_own_slo):
            known.note(Verdict.TPOT_EXCEEDED)
        of = outlook.of(request)
        waits: bool | Shortage = not waited_out
        if waits and not (request.accepted or best_effort):
            waits = ctx.policy.waits(request, of)
        if waits is True:
            outlook.earlier += 1
            outlook.earlier_without_time += of.no_time
            continue
        if isinstance(waits, Shortage):
            request.refusals.note(waits)
        cause, message = _why(ctx, outlook, request, causes)
        reason = cause.reason
        if ctx.is_too_long(request):
            too_slow = ctx.latest_start_s(request) == -inf
            where = f"classes.{request.slo.name}" if request.slo.name else "slo"
            raises = "its SLO" if request.has_own_slo else f"spec.{where}.tpot_s"
            remedy = f"raise {raises}" if too_slow else "shorten the prompt, or raise its SLO"
            refuse(ctx, request, reason, message, hint=f"no node is quick enough: {remedy}")
        elif reason is RefusalReason.LOAD_FAILED:
            retry_s = max(entry.pause_left_s(ctx.now_s), RETRY_S_LEAST)
            refuse(ctx, request, reason, message, retry_after_s=retry_s)
        else:
            expected_s, interval_s = outlook.place_or_load_s(), outlook.interval_s
            return_at_s = entry.note_return_at(
                expected_s, interval_s, now_s=ctx.now_s, wait_s_max=RETRY_S_MOST
            )
            retry_s = max(return_at_s - ctx.now_s, RETRY_S_LEAST)
            refuse(ctx, request, reason, message, retry_after_s=retry_s)


def stops_longer(head: RequestEntry) -> bool:
    """Whether what it was refused for holds for those of its class behind it that are no shorter.
    They may want fewer answers.
    """
    exceeded = head.refusals.verdict is Verdict.TPOT_EXCEEDED
    return exceeded and not head.has_own_slo and not head.mates


def without_time(ctx: EventContext, entry: DeploymentEntry) -> frozenset[RequestId]:
    """The waiting requests for which no loaded instance will have time unless another request ends,
    with those of their class ahead of them computed first. Only the first of a long queue are
    looked at: so many that all of it costs no more than the validations that are left to the event.
    """
    if not ctx.policy.promises or not entry.instances:
        return frozenset()
    instances = [instance for instance in entry.candidates if instance.takes_now]
    most = LOOKED_AT * (ctx.validations_left // max(len(instances), 1))
    waiting = (r for r in entry.queue if r.waits_for is None and not r.has_own_slo)
    by_class: dict[str, list[RequestEntry]] = {}
    for request in islice(waiting, most):
        if not request.slo.best_effort:
            by_class.setdefault(request.slo.name, []).append(request)
    found: list[RequestEntry] = []
    for left in by_class.values():
        for instance in instances:
            if not left:
                break
            ctx.note_validations(-(-len(left) // LOOKED_AT))
            left = without_time_on(instance, left, now_s=ctx.now_s, limits=ctx.limits)
        found += left
    return frozenset(request.original.request_id for request in found)


def _why(
    ctx: EventContext,
    outlook: Outlook,
    request: RequestEntry,
    causes: dict[tuple[Slo, Verdict | None], tuple[int, Cause]],
) -> tuple[Cause, str]:
    """What it is refused for, and in words. `causes`: what those before it were, and their tokens,
    by their SLO and by what their last try found, which says the same of this one; where none was
    tried, of one that is no shorter.
    """
    entry, waited = outlook.entry, f"{ctx.now_s - request.queued_at_s:.1f} s"
    if not outlook.has_node():
        if request.attempt:
            message = f"its node was lost, and no other came up within {waited}"
            return Cause(reason=RefusalReason.NODE_LOST), message
        return Cause(reason=RefusalReason.NO_NODE), f"no node came up within {waited}"
    if entry.load_failures and not entry.replicas():
        message = f"not loaded within {waited}: {entry.load_error}"
        return Cause(reason=RefusalReason.LOAD_FAILED), message
    if request.refusals.last is Verdict.POLICY:
        return Cause(reason=RefusalReason.POLICY), request.refusals.message
    if ctx.is_too_long(request):
        never = ctx.latest_start_s(request) == -inf
        late = RefusalReason.TPOT_EXCEEDED if never else RefusalReason.FIRST_TOKEN_LATE
        cause = Cause(reason=late)
    else:
        found = request.slo, request.refusals.last
        tokens, known = causes.get(found, (0, None))
        if known is None or (found[1] is None and request.tokens < tokens and ctx.looks_left):
            tokens, known = request.tokens, _cause(ctx, outlook, request)
            causes[found] = tokens, known
        cause = known
    return cause, _words(entry, request, cause, waited)


def _cause(ctx: EventContext, outlook: Outlook, request: RequestEntry) -> Cause:
    """What the cheapest place lacks. Each is asked as if the request came this moment, for that has
    nothing to do with how long it has waited. Where one would take it then, it has waited for too
    long; it is refused for what its last try found where that place would be in time even so, or
    where no place was looked at.
    """
    price = _cheapest(outlook, request, request.as_if_now(ctx.now_s))
    if price is None:
        return NO_PLACE
    if price.room is None:
        return Cause(reason=RefusalReason.MEMORY_FULL, loaded=price.instance is not None)
    if price.validated:
        price = replace(price, request=request, late=False)
        price.look(request)
    verdict = price.seen.verdict if price.seen is not None else Verdict.PASSES
    if verdict is Verdict.PASSES:
        if request.refusals.last is None:
            return NO_PLACE
        verdict = request.refusals.last
    return Cause(reason=RefusalReason(verdict))


def _cheapest(outlook: Outlook, request: RequestEntry, new: RequestEntry) -> Price | None:
    """The price of the place that is nearest to taking the request, were it to come now as `new`;
    `None` where every place is full. Nearest is, in this order, a place that

    1. would take it, late if need be;
    2. lacks memory alone, were all that idles there to go, and best effort;
    3. lacks time alone: for its own first token, else for others', else for all further ones;
    4. lacks both.

    Only some of many places are looked at (see `EventContext.looks_left`): without a look it is one
    that has room, if any has.
    """
    ctx, entry = outlook.ctx, outlook.entry
    late = ctx.policy.may_be_late(new, outlook.of(new, new.due_s - request.due_s))
    joins = []
    for instance in entry.instances.values():
        # They give up what a request with limits lacks, where it would be in time.
        given_up = () if request.slo.best_effort else instance.best_effort
        places = instance.free_places + len(given_up)
        if instance.takes_requests and places > len(request.mates):
            room = room_for(ctx, entry, instance, new, without=given_up)
            joins.append((instance.node, instance, room))
    nodes = ctx.cell.nodes.values() if ctx.may_start(entry) else ()
    needs = InstanceNeeds(ctx, entry, (new,))
    starts = [(node, None, needs.room(node)) for node in nodes if ctx.takes_another(node, entry)]
    prices = [
        Price(ctx, None, entry, node, instance, new, room, late=late)
        for node, instance, room in (*joins, *starts)
    ]
    prices.sort(key=lambda price: price.room is None)
    cheapest, least = prices[0] if prices else None, inf
    for price in prices:
        if not ctx.looks_left:
            break
        price.look(request)
        if price.lack < least:
            cheapest, least = price, price.lack
        if least <= MEMORY_ALONE:
            break
    return cheapest


def _words(entry: DeploymentEntry, request: RequestEntry, cause: Cause, waited: str) -> str:
    slo, prompt = request.slo, len(request.original.prompt_tokens)
    match cause.reason:
        case RefusalReason.FIRST_TOKEN_LATE:
            limit = f"{slo.ttft_limit_s(prompt):.3g} s"
            return f"its first token would come after its limit, {limit} for {prompt} tokens"
        case RefusalReason.DELAYS_RUNNING:
            return "it would make a request late that came before it"
        case RefusalReason.TPOT_EXCEEDED:
            name = repr(entry.spec.name)
            return f"there is no time left to give {name} its tokens every {slo.tpot_s:.3g} s"
        case RefusalReason.MEMORY_FULL:
            where = "for its KV cache" if cause.loaded else "on a node"
            return f"no memory came free {where} within {waited}"
        case _:
            return f"no place came free within {waited}"
