"""What may be asked about a prompt has a bound: it comes in one message."""

import pytest

from mesh.controller.invocation_checks import PROMPT_LOGPROBS_MAX, check_prompt_logprobs
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import Invocation, TextPrompt


@pytest.mark.parametrize("top", [0, 1, 20])
def test_a_prompt_has_so_many_log_probabilities_at_most(top: int) -> None:
    asked = Invocation(
        deployment=DeploymentName("chat"), prompt=TextPrompt(text="x"), prompt_logprobs=top
    )
    most = PROMPT_LOGPROBS_MAX // (1 + top)
    check_prompt_logprobs(asked, most)
    with pytest.raises(InvalidInput, match=str(PROMPT_LOGPROBS_MAX)) as refused:
        check_prompt_logprobs(asked, most + 1)
    assert refused.value.field == "prompt_logprobs"
