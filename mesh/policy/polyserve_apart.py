"""`polyserve-pd`: prompts and decodes on servers of their own (PolyServe, disaggregated).

§4.2 has prompts of all tiers on any server for prompts, the nearest deadline first, and §4.7 admits
them by that; with its first token a request goes to a server of its tier, and its KV blocks with
it. docs/policy-polyserve.md says what differs from the paper.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mesh.policy.colocated import CoLocated, is_served_late
from mesh.policy.first_tokens import is_in_time, prompt_tokens
from mesh.policy.hand_over import (
    hand_over_s,
    handed_over,
    has_place,
    open_servers,
    with_first_token,
)
from mesh.policy.plans import Join, Label, Plan, Start
from mesh.policy.polyserve import label_of
from mesh.policy.rules.chunked import APART
from mesh.policy.rules.turns import TurnRule
from mesh.policy.views import CellView, InstanceView, RequestView

PREFILL = "prefill"
"""The label of a server for prompts."""


@dataclass(frozen=True, kw_only=True)
class PolyServeApart(CoLocated):
    name: str = "polyserve-pd"
    rule: TurnRule = APART
    goes_on: bool = True
    upkeep_s: float = 0.1

    # §4.7: the most loaded server for prompts on which nobody's first token is late, in the order
    # of deadlines; else one of the pool. §4.3: whoever no tier has room for pends.

    def places(self, request: RequestView | None, cell: CellView) -> Iterator[Plan]:
        if request is not None:
            late = is_served_late(request, self, cell)
            servers = list(cell.candidates())
            prefill = [server for server in servers if server.label == PREFILL]
            prefill.sort(key=lambda server: -prompt_tokens(server, cell))
            for server in (*prefill, *(server for server in servers if not server.label)):
                if not (late or is_in_time(request, server, cell, APART, self._hand_over_s)):
                    continue
                if not (late or self._has_tier(request, cell)):
                    break
                yield Join(request=request, instance=server, label=PREFILL)
        for node in cell.starts():
            yield Start(request=request, node=node)

    # §4.2 to §4.5: its own tier, then tighter ones, a server that pends, one of the pool. Those who
    # are computed already, or wait for it, have their places before it.

    def _has_tier(self, request: RequestView, cell: CellView) -> bool:
        coming = [
            of
            for server in cell.instances()
            if server.label == PREFILL
            for of in cell.requests(server)
            if not of.moves_now
        ]
        return has_place(request, coming, _tier_servers(request, cell), cell, self.pace_share)

    # §4.6: the first server that keeps the pace and has the second token in time; where none has it
    # in time, the first that keeps the pace.

    def first_token(self, request: RequestView, cell: CellView) -> Iterator[Plan]:
        servers = _tier_servers(request, cell)
        return handed_over(request, servers, cell, self.pace_share)

    def _hand_over_s(self, request: RequestView, server: InstanceView, cell: CellView) -> float:
        return hand_over_s(request, server, cell, self.pace_share)

    # §4.3: empty servers go back into the pool. Who found no place with its first token is tried
    # again.

    def upkeep(self, cell: CellView) -> Iterator[Plan]:
        for server in cell.instances():
            if server.label != PREFILL:
                label = label_of(server, cell.requests(server))
            else:
                label = PREFILL if server.batch else ""
                for request in with_first_token(server, cell):
                    yield from self.first_token(request, cell)
            if label != server.label:
                yield Label(instance=server, label=label)


POLYSERVE_PD = PolyServeApart()
POLYSERVE_PD_ABLATIONS = (PolyServeApart(name="polyserve-pd-no-refusal", refuses_late=False),)


def _tier_servers(request: RequestView, cell: CellView) -> list[InstanceView]:
    """Those that may decode it, the fullest first."""
    return [server for server in open_servers(request, cell) if server.label != PREFILL]
