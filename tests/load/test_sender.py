"""What is noted of an answer: its tokens' times, how it ended, and that it was left."""

import time

import gevent
import pytest

from mesh.domain.outcome import Outcome
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.evaluation.load_client import STOPPED, Answer, outcome_of
from mesh_load.sender import ask
from tests.load.speaking import ScriptedSender, as_sent, planned


def asked(deployment: str, tokens: int) -> tuple[Answer, Outcome]:
    call = as_sent(planned((0.0, deployment, tokens))[0])
    answer = ask(ScriptedSender(), call, due_s=time.monotonic() - 0.25, timeout_s=60.0)
    return answer, outcome_of(call, answer, answer.sent_s)


def test_tokens_are_noted_as_they_come_and_how_late_the_call_was_sent() -> None:
    answer, outcome = asked("slow", 4)
    steps = [b - a for a, b in zip(answer.tokens_s, answer.tokens_s[1:], strict=False)]
    assert len(answer.tokens_s) == 4
    assert all(step >= 0.045 for step in steps)
    assert 0.25 <= answer.lag_s < 30.0
    assert (answer.finishes, answer.grace_s, answer.in_order) == (1, 0.5, True)
    assert outcome.end is FinishReason.LENGTH
    assert outcome.met


def test_a_refusal_keeps_its_reason() -> None:
    refused, outcome = asked("full", 4)
    assert (refused.refused, refused.failed) == ("memory_full", "")
    assert refused.retry_after_s == 2.0
    assert outcome.end is RefusalReason.MEMORY_FULL


@pytest.mark.parametrize(
    ("deployment", "status"),
    [("gone", "unavailable"), ("left", "cancelled"), ("late", "deadline_exceeded")],
)
def test_a_failure_keeps_its_status(deployment: str, status: str) -> None:
    failed, outcome = asked(deployment, 4)
    assert (failed.refused, failed.failed) == ("", status)
    assert outcome.end is FinishReason.FAILED


def test_a_greenlet_that_is_killed_returns_what_came() -> None:
    call = as_sent(planned((0.0, "slow", 1000))[0])
    asking = gevent.spawn(ask, ScriptedSender(), call, due_s=time.monotonic(), timeout_s=60.0)
    gevent.sleep(0.2)
    asking.kill()
    answer = asking.value
    assert isinstance(answer, Answer)
    assert answer.failed == STOPPED
    assert 0 < len(answer.tokens_s) < 1000
    assert outcome_of(call, answer).end is FinishReason.CANCELLED
