"""What is counted of a replay, and of what attainment is a share."""

from dataclasses import replace

import pytest

from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.evaluation.replay.numbers import ALL, numbers
from mesh.evaluation.replay.results import CallResult
from tests.evaluation.replay.made import RESULTS, result


def test_every_call_is_counted_once() -> None:
    whole, chat, code, idle = numbers(RESULTS, ["idle", "chat", "code"])
    assert [n.deployment for n in (whole, chat, code, idle)] == [ALL, "chat", "code", "idle"]
    assert (whole.calls, whole.finished, whole.cancelled) == (8, 4, 1)
    assert whole.refused == (("memory_full", 1),)
    assert whole.failed == (("not_sent", 1), ("unavailable", 1))
    ends = whole.finished + whole.cancelled + sum(n for _, n in (*whole.refused, *whole.failed))
    assert ends == whole.calls
    assert (chat.calls, code.calls, idle.calls) == (6, 2, 0)
    assert code.refused == whole.refused


def test_attainment_is_of_the_calls_that_the_cell_could_answer() -> None:
    whole, chat, code = numbers(RESULTS, ["chat", "code"])
    # Neither the one that was not sent nor the one that was open at the end.
    assert whole.judged == 6
    assert (whole.met, whole.met_in_the_mean) == (2, 2)
    assert whole.attainment == pytest.approx(2 / 6)
    assert whole.attainment_in_the_mean == pytest.approx(2 / 6)
    assert (chat.judged, chat.met) == (4, 2)
    assert (code.judged, code.met) == (2, 0)


def test_promises_are_counted_of_those_admitted_and_by_both_measures() -> None:
    late = [with_grace(10, 2.0, 2.1), with_grace(11, 1.2, 1.3)]
    torn = with_grace(12, end=RefusalReason.NODE_LOST)
    whole, chat, code = numbers([*RESULTS, *late, torn], ["chat", "code"])
    # Not the one that was refused; the one that found no controller was promised nothing, and is
    # counted as not kept.
    assert (whole.promised, whole.promised_met, whole.promised_met_in_the_mean) == (5, 2, 2)
    assert whole.met_of_admitted == pytest.approx(2 / 5)
    assert whole.told_late == chat.told_late == 3
    assert (chat.late_over_told_p50, chat.late_over_told_p95) == pytest.approx((0.4, 2.0))
    assert (code.told_late, code.late_over_told_p50) == (0, None)
    assert (code.met_of_admitted, code.met_of_admitted_in_the_mean) == (0.0, 0.0)


def with_grace(
    number: int, *tokens_s: float, end: FinishReason | RefusalReason = FinishReason.LENGTH
) -> CallResult:
    made = result(number, *tokens_s, end=end)
    return replace(made, outcome=replace(made.outcome, accepted=True, grace_s=0.5))


def test_latencies_and_lateness_are_of_what_was_sent() -> None:
    whole, *_ = numbers(RESULTS, ["chat", "code"])
    assert whole.ttft_s_p50 == pytest.approx(0.5)
    assert whole.ttft_s_p95 == pytest.approx(1.5)
    assert whole.whole_s_p95 == pytest.approx(1.55)
    assert whole.late_ms_p99 == pytest.approx(4.0)
    assert whole.late_ms_p50 == pytest.approx(1.0)
    assert whole.output_tokens == 2 + 4 + 11 + 2 + 1
    # From the first sending to the last end: 0.001 s to 7.501 s.
    assert whole.tokens_per_s == pytest.approx(20 / 7.5)


def test_nothing_has_no_numbers() -> None:
    (whole,) = numbers((), [])
    assert (whole.calls, whole.attainment, whole.ttft_s_p50, whole.tokens_per_s) == (0, 0, None, 0)
    assert (whole.met_of_admitted, whole.met_of_admitted_in_the_mean) == (None, None)
