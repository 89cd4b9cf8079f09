"""What PolyServe is compared with (§5.1): `co-random`, `co-minimal`, `co-chunk`, and apart
`pd-random` and `pd-minimal`.

A request goes to a server at random, to that of the quickest iteration, or to that with the fewest
requests, and does so at once; it is refused where that server could not have its first token in
time though it computed nothing but prompts. Iterations take the quickest pace of their server, but
under `co-chunk` a fixed budget of tokens, the cell's `prefill_tokens_max`. Apart the servers are
divided for good, and a request goes on to another one with its first token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

from mesh.policy.colocated import CoLocated
from mesh.policy.first_tokens import is_in_time, prompt_tokens
from mesh.policy.hand_over import open_servers, with_first_token
from mesh.policy.plans import Join, Move, Plan, Refuse, Start
from mesh.policy.rules.chunked import APART, BUDGET, CHUNKED
from mesh.policy.rules.turns import TurnRule
from mesh.policy.views import CellView, InstanceView, RequestView

PREFILL = "prefill"
"""How the names of servers for prompts begin, where they are divided."""


class Choice(StrEnum):
    """Where a request goes."""

    RANDOM = "random"
    MINIMAL = "minimal"
    """To the server with the least time of an iteration."""
    CHUNK = "chunk"
    """To the server with the fewest requests."""


@dataclass(frozen=True, kw_only=True)
class CoBaseline(CoLocated):
    choice: Choice

    def places(self, request: RequestView | None, cell: CellView) -> Iterator[Plan]:
        servers = sorted(cell.candidates(), key=lambda server: server.instance_id)
        if request is not None and servers:
            server = self._chosen(request, servers, cell)
            refusable = self.refuses_late and not request.accepted
            if refusable and _is_hopeless(request, server, cell):
                yield _too_late(request, server)
                return
            yield Join(request=request, instance=server)
        for node in cell.starts():
            yield Start(request=request, node=node)

    def _chosen(
        self, request: RequestView, servers: list[InstanceView], cell: CellView
    ) -> InstanceView:
        match self.choice:
            case Choice.RANDOM:
                return drawn(request, servers)
            case Choice.MINIMAL:
                return min(servers, key=lambda server: iteration_s(server, cell))
            case Choice.CHUNK:
                return min(servers, key=lambda server: server.batch)


@dataclass(frozen=True, kw_only=True)
class ApartBaseline(CoLocated):
    rule: TurnRule = APART
    goes_on: bool = True
    upkeep_s: float = 0.1
    choice: Choice

    def places(self, request: RequestView | None, cell: CellView) -> Iterator[Plan]:
        servers = [server for server in cell.candidates() if _is_for_prompts(server)]
        if request is not None and servers:
            if self.choice is Choice.RANDOM:
                server = drawn(request, servers)
            else:
                server = min(servers, key=lambda of: (prompt_tokens(of, cell), of.instance_id))
            refusable = self.refuses_late and not request.accepted
            if refusable and not is_in_time(request, server, cell, APART):
                yield _too_late(request, server)
                return
            yield Join(request=request, instance=server)
        for node in cell.starts():
            yield Start(request=request, node=node)

    def first_token(self, request: RequestView, cell: CellView) -> Iterator[Plan]:
        servers = [of for of in open_servers(request, cell) if not _is_for_prompts(of)]
        if servers and self.choice is Choice.RANDOM:
            yield Move(requests=(request,), to=drawn(request, servers), at_once=True)
        elif servers:
            server = min(servers, key=lambda of: (*iteration_s(of, cell), of.instance_id))
            yield Move(requests=(request,), to=server, at_once=True)

    def upkeep(self, cell: CellView) -> Iterator[Plan]:
        for server in cell.instances():
            if _is_for_prompts(server):
                for request in with_first_token(server, cell):
                    yield from self.first_token(request, cell)


CO_BASELINES = tuple(
    CoBaseline(
        name=f"co-{choice}{suffix}",
        choice=choice,
        rule=BUDGET if choice is Choice.CHUNK else CHUNKED,
        refuses_late=refuses_late,
    )
    for choice in Choice
    for suffix, refuses_late in (("", True), ("-no-refusal", False))
)
PD_BASELINES = tuple(
    ApartBaseline(name=f"pd-{choice}{suffix}", choice=choice, refuses_late=refuses_late)
    for choice in (Choice.RANDOM, Choice.MINIMAL)
    for suffix, refuses_late in (("", True), ("-no-refusal", False))
)


def drawn(request: RequestView, servers: Sequence[InstanceView]) -> InstanceView:
    """One of the servers, the same for the same request."""
    number = blake2b(request.request_id.encode(), digest_size=8).digest()
    return servers[int.from_bytes(number) % len(servers)]


def iteration_s(server: InstanceView, cell: CellView) -> tuple[float, int]:
    """Seconds of the prompts and of a decode of a server. Small batches take the same time: of
    those the smallest is the least.
    """
    return cell.prompts_s(server.node) + cell.decode_s(server), server.batch


def _too_late(request: RequestView, server: InstanceView) -> Refuse:
    message = f"{server.instance_id} could not have its first token in time"
    return Refuse(request=request, message=message)


def _is_hopeless(request: RequestView, server: InstanceView, cell: CellView) -> bool:
    own_s = cell.times(server).prefill_s(request.tokens, 0)
    return cell.now_s + cell.prompts_s(server.node) + own_s > request.due_s


def _is_for_prompts(server: InstanceView) -> bool:
    return server.node.node_id.startswith(PREFILL)
