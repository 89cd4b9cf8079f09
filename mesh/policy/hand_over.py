"""Where a request goes with its first token: a server of its tier, with its KV blocks.

A prompt is taken only where its decodes will have a place: `has_place` counts those who wait for
theirs before a newcomer. Once it is computed, `handed_over` moves it, and §4.6 of PolyServe wants
the second token in time. Before: the tiers of servers (`polyserve`). After: `polyserve_apart`,
`mesh_slo`.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import ceil

from mesh.policy.colocated import Seats, keeps_pace
from mesh.policy.plans import Carry, Label, Move, Plan
from mesh.policy.polyserve import by_tier, tier
from mesh.policy.views import CellView, InstanceView, RequestView

TOLD_S = 0.002
"""Until a server has been told of what another one has done."""
HAND_OVER_PACES = 2.5
"""From one server to another: the rest of the iteration in flight, half of one in the mean; the one
that begins before the server is told that its KV blocks are there; and its own.
"""


def has_place(
    request: RequestView,
    coming: Iterable[RequestView],
    servers: Iterable[InstanceView],
    cell: CellView,
    pace_share: float,
) -> bool:
    """Whether a server has room for its decodes: its own tier, then tighter ones, a server that
    pends, one of the pool (§4.2 to §4.5). Those who are `coming` have their places before it.
    """
    seats = [Seats.of(server, cell) for server in servers]
    ordered = sorted(coming, key=lambda of: (of.slo.tpot_s, of.due_s, of.request_id))
    for of in ordered:
        _seated(of, seats, cell, pace_share)
    return _seated(request, seats, cell, pace_share)


def _seated(
    request: RequestView, seats: Sequence[Seats], cell: CellView, pace_share: float
) -> bool:
    """Give it a place in the forecast, if there is any."""
    for seat, tier_s in by_tier(request.slo.tpot_s, seats, promotes=True):
        if seat.take(request, cell, tier_s * pace_share):
            seat.label = tier(tier_s)
            return True
    return False


def handed_over(
    request: RequestView, servers: Iterable[InstanceView], cell: CellView, pace_share: float
) -> Iterator[Plan]:
    """Its move to the first server that can begin it, which is of the tier then."""
    for server, tier_s in _by_second_token(request, servers, cell, pace_share):
        carry = Carry.KV if server.node.moves_kv else None
        yield Move(requests=(request,), to=server, at_once=True, carry=carry)
        if request.moves_now:
            yield Label(instance=server, label=tier(tier_s))
            return


def _by_second_token(
    request: RequestView, servers: Iterable[InstanceView], cell: CellView, pace_share: float
) -> Iterator[tuple[InstanceView, float]]:
    """Those that keep the pace, with their tiers; first who has its second token in time (§4.6)."""
    late = list[tuple[InstanceView, float]]()
    for server, tier_s in by_tier(request.slo.tpot_s, servers, promotes=True):
        if keeps_pace(request, server, cell, tier_s * pace_share):
            if second_token_s(request, server, cell) <= request.due_s:
                yield server, tier_s
            else:
                late.append((server, tier_s))
    yield from late


def hand_over_s(
    request: RequestView, server: InstanceView, cell: CellView, pace_share: float
) -> float:
    """By how much its first token has to be early for its second one to be in time."""
    late_s = request.slo.tpot_s * (HAND_OVER_PACES * pace_share - 1.0)
    return late_s + cell.carry_s(server, request.tokens) + TOLD_S


def second_token_s(request: RequestView, server: InstanceView, cell: CellView) -> float:
    """When its second token would come from a server: after its KV blocks, the iteration that runs
    then, the one that begins before the server is told of them, and its own (§4.6).
    """
    ready_s = cell.now_s + cell.carry_s(server, request.tokens) + TOLD_S
    began_s, one_s = server.node.iteration_started_s, cell.decode_s(server)
    if began_s is None or not one_s:
        return ready_s + cell.times(server).decode_s(1, request.tokens)
    return began_s + (ceil(max(ready_s - began_s, 0.0) / one_s) + 2) * one_s


def with_first_token(server: InstanceView, cell: CellView) -> list[RequestView]:
    """Those past their prompts on a server that are on their way to no other."""
    there = [of for of in cell.requests(server) if of.output_tokens and not of.prefill_left]
    return [of for of in there if not of.moves_now]


def open_servers(request: RequestView, cell: CellView) -> list[InstanceView]:
    """The loaded instances of its model with a place, the fullest first."""
    of = cell.deployment(request.deployment)
    every = [] if of is None else of.instances.values()
    found = [server for server in every if server.takes_now and server.batch < server.batch_max]
    return sorted(found, key=lambda server: (-server.batch, server.instance_id))
