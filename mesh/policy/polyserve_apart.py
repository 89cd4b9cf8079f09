"""`polyserve-pd`, with prompts and decodes on servers of their own, and what it is compared with.

§4.2 has prompts of all tiers on any server for prompts, the nearest deadline first, and §4.7 admits
them by that; with its first token a request goes to a server of its tier, and its KV blocks with
it. `pd-random` and `pd-minimal` divide the servers for good: those whose names begin with `prefill`
compute prompts. docs/policy-polyserve.md says what differs from the paper.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil

from mesh.compute.times import Times
from mesh.policy.colocated import CoLocated, Seats, is_served_late, keeps_pace
from mesh.policy.plans import Carry, Join, Label, Move, Plan, Refuse, Start
from mesh.policy.polyserve import by_tier, label_of, tier
from mesh.policy.polyserve_baselines import Choice, drawn, iteration_s
from mesh.policy.rules.chunked import APART
from mesh.policy.rules.turns import TurnRule
from mesh.policy.views import CellView, InstanceView, RequestView

TOLD_S = 0.002
"""Until a server has been told of what another one has done."""
HAND_OVER_PACES = 2.5
"""From one server to another: the rest of the iteration in flight, half of one in the mean; the one
that begins before the server is told that its KV blocks are there; and its own.
"""
PREFILL = "prefill"
"""The label of a server for prompts, and how the names of those of the baselines begin."""


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
            prefill.sort(key=lambda server: -_prompt_tokens(server, cell))
            for server in (*prefill, *(server for server in servers if not server.label)):
                if not (late or is_in_time(request, server, cell, self._hand_over_s)):
                    continue
                if not (late or self._has_tier(request, cell)):
                    break
                yield Join(request=request, instance=server, label=PREFILL)
        for node in cell.starts():
            yield Start(request=request, node=node)

    # §4.2 to §4.5: its own tier, then tighter ones, a server that pends, one of the pool. Those who
    # are computed already, or wait for it, have their places before it.

    def _has_tier(self, request: RequestView, cell: CellView) -> bool:
        seats = [Seats.of(server, cell) for server in _tier_servers(request, cell)]
        coming = [
            of
            for server in cell.instances()
            if server.label == PREFILL
            for of in cell.requests(server)
            if not of.moves_now
        ]
        coming.sort(key=lambda of: (of.slo.tpot_s, of.due_s, of.request_id))
        return all(self._seat(of, seats, cell, must=of is request) for of in (*coming, request))

    def _seat(
        self, request: RequestView, seats: Sequence[Seats], cell: CellView, *, must: bool
    ) -> bool:
        """Give it a place in the forecast, if there is any; False where there `must` be one."""
        for seat, tier_s in by_tier(request.slo.tpot_s, seats, promotes=True):
            if seat.take(request, cell, tier_s * self.pace_share):
                seat.label = tier(tier_s)
                return True
        return not must

    # §4.6: the first server that keeps the pace and has the second token in time; where none has it
    # in time, the first that keeps the pace.

    def first_token(self, request: RequestView, cell: CellView) -> Iterator[Plan]:
        late: list[tuple[InstanceView, float]] = []
        servers = _tier_servers(request, cell)
        for server, tier_s in by_tier(request.slo.tpot_s, servers, promotes=True):
            if not keeps_pace(request, server, cell, tier_s * self.pace_share):
                continue
            if second_token_s(request, server, cell) > request.due_s:
                late.append((server, tier_s))
                continue
            yield from _moved(request, server, tier_s)
            if request.moves_now:
                return
        for server, tier_s in late:
            yield from _moved(request, server, tier_s)
            if request.moves_now:
                return

    def _hand_over_s(self, request: RequestView, server: InstanceView, cell: CellView) -> float:
        """By how much its first token has to be early for its second one to be in time."""
        late_s = request.slo.tpot_s * (HAND_OVER_PACES * self.pace_share - 1.0)
        return late_s + cell.carry_s(server, request.tokens) + TOLD_S

    # §4.3: empty servers go back into the pool. Who found no place with its first token is tried
    # again.

    def upkeep(self, cell: CellView) -> Iterator[Plan]:
        for server in cell.instances():
            if server.label != PREFILL:
                label = label_of(server, cell)
            else:
                label = PREFILL if server.batch else ""
                for request in _stuck(server, cell):
                    yield from self.first_token(request, cell)
            if label != server.label:
                yield Label(instance=server, label=label)


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
                server = min(servers, key=lambda of: (_prompt_tokens(of, cell), of.instance_id))
            refusable = self.refuses_late and not request.accepted
            if refusable and not is_in_time(request, server, cell):
                message = f"{server.instance_id} could not have its first token in time"
                yield Refuse(request=request, message=message)
                return
            yield Join(request=request, instance=server)
        for node in cell.starts():
            yield Start(request=request, node=node)

    def first_token(self, request: RequestView, cell: CellView) -> Iterator[Plan]:
        servers = [server for server in _open(request, cell) if not _is_for_prompts(server)]
        if servers and self.choice is Choice.RANDOM:
            yield Move(requests=(request,), to=drawn(request, servers), at_once=True)
        elif servers:
            server = min(servers, key=lambda of: (*iteration_s(of, cell), of.instance_id))
            yield Move(requests=(request,), to=server, at_once=True)

    def upkeep(self, cell: CellView) -> Iterator[Plan]:
        for server in cell.instances():
            if _is_for_prompts(server):
                for request in _stuck(server, cell):
                    yield from self.first_token(request, cell)


POLYSERVE_PD = PolyServeApart()
PD_POLICIES = (
    POLYSERVE_PD,
    PolyServeApart(name="polyserve-pd-no-refusal", refuses_late=False),
    *(
        ApartBaseline(name=f"pd-{choice}{suffix}", choice=choice, refuses_late=refuses_late)
        for choice in (Choice.RANDOM, Choice.MINIMAL)
        for suffix, refuses_late in (("", True), ("-no-refusal", False))
    ),
)


def never_early(request: RequestView, server: InstanceView, cell: CellView) -> float:
    """Its first token may come when it is due."""
    return 0.0


def is_in_time(
    request: RequestView,
    server: InstanceView,
    cell: CellView,
    early_s: Callable[[RequestView, InstanceView, CellView], float] = never_early,
) -> bool:
    """Whether nobody's first token is late on a server for prompts because of the request, nor its
    own: after the iteration in flight, in the order of deadlines. `early_s`: by how much before it
    is due it has to come; a request that is alone there need not be early.
    """
    waiting = [of for of in cell.requests(server) if of.prefill_left]
    with_it = _first_tokens_s(server, cell, request)
    own_s = early_s(request, server, cell) if waiting else 0.0
    if with_it[request.request_id] > request.due_s - own_s:
        return False
    late = [
        (of, limit_s)
        for of in waiting
        for limit_s in (of.due_s, of.due_s - early_s(of, server, cell))
        if with_it[of.request_id] > limit_s
    ]
    without = _first_tokens_s(server, cell) if late else {}
    return all(without[of.request_id] > limit_s for of, limit_s in late)


def _first_tokens_s(
    server: InstanceView, cell: CellView, more: RequestView | None = None
) -> dict[str, float]:
    """When the prompts of a server for prompts are computed, with one more or as they are: as its
    rule has them, after the iteration in flight.
    """
    began_s, times = server.node.iteration_started_s, cell.times(server)
    waiting = [_Prompt(of) for of in cell.requests(server) if of.prefill_left]
    waiting.sort(key=lambda of: of.order)
    ends_s: dict[str, float] = {}
    at_s = cell.now_s
    if began_s is not None:
        flying = [of for of in waiting if of.request.submitted_s <= began_s]
        took_s = _compute(flying, times, ends_s, began_s) if flying else cell.decode_s(server)
        at_s = max(at_s, began_s + took_s)
    if more is not None:
        waiting.append(_Prompt(more, more.tokens))
        waiting.sort(key=lambda of: of.order)
    while left := [of for of in waiting if of.left]:
        at_s += _compute(left, times, ends_s, at_s)
    return ends_s


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


def _compute(
    prompts: Sequence[_Prompt], times: Times, ends_s: dict[str, float], at_s: float
) -> float:
    """One iteration of a forecast: what it computes of prompts, the ends of those that it finishes,
    and the seconds that it takes.
    """
    named = APART.shared_out(((of, of.left) for of in prompts), 2 * APART.alone_tokens)
    tokens = sum(count for _, count in named)
    past = sum(of.past * count for of, count in named)
    took_s = times.prefill_s(tokens, past / tokens)
    for of, count in named:
        of.left, of.past = of.left - count, of.past + count
        if not of.left:
            ends_s[of.request.request_id] = at_s + took_s
    return took_s


def second_token_s(request: RequestView, server: InstanceView, cell: CellView) -> float:
    """When its second token would come from a server: after its KV blocks, the iteration that runs
    then, the one that begins before the server is told of them, and its own (§4.6).
    """
    ready_s = cell.now_s + cell.carry_s(server, request.tokens) + TOLD_S
    began_s, one_s = server.node.iteration_started_s, cell.decode_s(server)
    if began_s is None or not one_s:
        return ready_s + cell.times(server).decode_s(1, request.tokens)
    return began_s + (ceil(max(ready_s - began_s, 0.0) / one_s) + 2) * one_s


def _moved(request: RequestView, server: InstanceView, tier_s: float) -> Iterator[Plan]:
    """The move of a request to a server, which is of the tier then."""
    carry = Carry.KV if server.node.moves_kv else None
    yield Move(requests=(request,), to=server, at_once=True, carry=carry)
    if request.moves_now:
        yield Label(instance=server, label=tier(tier_s))


def _tier_servers(request: RequestView, cell: CellView) -> list[InstanceView]:
    """Those that may decode it, the fullest first."""
    servers = [of for of in _open(request, cell) if of.label != PREFILL]
    servers.sort(key=lambda server: (-server.batch, server.instance_id))
    return servers


def _prompt_tokens(server: InstanceView, cell: CellView) -> int:
    return sum(of.prefill_left for of in cell.requests(server))


def _stuck(server: InstanceView, cell: CellView) -> list[RequestView]:
    """Those with a first token that are still on a server for prompts."""
    there = [of for of in cell.requests(server) if of.output_tokens and not of.prefill_left]
    return [of for of in there if not of.moves_now]


def _open(request: RequestView, cell: CellView) -> list[InstanceView]:
    """The loaded instances of its model with a place."""
    of = cell.deployment(request.deployment)
    every = [] if of is None else of.instances.values()
    return [server for server in every if server.takes_now and server.batch < server.batch_max]


def _is_for_prompts(server: InstanceView) -> bool:
    return server.node.node_id.startswith(PREFILL)
