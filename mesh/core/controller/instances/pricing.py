"""What a plan would cost the node where it happens: memory, a load, and the time of all there.

A plan is priced at one place: a request joins an instance, loaded or loading, or has one started on
a node. Each part of the price is worked out when somebody asks for it; the forecast and the place
of a load, which take the longest, are kept. Before: `requests.search`, which knows what the books
allow. After: the policy, which reads the price (`mesh.policy.interface.Tests`), and then
`submitting` and `lifecycle`, which book what is taken.

Who may overtake whom is part of it: a later request that fits may be computed first, but only so
often. From then on a node that could keep the earlier one's SLO by itself takes nobody who came
later, until that one has its place. One whose load is over was promised the node's time, late or
not: nobody who came later is before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from mesh.compute.times import Times
from mesh.core.controller.instances.kv_cache import Room, room_for
from mesh.core.controller.instances.kv_transfer import Transfer
from mesh.core.controller.instances.node_schedule import (
    Forecast,
    Slot,
    decode_share_with,
    decodes_share,
    forecast_on,
    forecast_on_start,
    in_time_alone,
    loads_end_s,
    plan_load,
    slot_for,
)
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.refusals import DELAYS_HOLD_S
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.lifecycle import InstanceState
from mesh.domain.profile import Profile
from mesh.domain.reasons import Verdict
from mesh.policy.plans import Plan, Shortage

MARGIN_SHARE = 0.1
"""A load that waits for others in its lane is counted on only if its request would be in time even
if the first token came later by this share of the time until it.
"""
_UNSEEN = {verdict: Forecast(verdict=verdict) for verdict in Verdict}
"""What is said of a place without a forecast."""
_NEAREST_FIRST = (Verdict.FIRST_TOKEN_LATE, Verdict.DELAYS_RUNNING, Verdict.TPOT_EXCEEDED)
"""The verdicts about time: the first is the nearest to a place."""
MEMORY_ALONE = 1
NOT_ASKED = "tests are of the plan that is asked about, and of no other"


@dataclass(slots=True, eq=False)
class Price:
    """The price of a plan: `request`, and those `beside` it, join `instance` on `node`; where that
    is `None`, one starts there.
    """

    ctx: EventContext
    plan: Plan | None
    """`None` where no policy is asked."""
    entry: DeploymentEntry
    node: NodeEntry
    instance: InstanceEntry | None
    request: RequestEntry | None
    """`None` where an instance starts that nobody waits for."""
    room: Room | None = None
    """The memory that was found for it."""
    beside: Sequence[RequestEntry] = ()
    late: bool = False
    """Whether the first token may be late."""
    moves: bool = False
    """Whether the request runs elsewhere, and well."""
    transfer: Transfer | None = None
    """How its KV blocks come along; `None` where they are computed anew."""
    seen: Forecast | None = field(default=None, init=False)
    """What validation has said; `None` where nobody has asked for it."""
    _slot: Slot | None = field(default=None, init=False)

    def verdict(self) -> Verdict | Shortage:
        """What the policy says of the plan at this price."""
        assert self.plan is not None, "a policy has asked for it"
        return self.ctx.policy.passes(self.plan, self)

    # What the policy reads: `mesh.policy.interface.Tests`.

    def shadow(self, plan: Plan) -> Verdict:
        if plan is not self.plan:
            raise ValueError(NOT_ASKED)
        if self.seen is None:
            self.seen = self.validate()
        return self.seen.verdict

    def utilisation(self, plan: Plan) -> float:
        self._check(plan)
        request, now_s = self.wanted_by, self.ctx.now_s
        if self.instance is not None:
            return decode_share_with(self.instance, now_s, request, *self.beside)
        decode_s = self._times().decode_s(1 + len(request.mates), request.tokens)
        return decodes_share(self.node, now_s) + decode_s / request.pace_s

    def spare_bytes(self, plan: Plan) -> int:
        self._check(plan)
        node, room = self.node, self.room
        if self.instance is not None or room is None:
            return node.free_bytes
        needed_bytes = node.footprint_of(self.entry.made).instance_bytes(room.least_blocks)
        return node.free_bytes_for(self.entry.made) - needed_bytes

    def arrives_s(self, plan: Plan) -> float:
        self._check(plan)
        ready_s = self._slot_by(inf).ready_s if self.instance is None else self.ready_s
        return ready_s + self._copy_s(self.instance)

    # What the search and the books read.

    def validate(self) -> Forecast:
        """What becomes of the request there, beside all others; one validation of the event. That a
        loaded instance refuses one that waits is known without it if an earlier request has to be
        let through, or it has refused one that was no longer; see `state.refusals`.
        """
        ctx, instance, request = self.ctx, self.instance, self.wanted_by
        if instance is None or self.moves or instance.state is InstanceState.LOADING:
            ctx.note_validation(self.node)
            return self.forecast()
        if must_give_way(ctx, self.node, request):
            return _UNSEEN[Verdict.DELAYS_RUNNING]
        left, known = self._known(instance, request)
        if known is not None:
            # Counts as one all the same: an event must not go through every full instance.
            ctx.note_validation()
            return _UNSEEN[known]
        ctx.note_validation(self.node)
        forecast, as_predicted = self.forecast(), False
        if forecast.verdict is not Verdict.PASSES:
            care = self.node.rule.overestimate
            as_predicted = forecast.in_time_as_predicted(request.due_s, ctx.now_s, care)
            if as_predicted:
                request.refusals.note_in_time_as_predicted()
        at, verdict = (self.node.version, ctx.now_s), forecast.verdict
        instance.refusals.note(*at, request, left, verdict, as_predicted=as_predicted)
        return forecast

    def _known(
        self, instance: InstanceEntry, request: RequestEntry, *, new: bool = False
    ) -> tuple[int, Verdict | None]:
        """How many of its tokens are left to compute there, and why it is refused if that is known
        without a validation.
        """
        left, at = request.tokens - instance.cached_tokens(request), self.node.version
        hold_s = 0.0 if self.ctx.retries else DELAYS_HOLD_S
        of = request, left
        return left, instance.refusals.why(at, self.ctx.now_s, *of, new=new, hold_s=hold_s)

    def forecast(self) -> Forecast:
        """The same, not counted."""
        ctx, instance, request, late = self.ctx, self.instance, self.request, self.late
        assert request is not None, "somebody is to be in time"
        now_s, limits = ctx.now_s, ctx.limits
        if instance is None:
            return forecast_on_start(
                self.node,
                self._profile(),
                lambda: self.slot.ready_s,
                request,
                share=ctx.share_of(self.node, decodes_share),
                cached=self.node.left_tokens(self.entry.made, request),
                block_tokens=self.node.footprint_of(self.entry.made).block_tokens,
                now_s=now_s,
                limits=limits,
                late=late,
                moves=self.moves,
                weights_bytes=self.node.footprint_of(self.entry.made).weights_bytes,
                more_kv_bytes=self._more_kv_bytes(),
            )
        return forecast_on(
            instance,
            request,
            now_s=now_s,
            limits=limits,
            beside=self.beside,
            late=late,
            moves=self.moves,
            more_kv_bytes=self._more_kv_bytes(),
            grow_s=self._grow_s(instance),
        )

    def _grow_s(self, instance: InstanceEntry) -> float:
        """For how long its KV cache grows in the place of iterations, in the room that was found;
        looked at where weights are swapped.
        """
        room, node = self.room, self.node
        if room is None or not node.swaps or room.kv_blocks <= instance.promised_blocks:
            return 0.0
        return node.grow_s(instance.footprint.size(room.kv_blocks).kv_bytes)

    def _more_kv_bytes(self) -> int:
        """What KV caches on its node will take more, in the room that was found."""
        if self.room is None:
            return 0
        gone = sum(self.node.instances[name].kv_bytes for name in self.room.unloads)
        instance = self.instance
        if instance is not None:
            gone += instance.kv_bytes
        footprint = instance.footprint if instance else self.node.footprint_of(self.entry.made)
        return footprint.size(self.room.kv_blocks).kv_bytes - gone

    def look(self, asked_by: RequestEntry) -> None:
        """Find out what it lacks; one look of the event. `asked_by` wants the place, and may
        have to let an earlier one through.
        """
        self.seen = _UNSEEN[Verdict.PASSES]
        if self.ctx.policy.promises:
            self.ctx.note_look()
            known = None
            if self.instance is not None and self.instance.is_loaded and not self.late:
                _, known = self._known(self.instance, self.wanted_by, new=True)
            self.seen = self.forecast() if known is None else _UNSEEN[known]
        if self.validated and self.room and must_give_way(self.ctx, self.node, asked_by):
            self.seen = _UNSEEN[Verdict.DELAYS_RUNNING]

    @property
    def lack(self) -> int:
        """What the place lacks, once it was looked at: 0 is nothing, then MEMORY_ALONE, then time,
        then both.
        """
        if self.validated or self.seen is None:
            return 0 if self.room is not None else MEMORY_ALONE
        times = len(_NEAREST_FIRST) if self.room is None else 0
        return 2 + (times or _NEAREST_FIRST.index(self.seen.verdict))

    @property
    def validated(self) -> bool:
        """Whether validation has been asked, and lets it pass."""
        return self.seen is not None and self.seen.verdict is Verdict.PASSES

    @property
    def slot(self) -> Slot:
        """The place of the load among the others of the node, for an instance that starts. One for
        a request that is late waits for those that need not be.
        """
        if self._slot is None:
            by_none = self.late or self.request is None
            self._slot = self._slot_by(inf if by_none else self.wanted_by.due_s)
        return self._slot

    @property
    def ready_s(self) -> float:
        """When the instance is loaded."""
        if self.instance is None:
            return self.slot.ready_s
        now_s = self.ctx.now_s
        return loads_end_s(self.node, now_s).get(self.instance.instance_id, now_s)

    @property
    def first_token_s(self) -> float:
        """When the request would have its first token: as soon as its instance is loaded, where
        nothing forecasts it.
        """
        seen = self.seen
        if seen is None or not self.validated or seen.first_token_s == inf:
            return self.ready_s + self._copy_s(self.instance)
        return seen.first_token_s

    def is_tight(self) -> bool:
        """Whether the load waits for others, and a little delay would make the request late, as far
        as validation was asked.
        """
        now_s, first_s = self.ctx.now_s, self.first_token_s
        waits = self.validated and self.slot.waits
        return waits and first_s + MARGIN_SHARE * (first_s - now_s) > self.wanted_by.due_s

    def grace_s(self) -> float:
        """By how much the client of a request that may be late is told that it is, with a margin:
        loads take longer as often as not. One that was accepted has been told already.
        """
        if not self.late or self.wanted_by.accepted:
            return 0.0
        margin_s = MARGIN_SHARE * (self.first_token_s - self.ctx.now_s)
        return max(self.first_token_s + margin_s - self.wanted_by.due_s, 0.0)

    def needed_s(self, grace_s: float = 0.0) -> float:
        """When the load has to be over: as late as the request can bear, which may be late by
        `grace_s`. One that nobody waits for goes behind those that were promised.
        """
        if self.request is None:
            return self.ready_s
        if not self.validated and self.instance is None:
            return self.request.due_s
        return self.ready_s + max(self.request.due_s + grace_s - self.first_token_s, 0.0)

    def room_now(self) -> Room | None:
        """The room that there still is, once others of the same search have got theirs: `None`
        where an idle instance that was to go for it has to stay by now.
        """
        if self.instance is not None:
            return room_for(self.ctx, self.entry, self.instance, self.wanted_by, self.beside)
        room, there = self.room, self.node.instances
        goes = room is not None and all(self.node.may_go(there[name]) for name in room.unloads)
        return room if goes else None

    @property
    def wanted_by(self) -> RequestEntry:
        """The request; there is one."""
        assert self.request is not None, "the policy is asked for somebody's sake"
        return self.request

    def _check(self, plan: Plan) -> None:
        if plan is not self.plan:
            raise ValueError(NOT_ASKED)

    def _slot_by(self, needed_s: float) -> Slot:
        without = () if self.room is None else self.room.unloads
        planned = plan_load(self.ctx, self.entry.made, self.node, without)
        return slot_for(self.node, planned, needed_s, self.ctx.now_s)

    def _copy_s(self, instance: InstanceEntry | None) -> float:
        """Seconds in which the weights of an instance, or of one that starts, come to the device; 0
        where they are there, or come with the load.
        """
        node = self.node
        out = 1.0 if instance is None else 1.0 - instance.resident_share
        if not node.swaps or not out:
            return 0.0
        footprint = node.footprint_of(self.entry.made) if instance is None else instance.footprint
        return out * node.copy_s(footprint.weights_bytes)

    def _times(self) -> Times:
        return Times(self._profile(), self.node.rule.overestimate)

    def _profile(self) -> Profile:
        if self.instance is not None:
            assert self.instance.profile is not None, "it serves"
            return self.instance.profile
        return self.ctx.cell.profile_on(self.node, self.entry.made)


def going_to(instance: InstanceEntry, moves: Sequence[Price]) -> list[RequestEntry]:
    """The requests that are to move to the instance."""
    return [move.wanted_by for move in moves if move.instance is instance]


def must_give_way(ctx: EventContext, node: NodeEntry, request: RequestEntry) -> bool:
    """Whether an earlier request was promised the node's time, or has been overtaken often enough
    that the node could compute in time, if it had nothing else to do. Best effort gives way to all
    others that no load was promised to and whose deployments the node suits.
    """
    if request.slo.best_effort:
        return any(
            not waiting.slo.best_effort and waiting.waits_for is None
            for deployment in ctx.cell.with_queues()
            if node.suits(deployment.spec)
            for waiting in deployment.queue
        )
    return any(
        earlier.waits_for is not None
        or (
            earlier.overtaken >= ctx.limits.overtaken_max
            and in_time_alone(instance, earlier, ctx.now_s, ctx.limits)
        )
        for earlier, instance in _earlier(ctx, node, request)
    )


def note_overtaken(ctx: EventContext, node: NodeEntry, request: RequestEntry) -> None:
    """The request gets a place on the node, before those that came earlier."""
    for earlier, _ in _earlier(ctx, node, request):
        earlier.note_overtaken(ctx.limits.overtaken_max)


def _earlier(
    ctx: EventContext, node: NodeEntry, request: RequestEntry
) -> list[tuple[RequestEntry, InstanceEntry]]:
    """Requests that came before this one and wait because the node could not compute them in time,
    of all deployments that are loaded there, with their instances. Who is promised a load waits for
    that, and for the node only once it is over and has left it time for the decodes.
    """
    found: list[tuple[RequestEntry, InstanceEntry]] = []
    for instance in node.instances.values():
        owner = ctx.cell.deployments.get(instance.deployment)
        if owner is None or not owner.queue or not instance.takes_now:
            continue
        for waiting in owner.queue:
            if waiting.rank >= request.rank:
                break
            refusals = waiting.refusals
            if not refusals.verdict or refusals.short_of_memory or instance.is_full:
                continue
            waits_here = (
                refusals.verdict is not Verdict.TPOT_EXCEEDED and waiting.waits_for is instance
            )
            if waits_here or waiting.waits_for is None:
                found.append((waiting, instance))
    return found
