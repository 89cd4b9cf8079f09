"""What a policy decides: who joins what, where instances start, who gives way, and when it goes.

Views go in, plans come out, lazily: the core takes the first that its books allow and that passes.
A policy is a value without state: rates and histories are in the views, so that journals replay.
README.md tells how to write one. Before: the queues. After: the books.
"""

from collections.abc import Callable, Iterator
from math import inf
from typing import Protocol

from mesh.domain.errors import InvalidInput
from mesh.domain.model import Footprint
from mesh.domain.node_rule import NodeRule
from mesh.domain.profile import Profile
from mesh.domain.reasons import DeviceKind, Verdict
from mesh.domain.slo import Pace, Slo
from mesh.domain.values import dataclass
from mesh.policy.plans import Plan, Release, Releases, Shortage
from mesh.policy.rules.turns import TurnRule
from mesh.policy.views import (
    AheadView,
    CellView,
    InstanceView,
    NodeView,
    Outlook,
    Place,
    RequestView,
)

Rank = tuple[float, ...]
"""Smaller comes first; ids break ties."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDemand:
    """An instance that is about to start."""

    node: NodeView
    footprint: Footprint
    profile: Callable[[], Profile]
    context_tokens: int
    tpot_s: float


@dataclass(slots=True, kw_only=True)
class KvDemand:
    """What a KV cache is for."""

    required_blocks: int
    """The blocks that its requests need, by the lengths of earlier answers (LLM-Mesh eq. 2)."""
    block_tokens: int
    context_tokens: int
    """The longest that its instance computes."""
    tokens_least: int
    """The least tokens that an instance serves with, by the cell's settings; they are fewer where
    its context is shorter.
    """
    watermark_share: float
    """The share that a cache gets over what is required, by the cell's settings."""
    swaps: bool = False
    """Its node swaps weights, for which it has what KV caches leave."""
    start: StartDemand | None = None
    """The instance that is about to start; `None` when the instance is there already."""


@dataclass(slots=True, kw_only=True)
class KvSize:
    """How large a KV cache is to be."""

    required_blocks: int
    """Without them its requests cannot be served."""
    wanted_blocks: int
    """Where there is room."""
    kept_blocks_max: float = inf
    """More than that are given back."""
    batch_max: int | None = None
    """Requests at a time; None: what its engine can carry."""


class Tests(Protocol):
    """Tests of one plan. Each looks at the node as it would be after the plan."""

    def shadow(self, plan: Plan) -> Verdict:
        """Whether every token is in time, the node's schedule rolled forward (LLM-Mesh §5.3)."""
        ...

    def utilisation(self, plan: Plan) -> float:
        """The share of the node's time that is in use at the pace of its SLOs; above 1 the node
        falls behind.
        """
        ...

    def spare_bytes(self, plan: Plan) -> int:
        """The memory that the node has to spare; below 0 an instance has to be unloaded."""
        ...

    def arrives_s(self, plan: Plan) -> float:
        """When the weights are there, the queue of the link included."""
        ...


class Policy(Protocol):
    """Frozen: the same views give the same plans."""

    @property
    def name(self) -> str: ...
    @property
    def rule(self) -> TurnRule:
        """Whose turn it is on a node: run there, and rolled forward by `Tests.shadow`."""
        ...

    @property
    def node_rule(self) -> NodeRule:
        """The numbers beside it."""
        ...

    @property
    def devices(self) -> tuple[DeviceKind, ...]:
        """Nodes that it uses at all."""
        ...

    @property
    def instances_per_node(self) -> int:
        """The most instances of a deployment on a node: they compute on the same device."""
        ...

    @property
    def promises(self) -> bool:
        """Whether a request is told at once which deadlines hold, by `Tests.shadow`: it takes a
        place or a load where that passes. If not, loads are begun for the queue as a whole.
        """
        ...

    @property
    def goes_on(self) -> bool:
        """Whether it is asked where requests go on with their first token: `first_token`."""
        ...

    @property
    def upkeep_s(self) -> float:
        """The seconds between two calls of `upkeep`, at most the cell's `lease_check_s`."""
        ...

    def instance_rank(self, instance: InstanceView) -> Rank:
        """In this order instances are candidates. The core keeps it, and ranks an instance anew
        when its batch changes: it may depend on that and on what never changes.
        """
        ...

    def node_rank(self, node: NodeView) -> Rank:
        """In this order nodes come into question; of equal ones that which has the model nearer."""
        ...

    def places(self, request: RequestView | None, cell: CellView) -> Iterator[Plan]:
        """Joins and starts for a request in any order, the best first, releases of who is to go
        for it, or `Refuse`; None: an instance for the minimum of a deployment.
        """
        ...

    def passes(self, plan: Plan, tests: Tests) -> Verdict | Shortage:
        """Whether a join, a start or a move for which there is room is to be; if not, why."""
        ...

    def waits(self, request: RequestView, outlook: Outlook) -> bool | Shortage:
        """Whether a request without a promise waits on; if not, it is refused for what the nearest
        place lacks, or for a shortage of the policy's own. Nobody waits for longer than the cell's
        settings allow.
        """
        ...

    def may_be_late(self, request: RequestView, outlook: Outlook) -> bool:
        """Whether a request that is in time nowhere may take a place or a load where it is late,
        and nobody else for its sake; its client is told by how much.
        """
        ...

    def relieve(self, place: Place, missing_bytes: int, cell: CellView) -> Iterator[Releases]:
        """Who may give way where so much memory is missing: each time all that go together."""
        ...

    def evict(self, instance: InstanceView, cell: CellView) -> RequestView:
        """Which of its requests gives its KV cache up where that of all of them does not do, and
        cannot grow: it goes on elsewhere, or later, with its tokens so far.
        """
        ...

    def idle(self, instance: InstanceView, cell: CellView) -> Release | float:
        """What becomes of an instance whose keep-alive is over; or ask again in so many seconds."""
        ...

    def upkeep(self, cell: CellView) -> Iterator[Plan]:
        """Every `upkeep_s`: what would make the cell better (moves, releases, starts, labels)."""
        ...

    def first_token(self, request: RequestView, cell: CellView) -> Iterator[Plan]:
        """Plans as in `upkeep`, once a request that goes on has its first token: its move to where
        it decodes. Asked where `goes_on`.
        """
        ...

    def prefetch(self, cell: AheadView) -> Iterator[Plan]:
        """After each upkeep: what may be called next, and is brought nearer until then
        (`Prefetch`).
        """
        ...

    def kv(self, demand: KvDemand) -> KvSize: ...
    def pace(self, slo: Slo) -> Pace:
        """The pace with which tokens under this SLO are planned."""
        ...


def checked(chosen: Policy) -> Policy:
    """The same. Raises InvalidInput where a number of its rule cannot be meant, or where it
    promises by a validation that does not model the turns of its nodes.
    """
    chosen.node_rule.check()
    if chosen.promises and chosen.rule.period == 0:
        raise InvalidInput(
            f"policy {chosen.name!r} promises deadlines, and nothing can be promised by its turn "
            f"rule {chosen.rule.name!r}: its period is 0",
            hint="promises = False, or another rule",
        )
    return chosen
