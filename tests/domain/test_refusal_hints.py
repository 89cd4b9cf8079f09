"""Every refusal says what helps against its reason, and when to try again if that may help."""

import pytest

from mesh.domain.errors import Refused
from mesh.domain.reasons import RefusalReason
from mesh.domain.refusal_hints import hint_for


@pytest.mark.parametrize("reason", RefusalReason)
def test_every_reason_has_a_remedy_and_a_retry_is_named_only_where_it_may_help(
    reason: RefusalReason,
) -> None:
    remedy = hint_for(reason)
    assert remedy
    assert "try again in" not in remedy
    retried = f"try again in 2.5 s; {remedy}"
    if reason is RefusalReason.LOAD_FAILED:
        retried = f"{remedy}; mesh loads it again in 2.5 s"
    assert hint_for(reason, 2.5) == retried
    assert Refused("x", reason=reason).hint == remedy
    assert Refused("x", reason=reason, hint="y").hint == "y"


@pytest.mark.parametrize(
    ("reason", "what"),
    [
        (RefusalReason.MEMORY_FULL, "memory"),
        (RefusalReason.TPOT_EXCEEDED, "spec.slo.tpot_s"),
        (RefusalReason.FIRST_TOKEN_LATE, "spec.slo.ttft_s"),
        (RefusalReason.PROMPT_TOO_LONG, "shorten the prompt"),
        (RefusalReason.LOAD_FAILED, "mesh logs"),
        (RefusalReason.LOAD_FAILED, "spec.context_tokens_max"),
        (RefusalReason.NO_NODE, "mesh node"),
    ],
)
def test_the_remedy_is_for_what_lacked(reason: RefusalReason, what: str) -> None:
    assert what in hint_for(reason)
