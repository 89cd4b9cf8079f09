"""What came of a call, as a live client makes an outcome of it."""

import pytest

from mesh.domain.ids import DeploymentName
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.slo import Slo
from mesh.evaluation.load_client import Answer, Call, outcome_of

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
def test_what_came_of_a_call_is_its_outcome(
    answer: Answer, end: FinishReason | RefusalReason
) -> None:
    assert outcome_of(CALL, answer, 0.0).end is end


def test_times_count_from_the_start_of_the_run() -> None:
    answer = Answer(
        ended_s=1.0, tokens_s=(0.5, 1.0), finishes=1, sent_s=107.25, lag_s=0.25, grace_s=0.125
    )
    made = outcome_of(CALL, answer, 100.0)
    assert (made.arrival_s, made.tokens_s, made.ended_s) == (7.25, (7.75, 8.25), 8.25)
    assert (made.ttft_s, made.grace_s, made.input_tokens) == (0.5, 0.125, 3)
