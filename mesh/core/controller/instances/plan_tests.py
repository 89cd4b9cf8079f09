"""What policies share of tests: each of a plan's node, as it would be once the plan is carried out.

A bound over deadlines, the time and the memory that are left, and when weights arrive. Shadow
validation is given by who asks, for it knows what it has found out before. Before: a plan for which
there is room. After: `Policy.passes`.
"""

from collections.abc import Callable, Collection
from math import inf

from mesh.compute.times import Times
from mesh.core.controller.instances.loading_lane import loads_end_s, next_slot
from mesh.core.controller.instances.node_schedule import (
    decode_share_with,
    decodes_share,
    time_left_s,
)
from mesh.core.controller.instances.prefixes import cached_tokens
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.ids import InstanceId
from mesh.domain.profile import Profile
from mesh.domain.reasons import Verdict
from mesh.policy.plans import Plan


class PlanTests:
    """The tests of one plan. The request, if there is one, joins or starts at `place`, where
    `needed_bytes` more are wanted and the instances of `reclaim` go for that. Those `beside` it are
    to go as well.
    """

    __slots__ = (
        "_beside",
        "_ctx",
        "_entry",
        "_needed_bytes",
        "_place",
        "_plan",
        "_reclaim",
        "_request",
        "_shadow",
    )

    def __init__(
        self,
        ctx: EventContext,
        plan: Plan,
        entry: DeploymentEntry,
        place: InstanceEntry | NodeEntry,
        request: RequestEntry,
        shadow: Callable[[], Verdict],
        needed_bytes: int = 0,
        reclaim: Collection[InstanceId] = (),
        beside: Collection[RequestEntry] = (),
    ) -> None:
        self._ctx, self._plan, self._entry = ctx, plan, entry
        self._place, self._request = place, request
        self._shadow, self._needed_bytes, self._reclaim = shadow, needed_bytes, reclaim
        self._beside = beside

    def shadow(self, plan: Plan) -> Verdict:
        self._check(plan)
        return self._shadow()

    def demand(self, plan: Plan, slack_s: float = 0.0) -> Verdict:
        if self.utilisation(plan) > 1.0:
            return Verdict.TPOT_EXCEEDED
        ctx, request = self._ctx, self._request
        arrives_s = self.arrives_s(plan)
        place = self._place
        cached = cached_tokens(place, request) if isinstance(place, InstanceEntry) else 0
        times = self._times()
        seconds = times.prefill_s(request.tokens - cached, cached)
        seconds += sum(times.prefill_s(other.tokens, 0) for other in self._beside)
        most_s = ctx.limits.delivery_s_max + slack_s
        if max(arrives_s, ctx.now_s) + seconds + most_s > request.due_s:
            return Verdict.FIRST_TOKEN_LATE
        left_s = time_left_s(self._node(), ctx.now_s, request.due_s, seconds)
        return Verdict.PASSES if left_s >= most_s else Verdict.DELAYS_RUNNING

    def utilisation(self, plan: Plan) -> float:
        self._check(plan)
        place, request, now_s = self._place, self._request, self._ctx.now_s
        if isinstance(place, InstanceEntry):
            return decode_share_with(place, now_s, request, *self._beside)
        decode_s = self._times().decode_s(1, request.tokens)
        return decodes_share(place, now_s) + decode_s / request.pace_s

    def spare_bytes(self, plan: Plan) -> int:
        self._check(plan)
        place, deployment = self._place, self._entry.deployment
        if isinstance(place, InstanceEntry) or deployment is None:
            return self._node().free_bytes - self._needed_bytes
        return place.free_bytes_for(deployment) - self._needed_bytes

    def arrives_s(self, plan: Plan) -> float:
        self._check(plan)
        ctx, place = self._ctx, self._place
        if isinstance(place, InstanceEntry):
            return loads_end_s(place.node, ctx.now_s).get(place.instance_id, ctx.now_s)
        deployment = self._entry.deployment
        assert deployment is not None
        return next_slot(ctx, deployment, place, inf, self._reclaim).ready_s

    def _check(self, plan: Plan) -> None:
        if plan is not self._plan:
            raise ValueError("tests are of the plan that is asked about, and of no other")

    def _node(self) -> NodeEntry:
        place = self._place
        return place.node if isinstance(place, InstanceEntry) else place

    def _times(self) -> Times:
        return Times(self._profile(), self._node().rule.overestimate)

    def _profile(self) -> Profile:
        place, deployment = self._place, self._entry.deployment
        if isinstance(place, InstanceEntry):
            assert place.profile is not None, "it serves"
            return place.profile
        assert deployment is not None
        footprint = place.footprint_of(deployment)
        return self._ctx.cell.expectations.profile(deployment.model, footprint, place.hello)
