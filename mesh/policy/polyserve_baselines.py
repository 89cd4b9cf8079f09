"""`co-random`, `co-minimal` and `co-chunk`: what PolyServe is compared with (§5.1), co-located.

A request goes to a server at random, to that of the quickest iteration, or to that with the fewest
requests, and does so at once; it is refused where that server could not have its first token in
time though it computed nothing but prompts. Iterations take the quickest pace of their server, but
under `co-chunk` a fixed budget of tokens, the cell's `prefill_tokens_max`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

from mesh.policy.colocated import CoLocated
from mesh.policy.plans import Join, Plan, Refuse, Start
from mesh.policy.rules.chunked import BUDGET, CHUNKED
from mesh.policy.views import CellView, InstanceView, RequestView


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
                message = f"{server.instance_id} could not have its first token in time"
                yield Refuse(request=request, message=message)
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


def drawn(request: RequestView, servers: Sequence[InstanceView]) -> InstanceView:
    """One of the servers, the same for the same request."""
    number = blake2b(request.request_id.encode(), digest_size=8).digest()
    return servers[int.from_bytes(number) % len(servers)]


def iteration_s(server: InstanceView, cell: CellView) -> tuple[float, int]:
    """Seconds of the prompts and of a decode of a server. Small batches take the same time: of
    those the smallest is the least.
    """
    return cell.prompts_s(server.node) + cell.decode_s(server), server.batch


def _is_hopeless(request: RequestView, server: InstanceView, cell: CellView) -> bool:
    own_s = cell.times(server).prefill_s(request.tokens, 0)
    return cell.now_s + cell.prompts_s(server.node) + own_s > request.due_s
