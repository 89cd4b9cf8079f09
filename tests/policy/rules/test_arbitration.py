"""Prism's order of prompts: as many in time as can be, beside decodes in turns."""

import pytest

from mesh.policy.rules.arbitration import ARBITRATION
from mesh.policy.rules.run_queues import RunQueue
from mesh.policy.rules.turns import Grant, next_turn, note_turn
from tests.request.schedules import TIMES, TOKENS_MAX, queue


def turn(*queues: RunQueue, now_s: float = 0.0) -> Grant:
    grant = next_turn(ARBITRATION, queues, now_s, prefill_tokens_max=TOKENS_MAX)
    assert grant is not None
    return grant


def prompts(name: str, *of: tuple[int, float]) -> RunQueue:
    """A prompt takes 1 ms a token."""
    return queue(name, times=TIMES, prompts=list(of))


@pytest.mark.parametrize(
    ("of_a", "of_b", "first"),
    [
        ((100, 0.3), (100, 0.2), "b"),
        ((200, 0.21), (50, 0.22), "b"),
        ((200, 0.21), (50, 0.3), "a"),
        ((200, 0.1), (100, 0.05), "b"),
    ],
    ids=["first-due", "longest-goes", "both-in-time", "none-in-time"],
)
def test_as_many_prompts_as_can_be_are_in_time(
    of_a: tuple[int, float], of_b: tuple[int, float], first: str
) -> None:
    assert turn(prompts("a", of_a), prompts("b", of_b)).queue.instance_id == first


def test_every_other_turn_is_for_a_prompt() -> None:
    a, b, c = queue("a", 1.0, times=TIMES), queue("b", 1.0, times=TIMES), prompts("c", (500, 9.0))
    said = []
    for _ in range(5):
        grant = turn(a, b, c)
        note_turn(grant)
        said.append(grant.queue.instance_id)
    assert said == ["a", "c", "b", "c", "a"]


def test_a_prompt_that_is_given_up_keeps_no_other_instance_from_its_decodes() -> None:
    a = prompts("a", (9000, 99.0))
    b = queue("b", 1.0, times=TIMES, prompts=[(500, 0.1)])
    c = queue("c", 1.0, times=TIMES)
    said: list[str] = []
    for _ in range(40):
        grant = turn(a, b, c)
        note_turn(grant)
        said.append(grant.queue.instance_id)
    assert said.count("c") == said.count("b") == 10
