"""Planners: how many replicas each station has, and how large its batches are.

`plan_model` scales whole models, `plan_greedy` operators as the paper's algorithm 1 does,
`plan_operators` exactly, and `plan_brute` by trying all, as a check of both. All are pure, take a
`Problem` and raise InvalidInput where no plan keeps the SLO, with the least that is feasible.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import field
from functools import cache

from mesh.domain.errors import InvalidInput
from mesh.domain.values import dataclass
from mesh.plan.problem import REPLICAS_MAX, Choice, Plan, Problem, Staffed, Station

STEPS_MAX = 10_000
"""Moves of algorithm 1."""
COMBINATIONS_MAX = 200_000
"""Those that `plan_brute` is allowed to try."""
ROUNDING_S = 1e-12


def plan_model(problem: Problem) -> Plan:
    """The fewest whole models that keep the SLO, with one size of batch."""
    problem.check_rate(problem.whole)
    best: tuple[int, float, int] | None = None
    for choice in problem.whole.choices:
        if choice.service_s * problem.stretched >= problem.demand.slo_s and not problem.divided:
            continue
        replicas = problem.least_replicas(choice)
        while replicas <= REPLICAS_MAX:
            took_s = problem.sojourn_s(choice, replicas)
            if took_s <= problem.demand.slo_s:
                found = (replicas, took_s, choice.batch)
                best = found if best is None else min(best, found)
                break
            replicas += 1
    if best is None:
        raise _infeasible(
            problem, min(problem.sojourn_s(one, REPLICAS_MAX) for one in problem.whole.choices)
        )
    return whole_plan(problem, best[0], best[2])


def whole_plan(problem: Problem, replicas: int, batch: int) -> Plan:
    """So many whole models."""
    staffed = Staffed(roles=problem.whole.roles, replicas=replicas, batch=batch)
    return Plan(stations=(staffed,), expected_s=problem.expected_s((staffed,)))


@dataclass(slots=True)
class _Options:
    """The best sojourn of a station for each number of replicas."""

    problem: Problem
    station: Station
    least: int = 0
    known: dict[int, tuple[float, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.problem.check_rate(self.station)
        self.least = min(self.problem.least_replicas(each) for each in self.station.choices)

    def at(self, more: int) -> tuple[float, int]:
        """Seconds and batch, with so many replicas beyond the least."""
        if more not in self.known:
            replicas = self.least + more
            self.known[more] = min(
                (self.problem.sojourn_s(choice, replicas), choice.batch)
                for choice in self.station.choices
            )
        return self.known[more]


def plan_operators(problem: Problem) -> Plan:
    """The fewest replicas over all operators (eq. 8) whose iteration keeps the SLO: exact.

    The latency is a sum over operators and the cost an integer, so that the least latency for each
    cost follows operator by operator. A bound comes from adding the replica that helps most until
    the SLO is kept.
    """
    slo_s = problem.demand.slo_s
    if problem.least_s >= slo_s:
        raise _infeasible(problem, _least_s(problem))
    options = [_Options(problem, station) for station in problem.stations]
    most = _bound(problem, options)
    least_s = [0.0] + [math.inf] * most
    taken: list[list[int]] = []
    for option in options:
        seconds = [option.at(more)[0] for more in range(most + 1)]
        step = [
            min((least_s[cost - more] + seconds[more], more) for more in range(cost + 1))
            for cost in range(most + 1)
        ]
        least_s = [each for each, _ in step]
        taken.append([more for _, more in step])
    cost = next((cost for cost in range(most + 1) if least_s[cost] <= slo_s), most)
    mores: list[int] = []
    for row in reversed(taken):
        mores.append(row[cost])
        cost -= mores[-1]
    return _plan_of(problem, options, mores[::-1])


def _plan_of(problem: Problem, options: Sequence[_Options], mores: Sequence[int]) -> Plan:
    """So many replicas of each station beyond the least."""
    staffed = tuple(
        Staffed(roles=one.station.roles, replicas=one.least + more, batch=one.at(more)[1])
        for one, more in zip(options, mores, strict=True)
    )
    return Plan(stations=staffed, expected_s=problem.expected_s(staffed))


def _bound(problem: Problem, options: Sequence[_Options]) -> int:
    """Replicas beyond the least with which some plan keeps the SLO."""
    mores = [0] * len(options)
    while sum(one.at(more)[0] for one, more in zip(options, mores, strict=True)) > (
        problem.demand.slo_s - ROUNDING_S
    ):
        gains = [
            one.at(more)[0] - one.at(more + 1)[0] for one, more in zip(options, mores, strict=True)
        ]
        mores[gains.index(max(gains))] += 1
        if sum(mores) > REPLICAS_MAX:
            raise _infeasible(problem, _least_s(problem))
    return sum(mores)


@dataclass(frozen=True, slots=True)
class _At:
    """An operator under algorithm 1: r and b."""

    replicas: int
    choice: Choice


def plan_greedy(problem: Problem) -> Plan:
    """Algorithm 1 as printed: begin with the (b, ⌈λ/µ⌉) of the least sojourn of each operator; then
    give the one with the longest sojourn a replica while the SLO is missed, or take one from it
    while that is kept, until neither helps.

    Parallelism stays as it is: all operators of a plan have the group of their table. As printed it
    gives up where replicas no longer help the operator with the longest sojourn, though others
    wait: then it raises InvalidInput for an SLO that `plan_operators` keeps.
    """
    slo_s = problem.demand.slo_s
    if problem.least_s >= slo_s:
        raise _infeasible(problem, _least_s(problem))
    for station in problem.stations:
        problem.check_rate(station)
    batches = [station.choices for station in problem.stations]

    @cache
    def sojourn_s(number: int, at: _At) -> float:
        return problem.sojourn_s(at.choice, at.replicas)

    def first(number: int) -> _At:
        every = [_At(problem.least_replicas(choice), choice) for choice in batches[number]]
        return min(every, key=lambda at: sojourn_s(number, at))

    def total(of: Sequence[_At]) -> float:
        return sum(sojourn_s(number, at) for number, at in enumerate(of))

    state = [first(number) for number in range(len(batches))]
    took_s = total(state)
    for _ in range(STEPS_MAX):
        down = took_s <= slo_s
        number = max(range(len(state)), key=lambda n: (sojourn_s(n, state[n]), -n))
        now = state[number]
        replicas = now.replicas + (-1 if down else 1)
        choices = [each for each in batches[number] if not down or each.batch >= now.choice.batch]
        moves = [
            _At(replicas, choice)
            for choice in choices
            if REPLICAS_MAX >= replicas >= problem.least_replicas(choice)
        ]
        rest_s = took_s - sojourn_s(number, now)
        kept = [at for at in moves if not down or rest_s + sojourn_s(number, at) <= slo_s]
        if not kept:
            break
        best = min(kept, key=lambda at: (sojourn_s(number, at), at.choice.batch))
        if not down and sojourn_s(number, best) >= sojourn_s(number, now):
            break
        state[number] = best
        took_s = total(state)
    if took_s > slo_s:
        raise InvalidInput(
            f"algorithm 1 gives up at {took_s * 1e3:.4g} ms, above the SLO of {slo_s * 1e3:.4g} ms",
            hint="another planner may keep it",
        )
    staffed = tuple(
        Staffed(roles=station.roles, replicas=at.replicas, batch=at.choice.batch)
        for station, at in zip(problem.stations, state, strict=True)
    )
    return Plan(stations=staffed, expected_s=problem.expected_s(staffed))


def plan_brute(problem: Problem) -> Plan:
    """The plan with the fewest replicas, found by trying all plans with none beyond the least, then
    all with one, and so on. Raises InvalidInput where those are more than COMBINATIONS_MAX.
    """
    options = [_Options(problem, station) for station in problem.stations]
    if problem.least_s >= problem.demand.slo_s:
        raise _infeasible(problem, _least_s(problem))
    tried = 0
    for more in range(REPLICAS_MAX):
        tried += math.comb(more + len(options) - 1, more)
        if tried > COMBINATIONS_MAX:
            raise InvalidInput(
                f"there are more than {COMBINATIONS_MAX} plans to try", hint="try a lower rate"
            )
        best = min(
            (sum(one.at(each)[0] for one, each in zip(options, mores, strict=True)), mores)
            for mores in _divided(more, len(options))
        )
        if best[0] <= problem.demand.slo_s:
            break
    return _plan_of(problem, options, best[1])


def _divided(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to divide a number among so many."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in _divided(total - first, parts - 1):
            yield (first, *rest)


def _infeasible(problem: Problem, least_s: float) -> InvalidInput:
    demand, feasible_ms = problem.demand, math.ceil(least_s * 1e5) / 1e2
    return InvalidInput(
        f"no plan keeps {demand.slo_s * 1e3:.4g} ms at {demand.rate_per_s:g} a second; "
        f"{feasible_ms:.2f} ms are feasible",
        hint="raise the SLO, or divide the model over more devices",
    )


def _least_s(problem: Problem) -> float:
    """An SLO that a plan keeps: with as many replicas as a plan of operators may have."""
    options = [_Options(problem, station) for station in problem.stations]
    return sum(each.at(REPLICAS_MAX // len(options))[0] for each in options)
