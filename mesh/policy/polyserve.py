"""`polyserve-co`: servers in tiers of one TPOT each, the fullest first (PolyServe, co-located).

A page beside the paper: §4.2 has a tier for each TPOT, §4.3 servers that join a tier and leave it,
§4.4 requests that go into a tighter tier when their own is full, §4.5 to §4.7 the predictions that
admit (`colocated`). A tier is a label of a server; a server without one is of the pool.
docs/policy-polyserve.md says what differs from the paper.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Protocol, TypeVar

from mesh.policy.colocated import CoLocated, first_token_s, is_served_late, keeps_pace
from mesh.policy.interface import Rank
from mesh.policy.plans import Join, Label, Plan, Start
from mesh.policy.rules.chunked import AHEAD
from mesh.policy.rules.turns import TurnRule
from mesh.policy.views import CellView, InstanceView, RequestView


@dataclass(frozen=True, kw_only=True)
class PolyServe(CoLocated):
    name: str = "polyserve-co"
    rule: TurnRule = AHEAD
    promotes: bool = True
    """Whether a request may go into a tighter tier (§4.4)."""
    fills: bool = True
    """Whether the most loaded server comes first (§4.3), and not the least loaded one."""
    foresees: bool = True
    """Whether the pace is to be kept at the peak of the KV cache (§4.5), and not now alone."""
    chunks: bool = True
    """Whether the first token has to be in time by the chunks that can be kept (§4.7)."""
    upkeep_s: float = 0.1

    # §4.3: the most loaded server that still keeps the SLO, so that the last one empties.

    def instance_rank(self, instance: InstanceView) -> Rank:
        return (-instance.batch if self.fills else instance.batch,)

    # §4.2 to §4.4: its own tier, then the next tighter ones, then a server that pends with requests
    # of its TPOT, then one of the pool. If none will do it waits.

    def places(self, request: RequestView | None, cell: CellView) -> Iterator[Plan]:
        if request is not None:
            for server, tier_s in by_tier(request.slo.tpot_s, cell.candidates(), self.promotes):
                if self._keeps(request, server, cell, tier_s):
                    yield Join(request=request, instance=server, label=tier(tier_s))
        for node in cell.starts():
            yield Start(request=request, node=node)

    # §4.5 to §4.7: all keep their pace at the peak of their KV caches, and its first token comes in
    # time. Whoever is late already and is served all the same has its place for the pace.

    def _keeps(
        self, request: RequestView, server: InstanceView, cell: CellView, tier_s: float
    ) -> bool:
        limit_s = tier_s * self.pace_share
        if not keeps_pace(request, server, cell, limit_s, at_peak=self.foresees):
            return False
        late = not self.chunks or is_served_late(request, self, cell)
        return late or first_token_s(request, server, cell, limit_s) <= request.due_s

    # §4.3, §4.4: a server without requests goes back into the pool; one without requests of its own
    # tier pends.

    def upkeep(self, cell: CellView) -> Iterator[Plan]:
        for server in cell.instances():
            label = label_of(server, cell.requests(server))
            if label != server.label:
                yield Label(instance=server, label=label)


POLYSERVE_CO = PolyServe()
POLYSERVE_ABLATIONS = (
    PolyServe(name="polyserve-co-no-promotion", promotes=False),
    PolyServe(name="polyserve-co-no-gradient", fills=False),
    PolyServe(name="polyserve-co-no-peak", foresees=False),
    PolyServe(name="polyserve-co-no-chunks", chunks=False),
    PolyServe(name="polyserve-co-no-refusal", refuses_late=False),
)


class Labelled(Protocol):
    """A server, or one in a forecast."""

    @property
    def label(self) -> str: ...
    @property
    def batch(self) -> int: ...


L = TypeVar("L", bound=Labelled)


def by_tier(tpot_s: float, servers: Iterable[L], promotes: bool) -> Iterator[tuple[L, float]]:
    """Servers in the order in which a request of this TPOT tries them, the fullest first where they
    come so, and of which tier each is then: of its own, of the next tighter ones, those that pend
    with such requests, those of the pool.
    """
    known = [(server, tier_s_of(server)) for server in servers]
    # A label has six digits of a TPOT: a tier is its own by the label, and never by the number.
    yield from [(server, tpot_s) for server, _ in known if tier_label(server) == tier(tpot_s)]
    if promotes:
        tighter = [of for of in known if of[1] < tpot_s and tier_label(of[0]) != tier(tpot_s)]
        yield from sorted(tighter, key=lambda of: -of[1])
    for label in (pending(tpot_s), ""):
        yield from [(server, tpot_s) for server, _ in known if tier_label(server) == label]


def tier_label(server: Labelled) -> str:
    """Its label; none where it has no request: it is of the pool, though `upkeep` has not come."""
    return server.label if server.batch else ""


def tier(tpot_s: float) -> str:
    """The label of a server of the tier."""
    return f"tier {tpot_s * 1e3:g} ms"


def pending(tpot_s: float) -> str:
    """The label of a server that has no request of its tier, and this TPOT as the tightest."""
    return f"pending {tpot_s * 1e3:g} ms"


def tier_s_of(server: Labelled) -> float:
    """The TPOT of a server's tier; infinite where it has none."""
    return pace_s_of(server) if tier_label(server).startswith("tier") else inf


def pace_s_of(server: Labelled) -> float:
    """The TPOT that its label names, whether it is of that tier or pends; infinite without one."""
    _, _, pace = tier_label(server).partition(" ")
    return float(pace.removesuffix(" ms")) / 1e3 if pace else inf


def label_of(server: InstanceView, requests: Iterable[RequestView]) -> str:
    """What the label of a server should be by the requests that decode there."""
    tightest_s = min((request.slo.tpot_s for request in requests), default=inf)
    if not server.label or tightest_s == inf:
        return ""
    return server.label if tier(tightest_s) == server.label else pending(tightest_s)
