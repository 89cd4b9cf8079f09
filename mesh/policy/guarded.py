"""The policy as the core calls it: whatever it does, the cell goes on, and it is known whose fault
it was.

What raises, yields without end, or answers what cannot be counts as a fault, which the core puts
into its actions, and with that into the journal; in place of the answer stands one that does no
harm: no plan, no pass, an order by ids, a cache by demand. Time is told by the host
(`DecisionTookLong`): no clock is here. Before: the controller core. After: the policy.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any, TypeVar, cast

from mesh.domain.actions import NotePolicyFault
from mesh.domain.checks import CONTEXT_TOKENS_MAX
from mesh.domain.errors import MeshError
from mesh.domain.limits import CellLimits
from mesh.domain.reasons import PolicyFaultKind, Verdict
from mesh.domain.slo import PACE, Pace, Slo
from mesh.policy.interface import KvDemand, KvSize, Policy, Rank, Tests
from mesh.policy.plans import (
    How,
    Join,
    Label,
    Move,
    Plan,
    Prefetch,
    Refuse,
    Release,
    Releases,
    Shortage,
    Start,
)
from mesh.policy.room import by_demand, longest_headroom
from mesh.policy.rules.run_queues import RunQueue
from mesh.policy.rules.swapping import Swap, SwapRule, Weights
from mesh.policy.rules.turns import Grant, TurnBounds, TurnRule, name_of, whole_turn
from mesh.policy.views import (
    AheadView,
    CellView,
    InstanceView,
    NodeView,
    Outlook,
    Place,
    RequestView,
)

FAULTS_MAX = 8
"""The most faults that are noted for one event."""
PLANS_SPARE = 64
"""Plans of one answer that are looked at, beside two for each node and instance of the cell."""
SIZES_MAX = 4096
"""Answers of `kv` that are kept."""
ITERATIONS_MAX = 4096
"""The most decodes of one turn."""
WAIT_S_LEAST, WAIT_S_MOST = 0.1, 3600.0
"""Until a policy is asked again what becomes of an idle instance."""

_VIEWS: dict[type, tuple[tuple[str, str], ...]] = {
    Join: (("request", "request_id"), ("instance", "instance_id")),
    Start: (("node", "node_id"),),
    Move: (("to", "instance_id"),),
    Release: (("instance", "instance_id"),),
    Refuse: (("request", "request_id"),),
    Label: (("instance", "instance_id"),),
    Prefetch: (("node", "node_id"),),
}
"""The views without which there is no such plan, and what each of them has."""
T = TypeVar("T")


class Guarded:
    def __init__(self, policy: Policy, limits: CellLimits) -> None:
        self._policy, self._limits = policy, limits
        self.name, self.devices = policy.name, policy.devices
        self.rule = policy.rule
        self.node_rule = replace(policy.node_rule.within(limits), turn=name_of(policy.rule))
        self.instances_per_node = max(policy.instances_per_node, 1)
        self.promises, self.goes_on = policy.promises, policy.goes_on
        self.upkeep_s = max(policy.upkeep_s, WAIT_S_LEAST)
        self._faults: list[NotePolicyFault] = []
        self._sizes: dict[tuple[int, int, int, bool], KvSize] = {}

    def guarded(self, rule: TurnRule) -> TurnRule:
        """The rule for forecasts: one that is not mesh's own may raise, or give no turn."""
        own = type(rule).__module__.startswith("mesh.")
        return rule if own else cast(TurnRule, _GuardedRule(rule, self))

    def fault(self, kind: PolicyFaultKind, call: str, message: str) -> None:
        """Note one; beyond so many of an event none is."""
        if len(self._faults) < FAULTS_MAX:
            made = NotePolicyFault(policy=self.name, kind=kind, call=call, message=message)
            self._faults.append(made)

    def take_faults(self) -> list[NotePolicyFault]:
        """Those of the event, which are forgotten then."""
        faults, self._faults = self._faults, []
        return faults

    def instance_rank(self, instance: InstanceView) -> Rank:
        try:
            return _comparable(self._policy.instance_rank(instance))
        except Exception as error:
            self.raised("instance_rank", error)
            return ()

    def node_rank(self, node: NodeView) -> Rank:
        try:
            return _comparable(self._policy.node_rank(node))
        except Exception as error:
            self.raised("node_rank", error)
            return ()

    def places(self, request: RequestView | None, cell: CellView) -> Iterator[Plan]:
        return self._bounded("places", lambda: self._policy.places(request, cell), cell)

    def passes(self, plan: Plan, tests: Tests) -> Verdict | Shortage:
        try:
            said = self._policy.passes(plan, tests)
            return said if isinstance(said, Verdict | Shortage) else Verdict(said)
        except Exception as error:
            self.raised("passes", error)
            return Verdict.DELAYS_RUNNING

    def waits(self, request: RequestView, outlook: Outlook) -> bool | Shortage:
        try:
            said: object = self._policy.waits(request, outlook)
            if said is True or said is False or isinstance(said, Shortage):
                return said
            self.fault(PolicyFaultKind.NO_ANSWER, "waits", f"{said!r} is neither bool nor Shortage")
        except Exception as error:
            self.raised("waits", error)
        return True

    def may_be_late(self, request: RequestView, outlook: Outlook) -> bool:
        try:
            return bool(self._policy.may_be_late(request, outlook))
        except Exception as error:
            self.raised("may_be_late", error)
            return False

    def relieve(self, place: Place, missing_bytes: int, cell: CellView) -> Iterator[Releases]:
        return self._bounded(
            "relieve", lambda: self._policy.relieve(place, missing_bytes, cell), cell
        )

    def evict(self, instance: InstanceView, cell: CellView) -> RequestView:
        requests = list(cell.requests(instance))
        try:
            chosen = self._policy.evict(instance, cell)
            if any(request is chosen for request in requests):
                return chosen
            self.fault(PolicyFaultKind.NO_ANSWER, "evict", "it does not run there")
        except Exception as error:
            self.raised("evict", error)
        return longest_headroom(requests)

    def idle(self, instance: InstanceView, cell: CellView) -> Release | float:
        try:
            found = self._policy.idle(instance, cell)
            if isinstance(found, Release):
                _check(found)
                if found.instance is not instance:
                    raise ValueError("it releases another instance")
                return found
            if found != found:
                raise ValueError("it says nan seconds")
            return min(max(float(found), WAIT_S_LEAST), WAIT_S_MOST)
        except Exception as error:
            self.raised("idle", error)
            return Release(instance=instance, how=How.UNLOAD)

    def upkeep(self, cell: CellView) -> Iterator[Plan]:
        return self._bounded("upkeep", lambda: self._policy.upkeep(cell), cell)

    def first_token(self, request: RequestView, cell: CellView) -> Iterator[Plan]:
        return self._bounded("first_token", lambda: self._policy.first_token(request, cell), cell)

    def prefetch(self, cell: AheadView) -> Iterator[Plan]:
        return self._bounded("prefetch", lambda: self._policy.prefetch(cell), cell)

    def kv_of(
        self,
        required_blocks: int,
        block_tokens: int,
        context_tokens: int,
        swaps: bool = False,
    ) -> KvSize:
        """`kv` of an instance that is there. Asked for at every candidate: what was said is kept,
        for a policy says the same of the same demand.
        """
        key = required_blocks, block_tokens, context_tokens, swaps
        known = self._sizes.get(key)
        if known is None:
            if len(self._sizes) >= SIZES_MAX:
                self._sizes.clear()
            demand = KvDemand(
                required_blocks=required_blocks,
                block_tokens=block_tokens,
                context_tokens=context_tokens,
                tokens_least=self._limits.kv_tokens_least,
                watermark_share=self._limits.kv_watermark_share,
                swaps=swaps,
            )
            known = self._sizes[key] = self.kv(demand)
        return known

    def kv(self, demand: KvDemand) -> KvSize:
        try:
            size = self._policy.kv(demand)
            batch_max = 1 if size.batch_max is None else size.batch_max
            numbers = (size.required_blocks, size.wanted_blocks, batch_max)
            whole = all(type(number) is int for number in numbers) and batch_max >= 1
            if whole and 0 <= size.required_blocks <= size.wanted_blocks <= size.kept_blocks_max:
                return size
            self.fault(PolicyFaultKind.NO_ANSWER, "kv", f"no size of a cache: {size!r}")
        except Exception as error:
            self.raised("kv", error)
        return by_demand(demand)

    def pace(self, slo: Slo) -> Pace:
        try:
            found = self._policy.pace(slo)
            if 0.0 < found.share <= 1.0 and found.slack_share >= 0.0:
                return found
            self.fault(PolicyFaultKind.NO_ANSWER, "pace", f"{found!r} does not keep the SLO")
        except Exception as error:
            self.raised("pace", error)
        return PACE

    def _bounded(self, call: str, ask: Callable[[], Iterator[T]], cell: CellView) -> Iterator[T]:
        looked_at = 0
        try:
            for plan in ask():
                for each in _releases(plan) if call == "relieve" else (plan,):
                    _check(each)
                yield plan
                looked_at += 1
                if looked_at >= PLANS_SPARE and looked_at >= 2 * cell.size() + PLANS_SPARE:
                    message = "it goes on beyond two plans for each node and instance"
                    self.fault(PolicyFaultKind.NO_END, call, message)
                    return
        except Exception as error:
            self.raised(call, error)

    def raised(self, call: str, error: Exception) -> None:
        message = error.message if isinstance(error, MeshError) else str(error)
        self.fault(PolicyFaultKind.RAISED, call, f"{type(error).__name__}: {message}")


class _GuardedRule:
    """A rule from elsewhere, as forecasts roll it forward. Where it raises or gives no turn, that
    is a fault of `turn`, and the first of the run queues has the turn.
    """

    def __init__(self, rule: TurnRule, policy: Guarded) -> None:
        self._rule, self._policy = rule, policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def turn(self, queues: Sequence[RunQueue], now_s: float, bounds: TurnBounds) -> Grant:
        try:
            grant = self._rule.turn(queues, now_s, bounds)
            if not any(grant.queue is queue for queue in queues) or not _can_be(grant):
                raise ValueError(f"no turn of the instances that have work: {grant!r}")
            return grant
        except Exception as error:
            self._policy.raised("turn", error)
        inside = [queue for queue in queues if not queue.out]
        return whole_turn(min(inside, key=lambda queue: queue.instance_id), queues, bounds)

    def swap(self, weights: Sequence[Weights], free_bytes: int) -> Swap | None:
        try:
            return cast(SwapRule, self._rule).swap(weights, free_bytes)
        except Exception as error:
            self._policy.raised("swap", error)
        return None


def _can_be(grant: Grant) -> bool:
    """Whether a turn can be rolled forward."""
    computed = grant.prefill
    tokens = [computed] if isinstance(computed, int) else [tokens for _, tokens in computed]
    numbers = (grant.iterations, *tokens)
    return (
        (grant.decode is None or isinstance(grant.decode, tuple))
        and all(type(number) is int and 0 <= number <= CONTEXT_TOKENS_MAX for number in numbers)
        and 1 <= grant.iterations <= ITERATIONS_MAX
        and 0.0 <= grant.seconds < inf
    )


def _releases(plan: object) -> tuple[object, ...]:
    """Those that go together. Raises TypeError where they are none."""
    if not (isinstance(plan, tuple) and all(isinstance(release, Release) for release in plan)):
        raise TypeError(f"not a tuple of releases: {plan!r}")
    return plan


def _check(plan: object) -> None:
    """Raises TypeError for what is no plan, and for one that lacks what it is about."""
    views = _VIEWS.get(type(plan))
    if views is None:
        raise TypeError(f"not a plan: {plan!r}")
    for field, identifier in views:
        if not hasattr(getattr(plan, field), identifier):
            raise TypeError(f"{type(plan).__name__} without {field}: {plan!r}")
    match plan:
        case Join():
            right = plan.label is None or isinstance(plan.label, str)
        case Start():
            named = plan.deployment is None or isinstance(plan.deployment, str)
            right = named and isinstance(plan.label, str)
        case Label():
            right = isinstance(plan.label, str)
        case Release():
            right = plan.to is None or hasattr(plan.to, "instance_id")
        case Move():
            right = all(hasattr(request, "request_id") for request in plan.requests)
        case Prefetch():
            others = all(hasattr(other, "instance_id") for other in plan.instead_of)
            right = others and isinstance(plan.deployment, str)
        case _:
            right = True
    if not right:
        raise TypeError(f"{type(plan).__name__} with what cannot be: {plan!r}")


def _comparable(rank: Rank) -> Rank:
    """The same, of numbers alone, so that any two can be compared."""
    total = sum(rank)
    if total != total:
        raise ValueError(f"a rank has numbers that can be compared, this one is {rank!r}")
    return rank
