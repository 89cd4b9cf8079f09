"""Shadow validation of a node amid its work: the iteration in flight, requests that came since it
began, and a load that slows everything down. See `test_shadow` for the numbers.
"""

import pytest

from mesh.domain.reasons import Verdict
from tests.request.schedules import TIMES, Node, a_prompt, instance, times

BESIDE_B = (("a", ()), ("b", (9.0,)), ("c", ()))
"""Three instances, of which the second has a request that can wait."""


def test_the_iteration_in_flight_has_to_end_first() -> None:
    # b's decode of 0.1 s began 0.02 s ago: 0.08 + 0.2 s.
    b = instance("b", 9.0, times=TIMES)
    node = Node(instances=[instance("a", times=TIMES), b], newcomer=a_prompt(200, 0.25), target=0)
    assert node.verdict() is Verdict.PASSES
    node.started_s = -0.02
    assert node.verdict() is Verdict.FIRST_TOKEN_LATE
    node.newcomer.due_s = 0.29
    assert node.verdict() is Verdict.PASSES


def test_one_that_should_have_ended_ends_now() -> None:
    b = instance("b", 9.0, times=TIMES)
    node = Node(instances=[instance("a", times=TIMES), b], newcomer=a_prompt(200, 0.21), target=0)
    node.started_s = -0.5
    assert node.verdict() is Verdict.PASSES


def test_whom_it_makes_late_is_late_anyway() -> None:
    # Of two that began together 0.1 s apart, the second cannot be in time at 0.12.
    a, b = instance("a", 0.05, times=TIMES), instance("b", 0.12, times=TIMES)
    node = Node(instances=[a, b], newcomer=a_prompt(50, 5.0), target=0, started_s=-0.05)
    assert node.verdict() is Verdict.PASSES


def test_it_was_chosen_by_who_was_late_when_it_began() -> None:
    # At -0.15, a could be in time at -0.01 and was first. It has taken too long and ends now; b
    # is next, until 0.2, then the newcomer, until 0.3. As late as a is now, b would have been
    # first, until 0.05, then a, until 0.17, then the newcomer, until 0.27.
    a = instance("a", -0.01, times=times(decode_s=0.12))
    b = instance("b", 0.06, times=times(decode_s=0.2))
    target = instance("c", times=TIMES)
    node = Node(instances=[a, b, target], newcomer=a_prompt(100, 0.28), started_s=-0.15)
    assert node.verdict() is Verdict.FIRST_TOKEN_LATE
    node.newcomer.due_s = 0.31
    assert node.verdict() is Verdict.PASSES


@pytest.mark.parametrize(
    ("left", "verdict"), [(100, Verdict.FIRST_TOKEN_LATE), (40, Verdict.PASSES)]
)
def test_requests_that_came_since_then_count(left: int, verdict: Verdict) -> None:
    # 0.08 s until b has decoded, then theirs, due first, then the newcomer's 0.1 s.
    a, b, c = (instance(name, *due, times=TIMES) for name, due in BESIDE_B)
    node = Node(instances=[a, b, c], newcomer=a_prompt(100, 0.25), started_s=-0.02)
    assert node.verdict() is Verdict.PASSES
    node.joining = [(0, a_prompt(left, 0.2))]
    assert node.verdict() is verdict


def test_they_have_no_part_in_the_iteration_in_flight() -> None:
    # In it they would have been first: 0.1 s from -0.09, and the newcomer done at 0.11.
    a, b, c = (instance(name, *due, times=TIMES) for name, due in BESIDE_B)
    node = Node(instances=[a, b, c], newcomer=a_prompt(100, 0.2), started_s=-0.09)
    node.joining = [(0, a_prompt(100, 0.15))]
    assert node.verdict() is Verdict.FIRST_TOKEN_LATE


def test_they_decode_too() -> None:
    # 0.1 s of each 0.25 s for the newcomer and for each that runs or joins: three are too many.
    names = [instance(name, times=TIMES, tpot_s=0.25) for name in ("a", "b", "c")]
    node = Node(instances=names, newcomer=a_prompt(10, 5.0), joining=[(0, a_prompt(10, 5.0))])
    assert node.verdict() is Verdict.PASSES
    node.joining.append((1, a_prompt(10, 5.0)))
    assert node.verdict() is Verdict.TPOT_EXCEEDED


@pytest.mark.parametrize(
    ("until_s", "verdict"), [(0.1, Verdict.FIRST_TOKEN_LATE), (0.0, Verdict.PASSES)]
)
def test_a_load_slows_down_what_begins_beside_it(until_s: float, verdict: Verdict) -> None:
    # 0.2 s, or 0.4 s if it begins before the load ends.
    node = Node(instances=[instance("a", times=TIMES)], newcomer=a_prompt(200, 0.3))
    node.slowdown, node.slow_until_s = 2.0, until_s
    assert node.verdict() is verdict


@pytest.mark.parametrize(
    ("until_s", "verdict"), [(0.5, Verdict.FIRST_TOKEN_LATE), (-0.05, Verdict.PASSES)]
)
def test_also_the_iteration_in_flight(until_s: float, verdict: Verdict) -> None:
    # b's decode takes 0.2 s beside the load, 0.1 s else; the newcomer 20 ms, or 10.
    b = instance("b", 9.0, times=TIMES)
    node = Node(instances=[instance("a", times=TIMES), b], newcomer=a_prompt(10, 0.16), target=0)
    node.started_s, node.slowdown, node.slow_until_s = -0.04, 2.0, until_s
    assert node.verdict() is verdict
