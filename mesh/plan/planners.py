"""Planners: how many replicas each station has, and how large its batches are.

`plan_model` scales whole models and `plan_operators` operators, both exactly, `plan_greedy`
operators as the paper's algorithm 1 does, and `plan_brute` by trying all, as a check of both. All
are pure, take a `Problem` and raise InvalidInput where no plan keeps the SLO, with the least that
is feasible.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations_with_replacement
from operator import add, sub

from mesh.domain.errors import InvalidInput
from mesh.domain.values import replace
from mesh.plan.problem import REPLICAS_MAX, Plan, Problem, Staffed, Station

STEPS_MAX = 10_000
"""The moves after which algorithm 1 ends."""
COMBINATIONS_MAX = 200_000
"""The plans that `plan_brute` may try."""
ROUNDING_S = 1e-12


Options = Callable[[int], tuple[float, Staffed]]
"""The least mean seconds at a station, and how, by its replicas beyond the fewest."""


def _options_of(problem: Problem, station: Station) -> Options:
    least = problem.least_of(station)

    @cache
    def at(more: int) -> tuple[float, Staffed]:
        every = [Staffed(replicas=least + more, choice=each) for each in station]
        taken = [(problem.sojourn_s(each), each) for each in every]
        return min(taken, key=lambda one: (one[0], one[1].batch))

    return at


def _options(problem: Problem, stations: Sequence[Station]) -> list[Options]:
    """The options of each station. Raises InvalidInput where no number of replicas is enough."""
    options = [_options_of(problem, station) for station in stations]
    if problem.unloaded_s(stations) >= problem.slo_s:
        raise _infeasible(problem, options)
    return options


def _infeasible(problem: Problem, options: Sequence[Options]) -> InvalidInput:
    """An error that names an SLO which a plan keeps that has as many replicas as it may have."""
    least_s = sum(each(REPLICAS_MAX // len(options))[0] for each in options)
    return InvalidInput(
        f"no plan keeps {problem.slo_s * 1e3:.4g} ms at {problem.rate_per_s:g} a second; "
        f"{math.ceil(least_s * 1e5) / 1e2:.2f} ms are feasible",
        hint="raise the SLO, or divide the model over more devices",
    )


def _plan_of(options: Sequence[Options], mores: Sequence[int]) -> Plan:
    """The plan with so many replicas of each station beyond the least."""
    return tuple(of(more)[1] for of, more in zip(options, mores, strict=True))


def plan_model(problem: Problem) -> Plan:
    """The fewest whole models that keep the SLO, with one size of batch."""
    options = _options(problem, (problem.whole,))
    numbers = range(REPLICAS_MAX + 1)
    more = bisect_left(numbers, -problem.slo_s, key=lambda more: -options[0](more)[0])
    if more > REPLICAS_MAX:
        raise _infeasible(problem, options)
    return _plan_of(options, (more,))


def plan_operators(problem: Problem) -> Plan:
    """The fewest replicas over all operators (eq. 8) whose iteration keeps the SLO: exact.

    The latency is a sum over stations and the cost an integer, so that the least latency for each
    cost follows station by station. A bound comes from adding the replica that helps most until the
    SLO is kept, and each station has at least what it needs where the others wait for nothing.
    """
    slo_s, options = problem.slo_s, _options(problem, problem.stations)
    most = _bound(problem, options)
    alone_s = [problem.unloaded_s((station,)) for station in problem.stations]
    waits_s = slo_s - sum(alone_s) + ROUNDING_S
    fewest = [
        bisect_left(range(most), -waits_s - own_s, key=lambda more: -option(more)[0])
        for option, own_s in zip(options, alone_s, strict=True)
    ]
    most -= sum(fewest)
    least_s = [0.0] + [math.inf] * most
    taken: list[list[int]] = []
    for option, few in zip(options, fewest, strict=True):
        seconds = [option(few + more)[0] for more in range(most + 1)]
        sums = [[*map(add, least_s[cost::-1], seconds)] for cost in range(most + 1)]
        least_s = [*map(min, sums)]
        taken.append([of.index(least) for of, least in zip(sums, least_s, strict=True)])
    cost = next((cost for cost in range(most + 1) if least_s[cost] <= slo_s), most)
    mores: list[int] = []
    for row in reversed(taken):
        mores.append(row[cost])
        cost -= mores[-1]
    return _plan_of(options, [*map(add, fewest, mores[::-1])])


def _bound(problem: Problem, options: Sequence[Options]) -> int:
    """A number of replicas beyond the least with which some plan keeps the SLO."""
    mores, slo_s = [0] * len(options), problem.slo_s - ROUNDING_S
    while sum(took_s := [of(n)[0] for of, n in zip(options, mores, strict=True)]) > slo_s:
        then_s = [of(n + 1)[0] for of, n in zip(options, mores, strict=True)]
        gains = [*map(sub, took_s, then_s)]
        mores[gains.index(max(gains))] += 1
        if sum(mores) > REPLICAS_MAX:
            raise _infeasible(problem, options)
    return sum(mores)


def plan_greedy(problem: Problem) -> Plan:
    """Algorithm 1 as printed: begin with the (b, ⌈λ/µ⌉) of the least sojourn of each operator; then
    give the one with the longest sojourn a replica while the SLO is missed, or take one from it
    while that is kept, until neither helps.

    Parallelism stays as it is: all operators of a plan have the group of their table. As printed it
    gives up where replicas no longer help the operator with the longest sojourn, though others
    wait: then it raises InvalidInput for an SLO that `plan_operators` keeps.
    """
    slo_s, sojourn_s, least = problem.slo_s, cache(problem.sojourn_s), problem.least_replicas
    _options(problem, problem.stations)
    state = [
        min((Staffed(replicas=least(each), choice=each) for each in station), key=sojourn_s)
        for station in problem.stations
    ]
    for _ in range(STEPS_MAX):
        took_s = sum(map(sojourn_s, state))
        down = took_s <= slo_s
        number = max(range(len(state)), key=lambda n: (sojourn_s(state[n]), -n))
        now = state[number]
        replicas = now.replicas + (-1 if down else 1)
        moves = [
            replace(now, replicas=replicas, choice=choice)
            for choice in problem.stations[number]
            if REPLICAS_MAX >= replicas >= least(choice) and (not down or choice.batch >= now.batch)
        ]
        rest_s = took_s - sojourn_s(now)
        kept = [at for at in moves if not down or rest_s + sojourn_s(at) <= slo_s]
        best = min(kept, key=lambda at: (sojourn_s(at), at.batch), default=now)
        if best is now or (not down and sojourn_s(best) >= sojourn_s(now)):
            break
        state[number] = best
    took_s = sum(map(sojourn_s, state))
    if took_s > slo_s:
        raise InvalidInput(
            f"algorithm 1 gives up at {took_s * 1e3:.4g} ms, above the SLO of {slo_s * 1e3:.4g} ms",
            hint="another planner may keep it",
        )
    return tuple(state)


def plan_brute(problem: Problem) -> Plan:
    """The plan with the fewest replicas, found by trying all plans with none beyond the least, then
    all with one, and so on. Raises InvalidInput where those are more than COMBINATIONS_MAX.
    """
    options = _options(problem, problem.stations)
    numbers = range(len(options))
    tried = 0
    for more in range(REPLICAS_MAX):
        tried += math.comb(more + len(options) - 1, more)
        if tried > COMBINATIONS_MAX:
            raise InvalidInput(
                f"there are more than {COMBINATIONS_MAX} plans to try", hint="try a lower rate"
            )
        best = min(
            (sum(of(each)[0] for of, each in zip(options, mores, strict=True)), mores)
            for taken in combinations_with_replacement(numbers, more)
            for mores in ([*map(taken.count, numbers)],)
        )
        if best[0] <= problem.slo_s:
            break
    return _plan_of(options, best[1])
