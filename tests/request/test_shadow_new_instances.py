"""Shadow validation where the newcomer waits for a load; see `test_shadow` for the numbers."""

import pytest

from mesh.domain.reasons import Verdict
from mesh.request.shadow import validate
from tests.request.schedules import TIMES, Node, a_prompt, instance, times


@pytest.mark.parametrize(
    ("due_s", "verdict"), [(3.15, Verdict.FIRST_TOKEN_LATE), (3.25, Verdict.PASSES)]
)
def test_the_newcomer_starts_once_its_instance_is_loaded(due_s: float, verdict: Verdict) -> None:
    # In 3 s, and then its 200 tokens take 0.2 s.
    node = Node(instances=[instance("a", times=TIMES)], newcomer=a_prompt(200, due_s))
    node.joins_s = 3.0
    assert validate(*node.schedule(target_known=False)) is verdict


def test_a_new_queue_is_part_of_the_schedule() -> None:
    a, b = (instance(name, 5.0, times=TIMES, tpot_s=0.25) for name in ("a", "b"))
    new = instance("c", times=TIMES, tpot_s=0.25)
    node = Node(instances=[a, b, new], newcomer=a_prompt(10, 5.0), joins_s=1.0)
    assert validate(*node.schedule(target_known=False)) is Verdict.TPOT_EXCEEDED


@pytest.mark.parametrize(
    ("due_s", "verdict"), [(60.26, Verdict.PASSES), (60.19, Verdict.FIRST_TOKEN_LATE)]
)
def test_a_load_may_take_many_iterations_of_others(due_s: float, verdict: Verdict) -> None:
    # Thirty thousand decodes of 2 ms. They gather headroom, so that the 0.2 s fit, behind one
    # decode at most.
    a = instance("a", 0.25, times=times(decode_s=0.002), tpot_s=0.25)
    node = Node(instances=[a, instance("b", times=TIMES)], newcomer=a_prompt(200, due_s))
    node.joins_s = 60.0
    assert node.verdict() is verdict


def test_an_iteration_may_be_in_flight_when_it_joins() -> None:
    # Of 0.1 s; then its 0.2 s.
    a = instance("a", 0.25, times=TIMES, tpot_s=0.25)
    node = Node(instances=[a, instance("b", times=TIMES)], newcomer=a_prompt(200, 60.25))
    node.joins_s = 60.0
    assert node.verdict() is Verdict.FIRST_TOKEN_LATE
    node.newcomer.due_s = 60.31
    assert node.verdict() is Verdict.PASSES


def test_another_load_may_take_longer() -> None:
    # It joins after 5 s and takes 0.4 s beside a load that ends after 60.
    a = instance("a", 0.25, times=times(decode_s=0.002), tpot_s=0.25)
    node = Node(instances=[a, instance("b", times=TIMES)], newcomer=a_prompt(200, 5.45))
    node.joins_s, node.slowdown, node.slow_until_s = 5.0, 2.0, 60.0
    assert node.verdict() is Verdict.PASSES
    node.newcomer.due_s = 5.35
    assert node.verdict() is Verdict.FIRST_TOKEN_LATE


def test_a_prompt_that_waits_is_not_forgotten_meanwhile() -> None:
    # It takes a second; a has 1.5 s for it now, and the newcomer is not there for a minute.
    a = instance("a", 1.6, times=times(decode_s=0.002), tpot_s=0.25)
    b = instance("b", times=TIMES, prompts=[(1000, 1.1)])
    node = Node(instances=[a, b, instance("c", times=TIMES)], newcomer=a_prompt(10, 70.0))
    node.joins_s = 60.0
    assert node.verdict() is Verdict.PASSES
    c = instance("c", times=TIMES, prompts=[(200, 1.1)])
    node.instances[2] = c
    assert node.verdict() is Verdict.DELAYS_RUNNING


def test_nor_who_is_late_meanwhile() -> None:
    # Each could be in time if it were first; for the second of them it is 0.2 s.
    a, b = instance("a", 0.15, times=TIMES), instance("b", 0.19, times=TIMES)
    node = Node(instances=[a, b, instance("c", times=TIMES)], newcomer=a_prompt(10, 70.0))
    node.joins_s = 60.0
    assert node.verdict() is Verdict.DELAYS_RUNNING
    b.requests[0].due_s = 0.21
    assert node.verdict() is Verdict.PASSES


def test_headroom_that_is_gathered_meanwhile_counts_and_no_more() -> None:
    # a decodes in 0.09 of every 0.1 s: within 10 s it gathers 1.1 s, for a prompt of 0.8 s, but
    # not for one of 2 s. Beside a load it takes 0.18 of every 0.19 s and gathers half of that.
    def node(left: int, tpot_s: float, slowdown: float) -> Node:
        a = instance("a", 0.1, times=times(decode_s=0.09), tpot_s=tpot_s)
        new = instance("b", times=times(decode_s=0.001), tpot_s=1.0)
        return Node(
            instances=[a, new],
            newcomer=a_prompt(left, 10.0 + left * 0.001 + 0.3),
            joins_s=10.0,
            slowdown=slowdown,
            slow_until_s=10.0,
            tokens_max=4000,
        )

    assert node(800, 0.1, 1.0).verdict() is Verdict.PASSES
    assert node(2000, 0.1, 1.0).verdict() is Verdict.FIRST_TOKEN_LATE
    assert node(200, 0.19, 2.0).verdict() is Verdict.PASSES
    assert node(2000, 0.19, 2.0).verdict() is Verdict.FIRST_TOKEN_LATE


def test_a_load_that_others_are_late_beside_is_refused() -> None:
    # a needs 0.12 s of every 0.1 s while the load lasts, and has 1 s of headroom for it.
    def node(load_s: float) -> Node:
        a = instance("a", 1.0, times=times(decode_s=0.06), tpot_s=0.1)
        new = instance("b", times=times(decode_s=0.001), tpot_s=1.0)
        made = Node(instances=[a, new], newcomer=a_prompt(10, load_s + 5.0), joins_s=load_s)
        made.slowdown, made.slow_until_s = 2.0, load_s
        return made

    assert node(4.0).verdict() is Verdict.PASSES
    assert node(8.0).verdict() is Verdict.DELAYS_RUNNING


def test_so_is_what_joins_while_it_lasts() -> None:
    # As above, with the newcomer there at once, on an instance that needs next to nothing.
    def node(load_s: float) -> Node:
        a = instance("a", 1.0, times=times(decode_s=0.06), tpot_s=0.1)
        b = instance("b", times=times(decode_s=0.0001), tpot_s=1.0)
        made = Node(instances=[a, b], newcomer=a_prompt(10, 5.0))
        made.slowdown, made.slow_until_s = 2.0, load_s
        return made

    assert node(4.0).verdict() is Verdict.PASSES
    assert node(8.0).verdict() is Verdict.DELAYS_RUNNING
