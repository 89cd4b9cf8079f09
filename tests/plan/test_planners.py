"""The planners beside each other, beside trying all plans, and where there is none."""

from contextlib import suppress
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mesh.domain.errors import InvalidInput
from mesh.plan.planners import plan_brute, plan_greedy, plan_model, plan_operators
from mesh.plan.problem import Plan, Problem, Staffed, Station, sum_r
from tests.plan.problems import known, made_up

SECONDS = st.lists(st.floats(0.01, 0.4), min_size=2, max_size=4)


def kept(problem: Problem, plan: Plan) -> bool:
    """Each station has the replicas that its load takes, and the iteration keeps the SLO."""
    assert all(each.replicas > problem.load(each.choice) for each in plan)
    return problem.expected_s(plan) <= problem.slo_s + 1e-9


@settings(deadline=None, max_examples=20)
@given(SECONDS, st.floats(1, 12), st.floats(1.15, 4))
def test_the_exact_plan_is_that_of_trying_all(
    seconds: list[float], rate: float, times: float
) -> None:
    problem = made_up(seconds, rate, sum(seconds) * times + 0.01)
    assume(problem.unloaded_s(problem.stations) < problem.slo_s)
    exact = plan_operators(problem)
    assert kept(problem, exact)
    with suppress(InvalidInput):  # There are too many plans to try.
        assert sum_r(exact) == sum_r(plan_brute(problem))
    with suppress(InvalidInput):  # Algorithm 1 gives up.
        greedy = plan_greedy(problem)
        assert kept(problem, greedy)
        assert sum_r(greedy) >= sum_r(exact)


def test_algorithm_1_gives_up_where_its_bottleneck_is_served_at_once() -> None:
    """The longest operator waits for nothing; a replica of the other would keep the SLO."""
    problem = made_up([0.375, 0.140625], 10.0, 0.515625 * 1.25 + 0.01)
    with pytest.raises(InvalidInput, match="algorithm 1 gives up"):
        plan_greedy(problem)
    assert kept(problem, plan_operators(problem))
    assert sum_r(plan_brute(problem)) == sum_r(plan_operators(problem))


def test_trying_all_tries_batches_and_replicas_one_by_one() -> None:
    """The check of the check: a plain product over replicas and batches of three operators."""
    problem = made_up([0.2, 0.31, 0.12], 7.0, 1.1)
    heavy, rest = problem.stations[:3], problem.stations[3:]

    def options(station: Station, most: int) -> list[tuple[int, float]]:
        every = product(range(1, most + 1), station)
        some = [Staffed(replicas=n, choice=each) for n, each in every if n > problem.load(each)]
        return [(each.replicas, problem.sojourn_s(each)) for each in some]

    other_s = sum(min(seconds for _, seconds in options(one, 1)) for one in rest)
    best = min(
        sum(replicas for replicas, _ in taken)
        for taken in product(*(options(one, 11) for one in heavy))
        if sum(seconds for _, seconds in taken) + other_s <= problem.slo_s
    )
    assert sum_r(plan_brute(problem)) == sum_r(plan_operators(problem)) == best + len(rest)


@pytest.mark.parametrize(("tokens", "rate", "models"), [(1024, 40, 4), (2048, 40, 7)])
def test_the_papers_baseline_and_its_operators(tokens: int, rate: float, models: int) -> None:
    problem = known(rate, tokens)
    whole, operators = plan_model(problem), plan_operators(problem)
    assert whole[0].replicas == models
    assert kept(problem, whole)
    assert kept(problem, operators)
    assert sum_r(operators) < sum_r(whole) / 3
    assert problem.energy_j(operators) < problem.energy_j(whole)


def test_a_plan_for_an_slo_that_is_barely_feasible_is_found_by_few_tries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = known(1000)
    barely = replace(problem, slo_s=problem.unloaded_s((problem.whole,)) + 1e-9)
    tried: list[int] = []
    sojourn_s = Problem.sojourn_s

    def counted_s(asked: Problem, at: Staffed) -> float:
        tried.append(at.replicas)
        return sojourn_s(asked, at)

    monkeypatch.setattr(Problem, "sojourn_s", counted_s)
    (staffed,) = plan_model(barely)
    assert staffed.replicas > 1.3 * barely.load(staffed.choice)
    assert len({*tried}) <= 12
    assert staffed.replicas - 1 in tried
    tried.clear()
    barely = replace(problem, slo_s=problem.unloaded_s(problem.stations) * (1 + 1e-6))
    plan = plan_operators(barely)
    assert len(tried) < 8 * sum_r(plan)


def test_what_cannot_be_planned_is_said_with_the_least_that_can() -> None:
    problem = known(40, 2048, times=3)
    for planner in (plan_model, plan_operators, plan_greedy, plan_brute):
        with pytest.raises(InvalidInput, match="ms are feasible") as said:
            planner(replace(problem, slo_s=0.1))
        least_s = float(str(said.value).split("; ")[1].split()[0]) / 1e3
        exact = plan_model if planner is plan_model else plan_operators
        least = replace(problem, slo_s=least_s)
        assert kept(least, exact(least))
    for planner in (plan_model, plan_operators, plan_greedy, plan_brute):
        with pytest.raises(InvalidInput, match="at most 1024 are planned"):
            planner(replace(problem, rate_per_s=1e5))
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidInput, match="above 0"):
            replace(problem, slo_s=wrong)
