"""`mesh-slo`: each request where it costs least, its prompt and its decodes together or apart.

An iteration of decodes brings the weights through memory whether prompts are beside it or not, so
that prompts beside decodes are the cheapest (docs/policy-polyserve.md has the figures). But beside
a tight pace only short chunks fit, and a long prompt is late there. So servers are in tiers as
under PolyServe, and a request

1. is computed together, prompt and decodes, on the fullest server of its tier, or of a tighter
   one, that keeps its pace and everybody's first token in time;
2. else apart: its prompt on the fullest server of a looser tier whose long iterations have room
   for it, and its decodes in its own tier, to which its KV blocks go;
3. else together on a server of the pool.

Prompts go by deadline, and an iteration lasts until the next token is due. While somebody waits
whose class pays more, nobody of a cheaper one takes a place. Who finds no place in time is refused.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import inf

from mesh.policy.colocated import CoLocated, is_served_late, keeps_pace
from mesh.policy.first_tokens import is_in_time
from mesh.policy.hand_over import (
    hand_over_s,
    handed_over,
    has_place,
    open_servers,
    with_first_token,
)
from mesh.policy.interface import Rank
from mesh.policy.plans import Join, Label, Plan, Start
from mesh.policy.polyserve import (
    by_tier,
    label_of,
    pace_s_of,
    pending,
    tier,
    tier_label,
    tier_s_of,
)
from mesh.policy.rules.chunked import BY_DUE, Chunked
from mesh.policy.views import CellView, InstanceView, RequestView

FIRST_TOKEN_SPARE_SHARE = 0.03
"""So much of the time until a first token is due is left for what predictions miss, on an idle
server, too: a prompt that takes all of its time there costs more than itself in overload.
"""


@dataclass(frozen=True, kw_only=True)
class MeshSlo(CoLocated):
    name: str = "mesh-slo"
    rule: Chunked = BY_DUE
    goes_on: bool = True
    divides: bool = True
    """Whether prompts may be computed on servers of looser tiers."""
    upkeep_s: float = 0.1

    def instance_rank(self, instance: InstanceView) -> Rank:
        return (-instance.batch,)

    def places(self, request: RequestView | None, cell: CellView) -> Iterator[Plan]:
        if request is not None:
            if _gives_way(request, cell):
                return
            late = is_served_late(request, self, cell)
            for server, label in self._in_order(request, cell, late):
                if not (late or self._has_place(request, cell)):
                    break
                yield Join(request=request, instance=server, label=label)
        for node in cell.starts():
            yield Start(request=request, node=node)

    def _in_order(
        self, request: RequestView, cell: CellView, late: bool
    ) -> Iterator[tuple[InstanceView, str]]:
        """The servers that compute its first token in time, and what each is labelled then."""
        servers = list(cell.candidates())
        ordered = list(by_tier(request.slo.tpot_s, servers, promotes=True))

        def keeps(server: InstanceView, tier_s: float) -> bool:
            return keeps_pace(request, server, cell, tier_s * self.pace_share)

        def together(pool: bool) -> Iterator[tuple[InstanceView, float, str]]:
            for of, tier_s in ordered:
                if pool is not bool(tier_label(of)) and keeps(of, tier_s):
                    yield of, tier_s, tier(tier_s)

        def apart() -> Iterator[tuple[InstanceView, float, str]]:
            looser = [of for of in servers if self.divides and _passes_through(request, of)]
            for of in sorted(looser, key=tier_s_of):
                if tier_s_of(of) < inf:
                    yield of, tier_s_of(of), of.label

        for server, tier_s, label in chain(together(False), apart(), together(True)):
            if late or self._in_time(request, server, cell, tier_s):
                yield server, label

    def _in_time(
        self, request: RequestView, server: InstanceView, cell: CellView, tier_s: float
    ) -> bool:
        """Whether nobody's first token is late there because of it, nor its own."""
        pace_s = tier_s * self.pace_share
        return is_in_time(request, server, cell, self.rule, self._early_s, pace_s=pace_s)

    def _early_s(self, request: RequestView, server: InstanceView, cell: CellView) -> float:
        """By how much its first token has to be early: what predictions miss, and the hand-over if
        it decodes elsewhere, which may take a pace longer where this server itself decodes the
        second token in time.
        """
        spare_s = FIRST_TOKEN_SPARE_SHARE * max(request.due_s - cell.now_s, 0.0)
        if not _passes_through(request, server):
            return spare_s
        early_s = hand_over_s(request, server, cell, self.pace_share)
        if cell.decode_s(server) <= request.slo.tpot_s * self.pace_share:
            early_s = max(early_s - request.slo.tpot_s, 0.0)
        return spare_s + early_s

    def _has_place(self, request: RequestView, cell: CellView) -> bool:
        """Whether there is room for its decodes beside those who are to come to their servers."""
        coming = [
            of
            for server in cell.instances()
            if cell.of_requests(server, _quickest_s) < pace_s_of(server)
            for of in cell.requests(server)
            if _passes_through(of, server) and not of.moves_now
        ]
        return has_place(request, coming, open_servers(request, cell), cell, self.pace_share)

    def first_token(self, request: RequestView, cell: CellView) -> Iterator[Plan]:
        for server in cell.instances():
            if _passes_through(request, server) and request in cell.requests(server):
                yield from self._hand_over(request, server, cell)

    def _hand_over(
        self, request: RequestView, server: InstanceView, cell: CellView
    ) -> Iterator[Plan]:
        others = [of for of in open_servers(request, cell) if of is not server]
        return handed_over(request, others, cell, self.pace_share)

    # Labels as under PolyServe, by those who stay. Who found no place with its first token is tried
    # again.

    def upkeep(self, cell: CellView) -> Iterator[Plan]:
        for server in cell.instances():
            for request in with_first_token(server, cell):
                if _passes_through(request, server):
                    yield from self._hand_over(request, server, cell)
            stay = [of for of in cell.requests(server) if not _passes_through(of, server)]
            if stay or not server.batch:
                label = label_of(server, stay)
                if label != server.label:
                    yield Label(instance=server, label=label)


MESH_SLO = MeshSlo()
MESH_SLO_ABLATIONS = (
    MeshSlo(name="mesh-slo-together", divides=False),
    MeshSlo(name="mesh-slo-no-refusal", refuses_late=False),
)


def _gives_way(request: RequestView, cell: CellView) -> bool:
    """Whether somebody waits, not late yet, whose class pays more for a token."""
    return any(
        of.slo.price > request.slo.price and of.due_s > cell.now_s
        for of in cell.waiting(request.deployment)
    )


def _quickest_s(requests: Iterable[RequestView]) -> float:
    """The tightest TPOT among requests."""
    return min((of.slo.tpot_s for of in requests), default=inf)


def _passes_through(request: RequestView, server: InstanceView) -> bool:
    """Whether only its prompt is computed there: the server's tier is looser than its own."""
    own_s = request.slo.tpot_s
    own = tier_label(server) in ("", tier(own_s), pending(own_s))
    return not own and pace_s_of(server) > own_s
