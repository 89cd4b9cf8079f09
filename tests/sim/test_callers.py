"""Callers notice what must not happen to them, and what they were told is in their outcomes."""

import pytest

from mesh.domain.actions import DeliverTokens, RefuseRequest, TellAccepted
from mesh.domain.ids import RequestId
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.request import RequestTokens
from mesh.sim.callers import Callers
from mesh.sim.clock import HeapClock
from mesh.sim.sequences import answer_of
from tests.core.cells import deployment, request

R1 = RequestId("r1")
ACCEPTED = TellAccepted(request_id=R1, grace_s=0.5)


def waiting() -> Callers:
    callers = Callers(HeapClock())
    callers.call(request(R1), deployment())
    return callers


def whole_answer() -> DeliverTokens:
    asked, deployed = request(R1), deployment()
    tokens = answer_of(
        asked.prompt_tokens, asked.sampling, asked.sampling.max_tokens, deployed.model
    )
    return DeliverTokens(
        outputs=RequestTokens(
            request_id=R1,
            attempt=1,
            first_index=0,
            token_ids=tokens,
            finish=FinishReason.LENGTH,
        )
    )


def test_what_a_caller_was_told_is_in_its_outcome_however_it_ends() -> None:
    served = waiting()
    served.accepted(ACCEPTED)
    served.deliver(whole_answer())
    torn = waiting()
    torn.accepted(ACCEPTED)
    torn.refuse(RefuseRequest(request_id=R1, reason=RefusalReason.NODE_LOST, message="x"))
    for (outcome,) in (served.outcomes, torn.outcomes):
        assert (outcome.accepted, outcome.grace_s) == (True, 0.5)
    refused = waiting()
    refused.refuse(RefuseRequest(request_id=R1, reason=RefusalReason.QUEUE_FULL, message="x"))
    assert not refused.outcomes[0].admitted


def test_a_request_is_accepted_once_before_its_tokens_and_its_end() -> None:
    callers = waiting()
    with pytest.raises(AssertionError, match="not accepted"):
        callers.deliver(whole_answer())
    callers.accepted(ACCEPTED)
    with pytest.raises(AssertionError, match="accepted twice"):
        callers.accepted(ACCEPTED)
    callers.cancel(R1)
    with pytest.raises(AssertionError, match="has ended"):
        callers.accepted(ACCEPTED)
