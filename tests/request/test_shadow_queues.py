"""Whole queues by numbers: whom their prompts' order, their deadlines and other work leave time."""

from collections.abc import Sequence

import pytest

from mesh.domain.ids import InstanceId
from mesh.policy.rules.run_queues import Prompt, RunQueue
from mesh.request.shadow import Schedule, in_time_together
from tests.request.schedules import TIMES, TOKENS_MAX, queue


def in_time(
    *waiting: tuple[int, float], into: RunQueue | None = None, beside: Sequence[RunQueue] = ()
) -> list[bool]:
    """Which of the prompts are in time: each has so many tokens and is due at a time; a token takes
    1 ms.
    """
    own = into or RunQueue(instance_id=InstanceId("a"), times=TIMES, tpot_s=1.0)
    schedule = Schedule(queues=[*beside], now_s=0.0, prefill_tokens_max=TOKENS_MAX, margin_s=0.01)
    prompts = [Prompt(left=left, past=0, due_s=due_s) for left, due_s in waiting]
    return in_time_together(schedule, own, prompts)


@pytest.mark.parametrize("calls", [1, 4, 16])
def test_of_a_burst_those_whose_turn_comes_in_time(calls: int) -> None:
    """Iterations of 256 tokens, beside a decode of 0.1 s from the second on: 768 tokens are there
    after 0.968 s, and 10 ms later with their clients. That is three prompts of 200.
    """
    found = in_time(*[(200, 1.0)] * calls)
    assert found == [n < 3 for n in range(calls)]


def test_one_that_is_too_late_takes_no_time_from_those_behind_it() -> None:
    assert in_time((900, 0.005), (200, 0.25)) == [False, True]


def test_prompts_that_were_submitted_before_come_first() -> None:
    taken = queue("a", times=TIMES, prompts=[(200, 0.5)])
    assert in_time((200, 0.35), into=taken) == [False]
    assert in_time((200, 0.35)) == [True]


def test_decodes_of_others_that_are_due_come_first() -> None:
    """Two of them, 0.2 s, are due at once."""
    others = [queue("b", 0.1, times=TIMES), queue("c", 0.21, times=TIMES)]
    assert in_time((200, 0.35), beside=others) == [False]
    assert in_time((200, 0.45), beside=others) == [True]


def test_where_nobody_waits_nobody_is_late() -> None:
    assert in_time() == []
