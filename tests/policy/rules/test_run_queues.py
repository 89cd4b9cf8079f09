"""What a run queue makes of its requests, and how much time others leave it."""

from math import inf

import pytest

from mesh.domain.ids import RequestId
from mesh.policy.rules.run_queues import Prompt, RunQueue, slack_s
from tests.request.schedules import queue, times

TIMES = times(decode_s=0.1, decode_more_s=0.02, prefill_token_s=0.001)
A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


def test_the_least_deadline_that_can_be_kept_stands_for_all() -> None:
    a = queue("a", 0.5, 0.3, 0.9, times=TIMES)
    assert (a.due_s, a.late_s) == (0.3, inf)


def test_a_missed_deadline_does_not_hide_those_that_can_be_kept() -> None:
    a = queue("a", 0.5, -0.2, -0.1, times=TIMES)
    assert (a.due_s, a.late_s) == (0.5, -0.2)


def test_a_deadline_nearer_than_a_decode_is_as_good_as_missed() -> None:
    # Three decode in 0.14 s.
    a = queue("a", 0.5, 0.13, 0.15, times=TIMES)
    a.sort_out(0.0)
    assert (a.due_s, a.late_s) == (0.15, 0.13)
    b = queue("b", 0.125, times=times(decode_s=0.125))
    b.sort_out(0.0)
    assert (b.due_s, b.late_s) == (0.125, inf), "just in time"
    a.sort_out(-1.0)
    assert (a.due_s, a.late_s) == (0.13, inf), "it could still be kept a second ago"


def test_a_decode_moves_all_deadlines_by_the_tpot() -> None:
    a = queue("a", 0.5, 0.3, times=TIMES, tpot_s=0.25)
    a.decoded(0.2)
    assert (a.due_s, a.late_s) == (0.55, inf)
    a.sort_out(0.2)
    assert (a.due_s, a.late_s) == (0.55, inf), "nothing is left of the ones before"


def test_who_is_late_continues_at_the_pace_of_the_slo_from_there() -> None:
    a = queue("a", 0.5, -0.3, times=TIMES, tpot_s=0.25)
    a.decoded(0.2)
    assert (a.due_s, a.late_s) == (0.45, inf)
    b = queue("b", 0.1, times=TIMES, tpot_s=0.25)
    b.decoded(0.2)
    assert b.due_s == 0.45


def test_an_iteration_takes_a_decode_and_a_chunk() -> None:
    a = queue("a", 0.5, 0.5, times=TIMES, prompts=[(50, 1.0)])
    assert a.turn_s(0) == pytest.approx(0.12)
    assert a.turn_s(50) == pytest.approx(0.17)
    assert queue("b", times=TIMES, prompts=[(50, 1.0)]).turn_s(50) == pytest.approx(0.05)


def test_a_prompt_at_once_takes_the_largest_chunks_each_with_a_decode() -> None:
    a = queue("a", 0.5, times=TIMES, prompts=[(300, 1.0)])
    assert a.at_once_s(a.prompts[0], 256) == pytest.approx(0.3 + 2 * 0.1)
    assert a.at_once_s(a.prompts[0], 100) == pytest.approx(0.3 + 3 * 0.1)


def test_contexts_count_as_longer_by_what_is_looked_ahead() -> None:
    # 10 tokens of context each, and 1 ms for each of their mean.
    a = queue("a", 0.5, 0.5, times=times(decode_s=0.1, context_token_s=0.001))
    assert a.decode_s == pytest.approx(0.11)
    a.predict(64)
    assert a.decode_s == pytest.approx(0.174)


class TestSlack:
    def test_it_is_what_the_others_leave_of_their_deadlines(self) -> None:
        # b needs 0.1 s until 0.5, b and c 0.2 s until 0.55 (and of b's next token, due at 1.5,
        # a twentieth: 0.005 s).
        a = queue("a", times=TIMES, prompts=[(10, 1.0)])
        b, c = queue("b", 0.5, times=TIMES), queue("c", 0.55, times=TIMES)
        assert slack_s(a, [a, b], 0.0) == pytest.approx(0.4)
        assert slack_s(a, [c, a, b], 0.0) == pytest.approx(0.345)
        assert slack_s(a, [a], 0.0) == inf

    def test_its_own_batch_has_to_be_in_time_now_and_next(self) -> None:
        # Its own tokens are due at 0.3 and 0.3 + 1.0; its next decode must not come in b's way.
        a, b = queue("a", 0.3, times=TIMES), queue("b", 5.0, times=TIMES)
        assert slack_s(a, [a, b], 0.0) == pytest.approx(0.3)
        late = queue("a", 2.0, times=TIMES, tpot_s=0.2)
        # Until 2.2 s: 0.1 s for its second token; until 2.25, a quarter of its third: 0.025 s, and
        # 2.1 s for the other: 0.025 s are left.
        slow = queue("b", 2.25, times=times(decode_s=2.1), tpot_s=9.0)
        assert slack_s(late, [late, slow], 0.0) == pytest.approx(0.025)

    def test_who_is_late_and_who_waits_does_not_count(self) -> None:
        a = queue("a", times=TIMES, prompts=[(10, 1.0)])
        b = queue("b", -0.5, times=TIMES)
        c = queue("c", times=TIMES, prompts=[(10, 0.1)])
        assert slack_s(a, [a, b, c], 0.0) == inf


class TestClasses:
    """Requests of several paces: a is due every 0.2 s, b and c every second."""

    @staticmethod
    def mixed() -> RunQueue:
        made = queue("i", times=TIMES, tpot_s=0.2)
        made.batch, made.context_tokens = 3, 60
        rows = [(A, 0.3, 10, 0.2), (B, 0.5, 20, 1.0), (C, 0.9, 30, 1.0)]
        made.divide(rows, 0.0)
        made.predict()
        return made

    def test_the_earliest_deadline_of_all_stands_for_the_run_queue(self) -> None:
        made = self.mixed()
        assert [(part.tpot_s, part.batch, part.due_s) for part in made.parts] == [
            (0.2, 1, 0.3),
            (1.0, 2, 0.5),
        ]
        assert (made.due_s, made.late_s) == (0.3, inf)

    def test_each_is_due_again_by_its_own_pace(self) -> None:
        made = self.mixed()
        for part in made.decoding(None):
            part.decoded(0.1)
        made.gather()
        assert [part.due_s for part in made.parts] == [0.5, 1.5]

    def test_who_is_not_named_is_due_as_before(self) -> None:
        made = self.mixed()
        (part,) = made.decoding((C,))
        assert (part.running, part.due_s, part.batch, part.context_tokens) == ([C], 0.9, 1, 25)
        part.decoded(0.1)
        made.gather()
        left = {tuple(part.running): part.due_s for part in made.parts}
        assert left == {(A,): 0.3, (B,): 0.5, (C,): 1.9}
        assert made.decoding((C,)) == [part], "it is a class by now"
        assert made.decoding((RequestId("nobody"),)) == []
        assert made.decode_s_of(1) == pytest.approx(0.1)

    def test_a_request_of_another_pace_joins_a_class_of_its_own(self) -> None:
        made = queue("i", 0.5, times=TIMES, tpot_s=1.0)
        made.quicken(0.2)
        assert [part.tpot_s for part in made.parts] == [1.0]
        prompt = Prompt(request_id=A, left=0, past=10, due_s=0.4, tpot_s=0.2)
        made.join(prompt, 0.1)
        assert [(part.tpot_s, part.due_s) for part in made.parts] == [
            (1.0, 0.5),
            (0.2, pytest.approx(0.6)),
        ]
        assert (made.batch, made.tpot_s, made.due_s) == (2, 0.2, 0.5)
