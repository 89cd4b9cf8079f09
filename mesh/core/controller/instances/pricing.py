"""What a plan would cost the node where it happens: memory, a load, and the time of all there.

A plan is priced at one place: a request joins an instance, loaded or loading, or has one started on
a node. Each part of the price is worked out when somebody asks for it, and only once. Before: the
searches, which know what the books allow (`queueing`, `cold_starts`, `placement`, `preemption`,
`migration`). After: the policy, which reads the price (`mesh.policy.interface.Tests`), and then
`submitting` and `lifecycle`, which book what is taken.
"""

from collections.abc import Sequence
from math import inf

from mesh.compute.times import Times
from mesh.core.controller.instances.kv_cache import Room, room_for
from mesh.core.controller.instances.loading_lane import Slot, loads_end_s, next_slot
from mesh.core.controller.instances.node_schedule import (
    Forecast,
    decode_share_with,
    decodes_share,
    forecast_on,
    forecast_on_loading,
    forecast_on_start,
    time_left_s,
)
from mesh.core.controller.instances.prefixes import cached_tokens
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.deployment import Deployment
from mesh.domain.profile import Profile
from mesh.domain.reasons import Verdict
from mesh.policy.plans import Plan, Shortage


class Price:
    """The price of a plan for `request` at `place`, where those `beside` it are to go as well.

    `request` is `None` where an instance starts that nobody waits for. `room` is the memory that
    was found, which is all that is known of an instance that starts. The first token of a request
    may be `late`; one that `moves` runs well where it is.
    """

    __slots__ = (
        "_slot",
        "beside",
        "ctx",
        "entry",
        "late",
        "moves",
        "node",
        "place",
        "plan",
        "request",
        "room",
        "seen",
    )

    def __init__(
        self,
        ctx: EventContext,
        plan: Plan | None,
        entry: DeploymentEntry,
        place: InstanceEntry | NodeEntry,
        request: RequestEntry | None,
        room: Room | None = None,
        *,
        beside: Sequence[RequestEntry] = (),
        late: bool = False,
        moves: bool = False,
    ) -> None:
        self.ctx, self.plan, self.entry, self.place = ctx, plan, entry, place
        self.node = place if isinstance(place, NodeEntry) else place.node
        self.request, self.room = request, room
        self.beside, self.late, self.moves = beside, late, moves
        self.seen: Forecast | None = None
        """What validation has said; `None` where nobody has asked for it."""
        self._slot: Slot | None = None

    def verdict(self) -> Verdict | Shortage:
        """What the policy says of the plan at this price."""
        assert self.plan is not None, "a policy has asked for it"
        return self.ctx.policy.passes(self.plan, self)

    # What the policy reads: `mesh.policy.interface.Tests`.

    def shadow(self, plan: Plan) -> Verdict:
        self._check(plan)
        if self.seen is None:
            self.seen = self.validate()
        return self.seen.verdict

    def demand(self, plan: Plan, slack_s: float = 0.0) -> Verdict:
        if self.utilisation(plan) > 1.0:
            return Verdict.TPOT_EXCEEDED
        now_s, place, request = self.ctx.now_s, self.place, self.wanted_by
        cached = cached_tokens(place, request) if isinstance(place, InstanceEntry) else 0
        times = self._times()
        seconds = times.prefill_s(request.tokens - cached, cached)
        seconds += sum(times.prefill_s(other.tokens, 0) for other in self.beside)
        most_s = self.ctx.limits.delivery_s_max + slack_s
        if max(self.arrives_s(plan), now_s) + seconds + most_s > request.due_s:
            return Verdict.FIRST_TOKEN_LATE
        left_s = time_left_s(self.node, now_s, request.due_s, seconds)
        return Verdict.PASSES if left_s >= most_s else Verdict.DELAYS_RUNNING

    def utilisation(self, plan: Plan) -> float:
        self._check(plan)
        place, request, now_s = self.place, self.wanted_by, self.ctx.now_s
        if isinstance(place, InstanceEntry):
            return decode_share_with(place, now_s, request, *self.beside)
        decode_s = self._times().decode_s(1, request.tokens)
        return decodes_share(place, now_s) + decode_s / request.pace_s

    def spare_bytes(self, plan: Plan) -> int:
        self._check(plan)
        node, room = self.node, self.room
        if isinstance(self.place, InstanceEntry) or room is None:
            return node.free_bytes
        needed_bytes = node.footprint_of(self._deployment).instance_bytes(room.least_blocks)
        return node.free_bytes_for(self._deployment) - needed_bytes

    def arrives_s(self, plan: Plan) -> float:
        self._check(plan)
        starts = isinstance(self.place, NodeEntry)
        return self._slot_by(inf).ready_s if starts else self.ready_s

    # What the search and the books read.

    def validate(self) -> Forecast:
        """What becomes of the request there, beside all others; one validation of the event."""
        self.ctx.note_validation(self.node)
        return self.forecast()

    def forecast(self) -> Forecast:
        """The same, not counted."""
        ctx, place, request, late = self.ctx, self.place, self.wanted_by, self.late
        now_s, limits = ctx.now_s, ctx.limits
        if isinstance(place, NodeEntry):
            return forecast_on_start(
                place,
                self._profile(),
                lambda: self.slot.ready_s,
                request,
                share=ctx.share_of(place, decodes_share),
                now_s=now_s,
                limits=limits,
                late=late,
                moves=self.moves,
            )
        if not place.is_loaded:
            return forecast_on_loading(place, request, now_s=now_s, limits=limits, late=late)
        return forecast_on(
            place,
            request,
            now_s=now_s,
            limits=limits,
            beside=self.beside,
            late=late,
            moves=self.moves,
        )

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
        place, now_s = self.place, self.ctx.now_s
        if isinstance(place, NodeEntry):
            return self.slot.ready_s
        return loads_end_s(place.node, now_s).get(place.instance_id, now_s)

    @property
    def first_token_s(self) -> float:
        """When the request would have its first token: as soon as its instance is loaded, where
        nothing forecasts it.
        """
        seen = self.seen
        if seen is None or not self.validated or seen.first_token_s == inf:
            return self.ready_s
        return seen.first_token_s

    def needed_s(self, grace_s: float = 0.0) -> float:
        """When the load has to be over: as late as the request can bear, which may be late by
        `grace_s`. One that nobody waits for goes behind those that were promised.
        """
        if self.request is None:
            return self.ready_s
        if not self.validated and isinstance(self.place, NodeEntry):
            return self.request.due_s
        return self.ready_s + max(self.request.due_s + grace_s - self.first_token_s, 0.0)

    @property
    def wanted_by(self) -> RequestEntry:
        """The request; there is one."""
        assert self.request is not None, "the policy is asked for somebody's sake"
        return self.request

    @property
    def _deployment(self) -> Deployment:
        assert self.entry.deployment is not None
        return self.entry.deployment

    def _check(self, plan: Plan) -> None:
        if plan is not self.plan:
            raise ValueError("tests are of the plan that is asked about, and of no other")

    def _slot_by(self, needed_s: float) -> Slot:
        without = () if self.room is None else self.room.reclaim
        return next_slot(self.ctx, self._deployment, self.node, needed_s, without)

    def _times(self) -> Times:
        return Times(self._profile(), self.node.rule.overestimate)

    def _profile(self) -> Profile:
        place, deployment = self.place, self._deployment
        if isinstance(place, InstanceEntry):
            assert place.profile is not None, "it serves"
            return place.profile
        footprint = place.footprint_of(deployment)
        return self.ctx.cell.expectations.profile(deployment.model, footprint, place.hello)


def price_move(
    ctx: EventContext,
    plan: Plan,
    entry: DeploymentEntry,
    instance: InstanceEntry,
    request: RequestEntry,
    beside: Sequence[RequestEntry],
) -> Price | None:
    """The move of a request that runs to a loaded instance, with those `beside` it that are to go
    there as well; `None` where there is no room, or the policy does not let it be.
    """
    room = room_for(ctx, entry, instance, request, beside)
    if room is None:
        return None
    price = Price(ctx, plan, entry, instance, request, room, beside=beside, moves=True)
    return price if price.verdict() is Verdict.PASSES else None


def going_to(instance: InstanceEntry, moves: Sequence[Price]) -> list[RequestEntry]:
    """The requests that are to move to the instance."""
    return [move.wanted_by for move in moves if move.place is instance]
