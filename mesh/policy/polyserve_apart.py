"""`polyserve-pd`, with prompts and decodes on servers of their own, and what it is compared with.

§4.2 has prompts of all tiers on any server for prompts, the nearest deadline first, and §4.7 admits
them by that; with its first token a request goes to a server of its tier, and its KV blocks with
it. `pd-random` and `pd-minimal` divide the servers for good: those whose names begin with `prefill`
compute prompts. docs/policy-polyserve.md says what differs from the paper.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from mesh.compute.times import Times
from mesh.policy.colocated import CoLocated, alone_s, batched_s, is_served_late, keeps_pace
from mesh.policy.plans import Join, Label, Move, Plan, Refuse, Start
from mesh.policy.polyserve import by_tier, label_of, tier
from mesh.policy.polyserve_baselines import Choice, drawn, iteration_s
from mesh.policy.rules.chunked import APART
from mesh.policy.rules.turns import TurnRule
from mesh.policy.views import CellView, InstanceView, RequestView

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
            servers = list(cell.candidates()) if late or self._decodes(request, cell) else []
            prefill = [server for server in servers if server.label == PREFILL]
            prefill.sort(key=lambda server: -_prompt_tokens(server, cell))
            for server in (*prefill, *(server for server in servers if not server.label)):
                if late or is_in_time(request, server, cell):
                    yield Join(request=request, instance=server, label=PREFILL)
        for node in cell.starts():
            yield Start(request=request, node=node)

    def _decodes(self, request: RequestView, cell: CellView) -> bool:
        return next(self._tiers(request, cell), None) is not None

    # §4.2 to §4.5: its own tier, then tighter ones, a server that pends, one of the pool.

    def _tiers(self, request: RequestView, cell: CellView) -> Iterator[tuple[InstanceView, float]]:
        others = [of for of in _open(request, cell) if of.label != PREFILL]
        others.sort(key=lambda server: (-server.batch, server.instance_id))
        for server, tier_s in by_tier(request.slo.tpot_s, others, promotes=True):
            if keeps_pace(request, server, cell, tier_s * self.pace_share):
                yield server, tier_s

    def first_token(self, request: RequestView, cell: CellView) -> Iterator[Plan]:
        for server, tier_s in self._tiers(request, cell):
            yield Move(requests=(request,), to=server, at_once=True)
            if request.moves_now:
                yield Label(instance=server, label=tier(tier_s))
                return

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


def is_in_time(request: RequestView, server: InstanceView, cell: CellView) -> bool:
    """Whether nobody's first token is late on a server for prompts with the request among them:
    behind those of the iteration in flight, in the order of deadlines.
    """
    times, began_s, at_s = cell.times(server), server.node.iteration_started_s, cell.now_s
    waiting = sorted(
        [(of.due_s, of.prefill_left) for of in cell.requests(server) if of.prefill_left]
    )
    flying = 0
    if began_s is not None and waiting:
        at_s = max(began_s, at_s - times.prefill_s(APART.alone_tokens, 0))
        before = [0, *accumulate(left for _, left in waiting)]
        flying = sum(tokens < APART.alone_tokens for tokens in before[:-1])
    tokens, mine = 0, (request.due_s, request.tokens)
    for due_s, left in (*waiting[:flying], *sorted([*waiting[flying:], mine])):
        tokens += left
        at_s += _attention_s(left, times)
        if due_s > cell.now_s and at_s + batched_s(tokens, times) > due_s:
            return False
    return True


def _attention_s(tokens: int, times: Times) -> float:
    """Seconds that a long prompt takes more."""
    return max(alone_s(tokens, times) - batched_s(tokens, times), 0.0)


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
