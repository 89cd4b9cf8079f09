"""When first tokens come on a server, rolled forward whole iterations as its turn rule has them.

PolyServe §4.7 admits a prompt where nobody's first token is late because of it. Prompts are
computed by deadline, alone or beside decodes (`Chunked`): a newcomer with a near deadline delays
those before whom it goes. Before: the views of a server and the times of its iterations. After:
`polyserve_apart`, `mesh_slo`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from mesh.compute.times import Times
from mesh.policy.rules.chunked import Chunked
from mesh.policy.views import CellView, InstanceView, RequestView

Early = Callable[[RequestView, InstanceView, CellView], float]
"""By how many seconds before it is due a first token has to come."""


def never_early(request: RequestView, server: InstanceView, cell: CellView) -> float:
    """Its first token may come when it is due."""
    return 0.0


def prompt_tokens(server: InstanceView, cell: CellView) -> int:
    """The tokens of prompts that a server has yet to compute."""
    return sum(of.prefill_left for of in cell.requests(server))


def is_in_time(
    request: RequestView,
    server: InstanceView,
    cell: CellView,
    rule: Chunked,
    early_s: Early = never_early,
    *,
    pace_s: float = inf,
) -> bool:
    """Whether nobody's first token is late on a server because of the request, nor its own: after
    the iteration in flight, in the order of deadlines, beside decodes that have a token each
    `pace_s`. A request that is alone on a server for prompts need not be early.
    """
    waiting = [of for of in cell.requests(server) if of.prefill_left]
    alone = rule.apart and not waiting
    with_it = _first_tokens_s(server, cell, rule, pace_s, request)
    own_s = 0.0 if alone else early_s(request, server, cell)
    if with_it[request.request_id] > request.due_s - own_s:
        return False
    late = [
        (of, limit_s)
        for of in waiting
        for limit_s in (of.due_s, of.due_s - early_s(of, server, cell))
        if with_it[of.request_id] > limit_s
    ]
    without = _first_tokens_s(server, cell, rule, pace_s) if late else {}
    return all(without[of.request_id] > limit_s for of, limit_s in late)


def _first_tokens_s(
    server: InstanceView,
    cell: CellView,
    rule: Chunked,
    pace_s: float,
    more: RequestView | None = None,
) -> dict[str, float]:
    """When the prompts of a server are computed, with one more or as they are."""
    began_s, waiting = server.node.iteration_started_s, list[_Prompt]()
    rolled = _Rolled(rule=rule, times=cell.times(server), pace_s=pace_s)
    for of in cell.requests(server):
        if of.prefill_left:
            waiting.append(_Prompt(of))
        elif not (rule.apart or of.moves_now):
            rolled.decodes(of.tokens, of.due_s)
    waiting.sort(key=lambda of: of.order)
    at_s = cell.now_s
    if began_s is not None:
        flying = [of for of in waiting if of.request.submitted_s <= began_s]
        took_s = rolled.iteration_s(flying, began_s) if flying else cell.decode_s(server)
        at_s = max(at_s, began_s + took_s)
    if more is not None:
        waiting.append(_Prompt(more, more.tokens))
        waiting.sort(key=lambda of: of.order)
    while left := [of for of in waiting if of.left]:
        at_s += rolled.iteration_s(left, at_s)
    return rolled.ends_s


@dataclass(slots=True)
class _Prompt:
    """A prompt in the forecast of a server."""

    request: RequestView
    left: int = 0
    past: int = 0
    order: tuple[float, str] = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.left or self.request.prefill_left
        self.past = self.request.tokens - self.left
        self.order = self.request.due_s, self.request.request_id


@dataclass(slots=True, kw_only=True)
class _Rolled:
    """A server in a forecast. Those who decode on it are told by the first deadline among them."""

    rule: Chunked
    times: Times
    pace_s: float
    batch: int = 0
    tokens: int = 0
    due_s: float = inf
    ends_s: dict[str, float] = field(default_factory=dict)
    """When prompts are computed."""

    def decodes(self, tokens: int, due_s: float) -> None:
        """One more decodes, whose next token is due then."""
        self.batch, self.tokens, self.due_s = (
            self.batch + 1,
            self.tokens + tokens,
            min(self.due_s, due_s),
        )

    def iteration_s(self, prompts: Sequence[_Prompt], at_s: float) -> float:
        """Seconds of an iteration that begins then; what it computes is done."""
        batch, times = self.batch, self.times
        decode_s = times.decode_s(batch, self.tokens / batch) if batch else 0.0
        limit_s = max(min(self.due_s, prompts[0].order[0]) - at_s, self.pace_s) if batch else inf
        named = self.rule.by_deadline(
            [(of, of.left) for of in prompts],
            times=times,
            batch=batch,
            past=prompts[0].past,
            spare_s=limit_s - decode_s,
            tokens_max=2 * self.rule.alone_tokens,
        )
        tokens = sum(count for _, count in named)
        past = sum(of.past * count for of, count in named) / tokens
        prompts_s = times.chunk_s(tokens, past, batch) if batch else times.prefill_s(tokens, past)
        took_s = decode_s + prompts_s
        self.due_s += self.pace_s
        for of, count in named:
            of.left, of.past = of.left - count, of.past + count
            if not of.left:
                self.ends_s[of.request.request_id] = at_s + took_s
                if not self.rule.apart:
                    self.decodes(of.past, max(of.request.due_s, at_s + took_s) + self.pace_s)
        return took_s
