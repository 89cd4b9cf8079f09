"""Executed plans: time is conserved, known queues come out, and plans change while requests run."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.domain.errors import InvalidInput
from mesh.domain.operators import Phase
from mesh.plan.conserving import models, operators
from mesh.plan.placement import pieces_of, place_conserving, place_whole
from mesh.plan.planners import plan_operators, whole_plan
from mesh.plan.problem import Demand, Plan, Problem, Staffed, batches_of, slo_of
from mesh.sim.operators.execution import Execution, Request, poisson
from mesh.sim.operators.tables import operator_table
from tests.plan.problems import known


def split(problem: Problem, replicas: int, batch: int = 1) -> Plan:
    """Each operator with so many replicas."""
    staffed = tuple(
        Staffed(roles=of.roles, replicas=replicas, batch=batch) for of in problem.stations
    )
    return Plan(stations=staffed, expected_s=0.0)


def everywhere(plan: Plan) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(each.replicas)) for each in plan.stations)


def test_one_request_takes_what_its_operators_take() -> None:
    problem = known(1)
    for plan in (whole_plan(problem, 1, 1), split(problem, 1)):
        for visits in (1, 4, 28):
            execution = Execution(problem.table, plan, everywhere(plan), slo_s=1.0, visits=visits)
            done = execution.run([Request(at_s=5.0, tokens=2048)])
            assert done.mean_s == pytest.approx(problem.table.seconds((2048,)), rel=1e-9)
            assert (done.met, done.moved_bytes) == (1.0, 0)
            assert done.device_s == pytest.approx(done.mean_s, rel=1e-9)


def test_two_at_once_on_one_device_take_what_sharing_was_measured_to_take() -> None:
    problem = known(1)
    plan = whole_plan(problem, 2, 1)
    at_once = [Request(at_s=0.0, tokens=2048)] * 2
    shared = Execution(problem.table, plan, place_whole(plan, 2), slo_s=1.0).run(at_once)
    alone_s = problem.table.seconds((2048,))
    assert shared.mean_s == pytest.approx(1.644 * alone_s, rel=1e-6)
    assert shared.busy_s == pytest.approx(1.644 * alone_s, rel=1e-6)
    apart = Execution(problem.table, plan, place_whole(plan), slo_s=1.0).run(at_once)
    assert apart.mean_s == pytest.approx(alone_s)
    assert apart.energy_j < 2 * shared.energy_j


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([1, 4]),
    st.integers(0, 10**6),
)
def test_device_time_is_conserved_and_every_request_ends(
    replicas: int, devices: int, lanes: int | None, batch: int, seed: int
) -> None:
    """The device checks it after every event; here the total is that of the requests' work."""
    problem = known(6)
    plan = split(problem, replicas, batch)
    placement = tuple(
        tuple((number + one) % devices for one in range(replicas))
        for number in range(len(plan.stations))
    )
    requests = poisson(6.0, (512, 2048), 40, seed)
    execution = Execution(problem.table, plan, placement, slo_s=1.0, lanes=lanes, visits=2)
    done = execution.run(requests)
    assert done.requests == 40
    alone_s = sum(problem.table.seconds((of.tokens,)) for of in requests)
    if batch == 1:
        assert done.device_s == pytest.approx(alone_s, abs=1e-6)
    else:
        assert done.device_s == pytest.approx(alone_s, rel=0.02), "batches of prompts gain little"
    assert done.busy_s <= done.device_s + 1e-9


def test_the_same_seed_gives_the_same_execution() -> None:
    problem = known(10)
    plan = split(problem, 2)

    def once(seed: int) -> object:
        execution = Execution(problem.table, plan, everywhere(plan), slo_s=1.0, visits=2)
        return execution.run(poisson(10.0, (1024,), 60, seed))

    assert once(3) == once(3)
    assert once(3) != once(4)


def test_waits_are_those_of_the_formulas() -> None:
    """M/D/4 at 70 %."""
    problem = known(1)
    service_s = problem.table.seconds((2048,))
    rate = 0.7 * 4 / service_s
    found = next(of for of in models(known(rate), 1) if of.devices == 4)
    execution = Execution(problem.table, found.plan, found.placement, slo_s=1.0)
    done = execution.run(poisson(rate, (2048,), 8_000, 1), warm=500)
    assert done.mean_s == pytest.approx(found.expected_s, rel=0.04)


def test_the_number_of_turns_hardly_matters() -> None:
    problem = known(20)
    whole = next(of for of in models(problem, 1) if of.devices == 7)
    found = list(operators(problem, plan_operators, whole))[-2]

    def mean_s(visits: int) -> float:
        execution = Execution(
            *(problem.table, found.plan, found.placement),
            slo_s=problem.demand.slo_s,
            lanes=found.lanes,
            visits=visits,
        )
        return execution.run(poisson(20.0, (2048,), 150, 1)).mean_s

    assert mean_s(2) == pytest.approx(mean_s(28), rel=0.1)


def test_sequences_decode_where_their_kv_cache_is() -> None:
    """Eight at once, in one batch: each pass takes a decode of eight, 32 times."""
    table = operator_table("qwen2-7b", Phase.DECODE, 16)
    demand = Demand(
        rate_per_s=1000,
        lengths=(1024,),
        slo_s=slo_of(table, (1024,), 2.0),
        batches=batches_of(Phase.DECODE),
    )
    problem = Problem(table=table, demand=demand)
    plan = whole_plan(problem, 1, 8)
    requests = [Request(at_s=0.0, tokens=1024, passes=32)] * 9
    done = Execution(table, plan, place_whole(plan), slo_s=1.0).run(requests[:8])
    pass_s = table.seconds((1024,) * 8)
    # The first begins alone; the other seven wait for its pass, and all go on together.
    assert done.device_s == pytest.approx(33 * pass_s, rel=0.05)
    two = whole_plan(problem, 2, 8)
    apart = Execution(table, two, place_whole(two), slo_s=1.0).run(requests)
    assert apart.moved_bytes == 0
    assert apart.mean_s < done.mean_s


def test_a_plan_changes_while_requests_run() -> None:
    """Two devices become four, then one: nobody is lost; new replicas wait for their weights."""
    problem = known(12)
    few, many, one = split(problem, 2), split(problem, 4), split(problem, 1)

    def run(changes: list[tuple[float, Plan]]) -> float:
        execution = Execution(problem.table, few, everywhere(few), slo_s=0.4, visits=1)
        for at_s, plan in changes:
            execution.change(at_s, plan, everywhere(plan))
        done = execution.run(poisson(12.0, (2048,), 150, 1))
        assert done.requests == 150
        return done.mean_s

    stays = run([])
    assert run([(1.0, many)]) < stays < run([(1.0, many), (4.0, one)])
    wrong = Execution(problem.table, few, everywhere(few), slo_s=0.4)
    with pytest.raises(InvalidInput, match="must have its stations"):
        wrong.change(1.0, whole_plan(problem, 1, 1), ((0,),))


def test_what_cannot_be_executed_is_said() -> None:
    problem = known(1)
    plan = split(problem, 1)
    with pytest.raises(InvalidInput, match="its stations differ"):
        Execution(problem.table, plan, ((0,),), slo_s=1.0)
    with pytest.raises(InvalidInput, match="nothing to execute"):
        Execution(problem.table, plan, everywhere(plan), slo_s=1.0).run([])


def test_a_paper_plan_that_has_too_little_device_time_misses() -> None:
    """Qwen2-7B, 2,048 tokens at 40 a second: 6.2 seconds of work a second on 4 devices."""
    problem = known(40)
    plan = plan_operators(problem)
    placement = place_conserving(pieces_of(problem, plan), 2.0, 72 * 10**9, devices=4)
    assert placement is not None
    execution = Execution(
        problem.table, plan, placement, slo_s=problem.demand.slo_s, visits=1, misses_max=100
    )
    assert execution.run(poisson(40.0, (2048,), 200, 1)).met < 0.5
