"""An open loop: calls go out at their times, whatever becomes of the ones before them."""

import time
from collections.abc import Callable

import gevent
import pytest

from mesh.evaluation.load_client import NOT_SENT, STOPPED, Answer, Call
from mesh_load.replayer import Replayer
from mesh_workloads import replay_plan
from tests.load.speaking import ScriptedSender, as_sent, planned


class Run:
    def __init__(
        self,
        *calls: tuple[float, str, int],
        open_max: int = 100,
        drawn: Callable[[int], object] = lambda number: None,
    ) -> None:
        """`drawn` is told of each call before it is sent."""
        self.answers: dict[int, Answer] = {}
        self.sender = ScriptedSender()
        pairs = ((call, as_sent(call)) for call in planned(*calls) if not drawn(call.number))
        self.replayer = Replayer(self.sender, pairs, self._ended, open_max=open_max)

    def _ended(self, plan: replay_plan.Call, call: Call, answer: Answer) -> None:
        assert plan.number not in self.answers, "told twice"
        self.answers[plan.number] = answer


def test_a_slow_answer_makes_no_later_call_wait() -> None:
    run = Run((0.0, "slow", 40), (0.2, "quick", 2), (0.4, "quick", 2))
    run.replayer.run(time.monotonic())
    assert list(run.answers) == [1, 2, 0]
    assert run.answers[0].ended_s >= 40 * 0.045


def test_what_is_late_says_by_how_much_and_goes_out_at_once() -> None:
    run = Run((0.0, "quick", 1), (0.5, "quick", 1), (30.0, "quick", 1))
    run.replayer.run(time.monotonic() - 30.0)
    assert [answer.lag_s for answer in run.answers.values()] == pytest.approx(
        [30.0, 29.5, 0.0], abs=10.0
    )


def test_one_call_too_many_is_not_sent_and_counted() -> None:
    run = Run((0.0, "slow", 20), (0.1, "slow", 20), (0.2, "quick", 1), open_max=2)
    run.replayer.run(time.monotonic())
    assert run.answers[2].failed == NOT_SENT
    assert len(run.sender.sent) == 2


def test_stopped_it_leaves_what_is_open_and_sends_nothing_more() -> None:
    run = Run((0.0, "slow", 1000), (0.1, "quick", 1), (60.0, "quick", 1))
    running = gevent.spawn(run.replayer.run, time.monotonic())
    with gevent.Timeout(20.0):
        while 1 not in run.answers:
            gevent.sleep(0.01)
    run.replayer.stop()
    running.join(timeout=5.0)
    assert running.ready()
    assert {number: answer.failed for number, answer in run.answers.items()} == {
        0: STOPPED,
        1: "",
    }


def test_a_call_that_is_stopped_before_its_greenlet_runs_is_told_of() -> None:
    def drawn(number: int) -> None:
        if number == 1:
            run.replayer.stop()

    run = Run((0.0, "quick", 1), (60.0, "quick", 1), drawn=drawn)
    run.replayer.run(time.monotonic())
    assert not run.sender.sent
    assert {number: answer.failed for number, answer in run.answers.items()} == {0: STOPPED}
