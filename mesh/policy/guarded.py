"""The policy as the core calls it: whatever it does, the cell goes on, and it is known whose fault
it was.

What raises, yields without end, or answers what cannot be counts as a fault, which the core puts
into its actions, and with that into the journal; in place of the answer stands one that does no
harm: no plan, no pass, an order by ids, a cache by demand. Time is told by the host
(`DecisionTookLong`): no clock is here. Before: the core's rooms. After: the policy.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

from mesh.domain.actions import NotePolicyFault
from mesh.domain.errors import MeshError
from mesh.domain.reasons import PolicyFaultKind, Verdict
from mesh.policy.interface import KvDemand, KvSize, Policy, Rank, Tests
from mesh.policy.kv_sizes import by_demand
from mesh.policy.plans import How, Plan, Release
from mesh.policy.views import CellView, InstanceView, NodeView, RequestView

FAULTS_MAX = 8
"""Of an event, that are noted."""
PLANS_SPARE = 64
"""Plans of one answer that are looked at, beside two for each node and instance of the cell."""
WAIT_S_LEAST, WAIT_S_MOST = 0.1, 3600.0
"""Until a policy is asked again what becomes of an idle instance."""

T = TypeVar("T")


class Guarded:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name, self.node_rule, self.devices = policy.name, policy.node_rule, policy.devices
        self.promises, self.refuses_late = policy.promises, policy.refuses_late
        self.prefetches = policy.prefetches
        self._faults: list[NotePolicyFault] = []

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
            self._raised("instance_rank", error)
            return ()

    def node_rank(self, node: NodeView) -> Rank:
        try:
            return _comparable(self._policy.node_rank(node))
        except Exception as error:
            self._raised("node_rank", error)
            return ()

    def places(self, request: RequestView | None, cell: CellView) -> Iterator[Plan]:
        return self._bounded("places", lambda: self._policy.places(request, cell), cell)

    def passes(self, plan: Plan, tests: Tests) -> Verdict:
        try:
            return Verdict(self._policy.passes(plan, tests))
        except Exception as error:
            self._raised("passes", error)
            return Verdict.DELAYS_RUNNING

    def relieve(
        self, place: InstanceView | NodeView, missing_bytes: int, cell: CellView
    ) -> Iterator[tuple[Release, ...]]:
        return self._bounded(
            "relieve", lambda: self._policy.relieve(place, missing_bytes, cell), cell
        )

    def idle(self, instance: InstanceView, cell: CellView) -> Release | float:
        try:
            found = self._policy.idle(instance, cell)
            if isinstance(found, Release):
                return found
            return min(max(float(found), WAIT_S_LEAST), WAIT_S_MOST)
        except Exception as error:
            self._raised("idle", error)
            return Release(instance=instance, how=How.UNLOAD)

    def upkeep(self, cell: CellView) -> Iterator[Plan]:
        return self._bounded("upkeep", lambda: self._policy.upkeep(cell), cell)

    def kv(self, demand: KvDemand) -> KvSize:
        try:
            size = self._policy.kv(demand)
            if 0 <= size.required_blocks <= size.wanted_blocks <= size.kept_blocks_max:
                return size
            why = f"{size.required_blocks} blocks required, {size.wanted_blocks} wanted"
            self.fault(PolicyFaultKind.NO_ANSWER, "kv", why)
        except Exception as error:
            self._raised("kv", error)
        return by_demand(demand)

    def _bounded(self, call: str, ask: Callable[[], Iterator[T]], cell: CellView) -> Iterator[T]:
        try:
            left = -1
            for plan in ask():
                _meant(plan)
                if left < 0:
                    left = 2 * cell.size() + PLANS_SPARE
                yield plan
                left -= 1
                if not left:
                    message = "it goes on beyond two plans for each node and instance"
                    self.fault(PolicyFaultKind.NO_END, call, message)
                    return
        except Exception as error:
            self._raised(call, error)

    def _raised(self, call: str, error: Exception) -> None:
        message = error.message if isinstance(error, MeshError) else str(error)
        self.fault(PolicyFaultKind.RAISED, call, f"{type(error).__name__}: {message}")


def _meant(plan: object) -> None:
    """Raises TypeError where it is neither a plan nor releases that go together."""
    releases = isinstance(plan, tuple) and all(isinstance(release, Release) for release in plan)
    if not releases and not isinstance(plan, Plan):
        raise TypeError(f"not a plan: {plan!r}")


def _comparable(rank: Rank) -> Rank:
    """The same, of numbers alone, so that any two can be compared."""
    if not all(key == key + 0 for key in rank):
        raise ValueError(f"a rank has numbers that can be compared, this one is {rank!r}")
    return rank
