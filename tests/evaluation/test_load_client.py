"""Calls go out at their times, whatever becomes of others; each end is told, and judged."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from threading import Barrier

import pytest

from mesh.domain.errors import Cancelled, MeshError, Refused
from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.invocation import Accepted, Waiting
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.slo import Slo
from mesh.evaluation.load_client import (
    MALFORMED,
    NOT_SENT,
    PREPARED_MAX,
    STOPPED,
    Answer,
    Call,
    answer_of,
    offer,
    offer_again,
    outcome_of,
    send,
)
from mesh.v1 import inference_pb2 as pb
from tests.support.token_server import away, token_server

CALL = Call(
    at_s=7.0,
    deployment=DeploymentName("chat"),
    slo=Slo(ttft_s=1.5, tpot_s=0.12),
    prompt_tokens=(1, 2, 3),
    output_tokens=2,
)


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        (Answer(ended_s=1.0, tokens_s=(0.5, 1.0), finishes=1), FinishReason.LENGTH),
        (Answer(ended_s=1.0, tokens_s=(0.5,), finishes=1), FinishReason.FAILED),
        (Answer(ended_s=1.0, tokens_s=(0.5, 1.0), finishes=1, in_order=False), FinishReason.FAILED),
        (Answer(ended_s=1.0, tokens_s=(0.5, 1.0), finishes=0), FinishReason.FAILED),
        (Answer(ended_s=1.0, tokens_s=(0.5, 1.0), finishes=2), FinishReason.FAILED),
        (Answer(ended_s=1.0, tokens_s=(), failed="unavailable"), FinishReason.FAILED),
        (Answer(ended_s=1.0, tokens_s=(), refused="queue_full"), RefusalReason.QUEUE_FULL),
    ],
)
def test_a_call_has_its_outcome(answer: Answer, end: FinishReason | RefusalReason) -> None:
    assert outcome_of(CALL, answer, 0.0).end is end


def test_times_count_from_the_start_of_the_run() -> None:
    answer = Answer(
        ended_s=1.0, tokens_s=(0.5, 1.0), finishes=1, sent_s=107.25, lag_s=0.25, grace_s=0.125
    )
    made = outcome_of(CALL, answer, 100.0)
    assert (made.arrival_s, made.tokens_s, made.ended_s) == (7.25, (7.75, 8.25), 8.25)
    assert (made.ttft_s, made.grace_s, made.input_tokens) == (0.5, 0.125, 3)


@pytest.mark.parametrize(("refused", "failed"), [("node_lost", ""), ("", "unavailable")])
def test_what_was_promised_is_known_of_a_call_that_fails_later(refused: str, failed: str) -> None:
    accepted = Accepted(
        request_id=RequestId("r1-1"),
        prompt_tokens=3,
        ttft_limit_s=1.5,
        tpot_limit_s=0.12,
        grace_s=0.75,
    )
    waiting = Waiting(phase="weights", share=0.5)
    answer = answer_of(
        [(100.1, waiting), (100.2, accepted)],
        sent_s=100.0,
        ended_s=101.0,
        lag_s=0.0,
        refused=refused,
        failed=failed,
    )
    assert (answer.accepted, answer.grace_s, answer.tokens_s) == (True, 0.75, ())
    made = outcome_of(CALL, answer)
    assert (made.admitted, made.promised_in_time, made.grace_s) == (True, False, 0.75)


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        (Answer(ended_s=1.0, tokens_s=(0.5,), finishes=1, told_tokens=1), FinishReason.LENGTH),
        (
            Answer(
                ended_s=1.0, tokens_s=(0.5,), finishes=1, told_tokens=1, finish=FinishReason.STOP
            ),
            FinishReason.STOP,
        ),
        (Answer(ended_s=1.0, tokens_s=(0.5,), finishes=1, told_tokens=2), FinishReason.FAILED),
        (Answer(ended_s=1.0, tokens_s=(0.5,), failed=STOPPED), FinishReason.CANCELLED),
    ],
)
def test_an_answer_that_ends_itself_is_as_long(answer: Answer, end: FinishReason) -> None:
    assert outcome_of(replace(CALL, forced=False), answer, 0.0).end is end


def calls(count: int, every_s: float, tokens: int = 2) -> list[Call]:
    return [replace(CALL, at_s=n * every_s, output_tokens=tokens) for n in range(count)]


def test_calls_are_answered_in_their_order_with_what_they_asked_for() -> None:
    sent = [replace(call, prompt_tokens=(n + 1,)) for n, call in enumerate(calls(20, 0.01))]
    with token_server() as (address, server):
        answers = offer(address, [replace(sent[0], forced=False), *sent[1:]])
    assert all(answer.whole(call) for answer, call in zip(answers, sent, strict=True))
    assert {answer.node_id for answer in answers} == {"n1"}
    asked = sorted(server.requests, key=lambda request: request.tokens.ids[0])
    assert [request.ignore_eos for request in asked] == [False, *[True] * 19]
    assert all(b.sent_s >= a.sent_s for a, b in pairwise(answers))
    assert all(answer.lag_s >= 0.0 for answer in answers)


def test_a_slow_cell_slows_nobody_down() -> None:
    all_sent = Barrier(10)

    def script(request: pb.InvokeRequest) -> None:
        all_sent.wait(30.0)

    with token_server(script) as (address, _):
        answers = offer(address, calls(10, 0.02))
    assert not any(answer.failed for answer in answers)


def test_refusals_keep_their_reason_and_failures_their_status() -> None:
    def script(request: pb.InvokeRequest) -> MeshError | None:
        if request.tokens.ids[0] == 1:
            return Refused("full", reason=RefusalReason.MEMORY_FULL)
        return away(request)

    sent = [replace(CALL, prompt_tokens=(1,)), replace(CALL, prompt_tokens=(2,))]
    with token_server(script) as (address, _):
        refused, failed = offer(address, [replace(call, at_s=0.0) for call in sent])
    assert (refused.refused, refused.failed) == ("memory_full", "")
    assert (failed.refused, failed.failed) == ("", "unavailable")


@pytest.mark.parametrize(
    "meaningless",
    [
        pytest.param(b"\xff", id="no-message"),
        pytest.param(b"", id="no-event"),
        pytest.param(pb.InvokeResponse(finished=pb.Finished()).SerializeToString(), id="no-reason"),
    ],
)
def test_an_answer_that_means_nothing_is_its_calls_failure(meaningless: bytes) -> None:
    def script(request: pb.InvokeRequest) -> bytes | None:
        return meaningless if request.tokens.ids[0] == 1 else None

    sent = [replace(CALL, at_s=0.0, prompt_tokens=(n,)) for n in (1, 2)]
    with token_server(script) as (address, _):
        failed, well = offer(address, sent)
    assert (failed.failed, len(failed.tokens_s), failed.in_order) == (MALFORMED, 2, True)
    assert outcome_of(sent[0], failed).end is FinishReason.FAILED
    assert well.whole(sent[1])


def test_who_is_refused_comes_again_once_when_the_refusal_says_so() -> None:
    came: Counter[int] = Counter()

    def script(request: pb.InvokeRequest) -> MeshError | None:
        number = request.tokens.ids[0]
        came[number] += 1
        if number == 1 and came[1] == 2:
            return None
        retry_after_s = 0.0 if number == 3 else 0.2 * number
        return Refused("full", reason=RefusalReason.QUEUE_FULL, retry_after_s=retry_after_s)

    sent = [replace(CALL, at_s=0.0, prompt_tokens=(n,)) for n in (1, 2, 3)]
    with token_server(script) as (address, _):
        answers, retries = offer_again(address, sent)
    assert [answer.retry_after_s for answer in answers] == pytest.approx([0.2, 0.4, 0.0])
    assert dict(came) == {1: 2, 2: 2, 3: 1}
    retries.sort(key=lambda retry: retry[0].prompt_tokens)
    (first, served), (second, refused) = retries
    assert [first.prompt_tokens, second.prompt_tokens] == [(1,), (2,)]
    assert served.whole(first)
    assert refused.refused == "queue_full"
    for (call, again), answer in zip(retries, answers, strict=False):
        due_s = answer.sent_s + answer.ended_s + answer.retry_after_s
        assert again.sent_s - again.lag_s == pytest.approx(due_s)
        assert again.lag_s >= 0.0
        assert call.at_s - answer.retry_after_s == pytest.approx(answer.lag_s + answer.ended_s)


def test_what_the_cell_itself_cancels_has_failed() -> None:
    with token_server(lambda request: Cancelled("the cell stops")) as (address, _):
        (answer,) = offer(address, [replace(CALL, at_s=0.0)])
    assert answer.failed == "cancelled"
    assert outcome_of(CALL, answer).end is FinishReason.FAILED


def test_without_a_server_all_calls_fail_and_are_told_of() -> None:
    with token_server() as (address, _):
        pass
    answers = offer(address, calls(3, 0.01), call_s_max=5.0)
    assert [answer.failed for answer in answers] == ["unavailable"] * 3


def test_a_call_that_takes_too_long_is_left() -> None:
    with token_server(token_s=5.0) as (address, _):
        (answer,) = offer(address, calls(1, 0.0), call_s_max=0.3)
    assert answer.failed == "deadline_exceeded"


def test_one_call_too_many_is_not_sent() -> None:
    told = Told()
    with token_server(token_s=0.5) as (address, server):
        send(address, calls(5, 0.001), told, open_max=3)
    assert told.failed == {0: "", 1: "", 2: "", 3: NOT_SENT, 4: NOT_SENT}
    assert len(server.requests) == 3


class Told:
    def __init__(self) -> None:
        self.failed: dict[int, str] = {}

    def __call__(self, number: int, call: Call, answer: Answer) -> None:
        self.failed[number] = answer.failed


class Enough(Exception):
    pass


def test_what_watch_raises_ends_all_and_open_calls_are_told_of() -> None:
    told = Told()

    def watch(at_s: float) -> None:
        if at_s > 0.2:
            raise Enough

    with token_server(token_s=0.1) as (address, _), pytest.raises(Enough):
        send(
            address,
            [*calls(3, 0.01, tokens=600), replace(CALL, at_s=600.0)],
            told,
            watch=watch,
        )
    assert told.failed == dict.fromkeys(range(3), STOPPED)


def test_a_sender_that_is_late_for_all_calls_still_reads_and_watches() -> None:
    drawn = 0

    def slowly_made() -> Iterator[Call]:
        nonlocal drawn
        for call in calls(4000, 0.0):
            drawn += 1
            time.sleep(0.001)
            yield call

    def watch(at_s: float) -> None:
        if at_s > 0.2:
            raise Enough

    told = Told()
    with token_server() as (address, _), pytest.raises(Enough):
        send(address, slowly_made(), told, watch=watch)
    assert drawn < 4000
    assert "" in told.failed.values()


def test_what_ended_raises_ends_all() -> None:
    def ended(number: int, call: Call, answer: Answer) -> None:
        raise Enough

    with token_server() as (address, _), pytest.raises(Enough):
        send(address, [*calls(1, 0.0), replace(CALL, at_s=600.0)], ended)


def test_requests_are_taken_shortly_before_their_time() -> None:
    taken: list[int] = []
    most_ahead = 0

    def coming() -> Iterator[Call]:
        for number, call in enumerate(calls(3 * PREPARED_MAX, 0.002, tokens=1)):
            taken.append(number)
            yield call

    def ended(number: int, call: Call, answer: Answer) -> None:
        nonlocal most_ahead
        most_ahead = max(most_ahead, len(taken) - number)

    with token_server(token_s=0.0) as (address, _):
        send(address, coming(), ended)
    assert len(taken) == 3 * PREPARED_MAX
    assert most_ahead < 3 * PREPARED_MAX
