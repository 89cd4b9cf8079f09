"""Executed plans: time and memory are conserved, and known queues come out."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.domain.errors import InvalidInput
from mesh.domain.operators import Phase
from mesh.plan.conserving import Placed, models, operators
from mesh.plan.placement import Placement, pieces_of, place_conserving, place_whole
from mesh.plan.planners import plan_operators
from mesh.plan.problem import Plan, Problem, held_bytes
from mesh.sim.operators.execution import Executed, Execution, Request, poisson
from tests.plan.problems import known, staffed


def everywhere(plan: Plan) -> Placement:
    return tuple(tuple(range(each.replicas)) for each in plan)


def ran(
    problem: Problem,
    plan: Plan | Placed,
    requests: Sequence[Request],
    at: Placement | None = None,
    warm: int = 0,
    **options: int | None,
) -> Executed:
    """Executes the plan for these requests. Without a placement, the first replica of each operator
    is on the first device, and so on.
    """
    if isinstance(plan, Placed):
        at, options["lanes"], plan = plan.placement, plan.lanes, plan.plan
    at = everywhere(plan) if at is None else at
    return Execution(problem.table, plan, at, slo_s=1.0, **options).run(requests, warm)


def test_one_request_takes_what_its_operators_take() -> None:
    problem = known(1)
    for stations, visits in product(((problem.whole,), problem.stations), (1, 4, 28)):
        plan = staffed(*stations, replicas=1)
        done = ran(problem, plan, [Request(at_s=5.0, tokens=2048)], visits=visits)
        assert done.mean_s == pytest.approx(problem.table.seconds((2048,)), rel=1e-9)
        assert (done.met, done.moved_bytes) == (1.0, 0)
        assert done.device_s == pytest.approx(done.mean_s, rel=1e-9)


def test_two_at_once_on_one_device_take_what_sharing_was_measured_to_take() -> None:
    problem = known(1)
    plan = staffed(problem.whole, replicas=2)
    at_once = [Request(at_s=0.0, tokens=2048)] * 2
    shared = ran(problem, plan, at_once, place_whole(plan, 2))
    alone_s = problem.table.seconds((2048,))
    assert shared.mean_s == pytest.approx(1.644 * alone_s, rel=1e-6)
    assert shared.busy_s == pytest.approx(1.644 * alone_s, rel=1e-6)
    apart = ran(problem, plan, at_once)
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
    plan = staffed(*problem.stations, replicas=replicas, batch=batch)
    placement = tuple(
        tuple((number + one) % devices for one in range(replicas)) for number in range(len(plan))
    )
    requests = poisson(6.0, (512, 2048), 40, seed)
    done = ran(problem, plan, requests, placement, lanes=lanes, visits=2)
    assert done.requests == 40
    alone_s = sum(problem.table.seconds((of.tokens,)) for of in requests)
    off = 1e-6 if batch == 1 else 0.02  # batches of prompts gain little
    assert done.device_s == pytest.approx(alone_s, rel=off)
    assert done.busy_s <= done.device_s + 1e-9


def test_the_same_seed_gives_the_same_execution() -> None:
    problem = known(10)
    plan = staffed(*problem.stations, replicas=2)

    def once(seed: int) -> object:
        return ran(problem, plan, poisson(10.0, (1024,), 60, seed), visits=2)

    assert once(3) == once(3)
    assert once(3) != once(4)


def test_waits_are_those_of_the_formulas() -> None:
    """M/D/4 at 70 %."""
    problem = known(1)
    service_s = problem.table.seconds((2048,))
    rate = 0.7 * 4 / service_s
    found = next(of for of in models(known(rate), 1) if of.devices == 4)
    requests = poisson(rate, (2048,), 8_000, 1)
    done = ran(problem, found, requests, warm=500)
    assert done.mean_s == pytest.approx(found.expected_s, rel=0.04)


def test_the_number_of_turns_hardly_matters() -> None:
    problem = known(20)
    whole = next(of for of in models(problem, 1) if of.devices == 7)
    found = list(operators(problem, plan_operators, whole))[-2]

    def mean_s(visits: int) -> float:
        return ran(problem, found, poisson(20.0, (2048,), 60, 1), visits=visits).mean_s

    assert mean_s(2) == pytest.approx(mean_s(28), rel=0.1)


def test_sequences_decode_where_their_kv_cache_is() -> None:
    """Eight at once, in one batch: each pass takes a decode of eight, 32 times."""
    problem = known(1000, 1024, phase=Phase.DECODE)
    requests = [Request(at_s=0.0, tokens=1024, passes=32)] * 9
    done = ran(problem, staffed(problem.whole, replicas=1, batch=8), requests[:8])
    pass_s = problem.table.seconds((1024,) * 8)
    # The first begins alone; the other seven wait for its pass, and all go on together.
    assert done.device_s == pytest.approx(33 * pass_s, rel=0.05)
    apart = ran(problem, staffed(problem.whole, replicas=2, batch=8), requests)
    assert apart.moved_bytes == 0
    assert apart.mean_s < done.mean_s


def test_what_cannot_be_executed_is_said() -> None:
    problem = known(1)
    plan, twice = (staffed(*problem.stations, replicas=n) for n in (1, 2))
    for wrong in (((0,),), tuple(() for _ in plan), everywhere(twice)):
        with pytest.raises(InvalidInput, match="stations or replicas differ"):
            ran(problem, plan, [], wrong)
    with pytest.raises(InvalidInput, match="nothing to execute"):
        ran(problem, plan, [])
    with pytest.raises(InvalidInput, match="one request of qwen2-7b takes"):
        ran(problem, plan, [Request(at_s=0.0, tokens=2_000_000)])


def test_a_server_that_ends_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check fails where time is not conserved: here servers end at half their time."""
    problem = known(1)
    plan = staffed(problem.whole, replicas=1)
    execution = Execution(problem.table, plan, place_whole(plan), slo_s=1.0)
    call_at = execution._clock.call_at
    monkeypatch.setattr(
        execution._clock, "call_at", lambda at_s, then: call_at((at_s + 1.0) / 2, then)
    )
    with pytest.raises(AssertionError, match="a server is due"):
        execution.run([Request(at_s=1.0, tokens=2048)])


def test_data_that_stays_on_its_device_takes_no_link() -> None:
    """All operators on one device, several prompts at once: nothing moves. On two devices, each
    with a part of them, each of the 28 layers pays the link's latency, in however many turns.
    """
    problem = known(1)
    plan = staffed(*problem.stations, replicas=1)
    at_once = [Request(at_s=0.0, tokens=512)] * 4
    for lanes in (None, 1, 2):
        assert ran(problem, plan, at_once, lanes=lanes).moved_bytes == 0
    apart = tuple((number % 2,) for number in range(len(plan)))
    few, many = (ran(problem, plan, at_once[:1], apart, visits=visits) for visits in (3, 28))
    assert few.mean_s == pytest.approx(many.mean_s, rel=1e-6)
    assert few.moved_bytes == pytest.approx(many.moved_bytes, rel=1e-3)
    assert many.mean_s - problem.table.seconds((512,)) > 28 * 10 * 10e-6


def test_no_device_holds_more_than_its_memory() -> None:
    """KV cache of 60 sequences of 16,384 tokens takes 56 GB beside 15 GB of weights: who comes to
    more of them waits. Prompts at work hold their activations, too.
    """
    problem = known(100, 16384, phase=Phase.DECODE)
    plan = staffed(problem.whole, replicas=1, batch=32)
    memory_bytes = problem.table.device.memory_bytes
    requests = [Request(at_s=0.0, tokens=16384, passes=4)] * 150
    done = ran(problem, plan, requests)
    assert done.requests == 150
    assert 0.95 * memory_bytes < done.memory_bytes <= memory_bytes
    few = ran(problem, plan, requests[:2])
    kv = plan[0].choice.kv_bytes / 32
    assert few.memory_bytes == pytest.approx(problem.table.weights_bytes + 2 * kv, rel=0.01)
    prompts = known(1, 32768)
    two = staffed(prompts.whole, replicas=2)
    held = held_bytes((two[0].choice,), {0: 2}, 2)
    assert held < memory_bytes
    both = ran(prompts, two, [Request(at_s=0.0, tokens=32768)] * 2, place_whole(two, 2))
    assert both.memory_bytes >= 0.9 * held


def test_tokens_take_as_long_as_expected() -> None:
    """Whole models, and operators one at a time on a device: an iteration is that of the batch that
    forms. In more turns it takes as long.
    """
    rate = 2_000.0
    problem = replace(known(rate, 1024, phase=Phase.DECODE), slo_s=0.03)
    whole = next(models(problem, 1))
    more = next(placed for placed in models(problem, 1) if placed.devices > whole.devices)
    single = next(operators(problem, plan_operators, more))
    every = [whole, more, single]
    assert len(single.plan) > 1
    assert (single.lanes, single.devices) == (1, 1)
    for placed in every:
        assert placed.expected_s >= problem.table.seconds((1024,)), "no less than unloaded"
        done = ran(problem, placed, poisson(rate / 32, (1024,), 200, 1, 32), visits=2, warm=100)
        assert done.mean_s == pytest.approx(placed.expected_s, rel=0.08)


def test_prompts_take_as_long_as_expected_where_operators_are_on_some_devices() -> None:
    problem = known(20)
    whole = next(placed for placed in models(problem, 1) if placed.devices == 5)
    some = next(
        placed
        for placed in operators(problem, plan_operators, whole)
        if placed.lanes == 2 and placed.used(problem) < 0.7
    )
    assert min(each.replicas for each in some.plan) < some.devices
    done = ran(problem, some, poisson(20.0, (2048,), 1_000, 1), visits=1, warm=100)
    assert done.mean_s == pytest.approx(some.expected_s, rel=0.15)


def test_a_paper_plan_that_has_too_little_device_time_misses() -> None:
    """Qwen2-7B, 2,048 tokens at 40 a second: 6.2 seconds of work a second on 4 devices."""
    problem = known(40)
    plan = plan_operators(problem)
    placement = place_conserving(pieces_of(problem, plan), 2.0, 72 * 10**9, 4)
    assert placement is not None
    execution = Execution(
        problem.table, plan, placement, slo_s=problem.slo_s, visits=1, misses_max=100
    )
    assert execution.run(poisson(40.0, (2048,), 200, 1)).met < 0.5
