"""What may be asked about a prompt has a bound: it comes in one message."""

from dataclasses import replace
from typing import Any

import pytest

from mesh.controller.invocation_checks import (
    PROMPT_LOGPROBS_MAX,
    check_invocation,
    check_prompt_logprobs,
    check_task,
)
from mesh.domain.errors import InvalidInput
from mesh.domain.grammar import Grammar, GrammarKind
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import Invocation, PairPrompt, Prompt, TextPrompt, TokenPrompt
from mesh.domain.model import Task
from mesh.domain.request import TokenBias

NAME = DeploymentName("ranks")
TEXT, PAIR = TextPrompt(text="a"), PairPrompt(query="a", document="b")


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


@pytest.mark.parametrize(
    ("task", "prompt", "fits"),
    [
        (Task.RERANK, PAIR, True),
        (Task.RERANK, TEXT, False),
        (Task.EMBED, PAIR, False),
        (Task.EMBED, TEXT, True),
        (None, PAIR, False),
        (Task.RERANK, TokenPrompt(token_ids=(1,)), True),
        (None, TokenPrompt(token_ids=(1,)), True),
    ],
)
def test_a_query_with_a_document_is_for_ranking_alone(
    task: Task | None, prompt: Prompt, fits: bool
) -> None:
    asked = Invocation(deployment=NAME, prompt=prompt, task=task)
    if fits:
        check_task(asked, task)
    else:
        with pytest.raises(InvalidInput, match="the prompt is a"):
            check_task(asked, task)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprobs", 0),
        ("prompt_logprobs", 0),
        ("logit_bias", (TokenBias(token_id=1, bias=1.0),)),
        ("stop", ("a",)),
        ("stop_token_ids", (1,)),
        ("grammar", Grammar(kind=GrammarKind.REGEX, text="a")),
    ],
)
def test_a_vector_has_no_tokens_of_which_anything_could_be_asked(name: str, value: Any) -> None:
    asked = replace(Invocation(deployment=NAME, prompt=TEXT, task=Task.EMBED), **{name: value})
    with pytest.raises(InvalidInput, match="have no tokens") as refused:
        check_task(asked, Task.EMBED)
    assert refused.value.field == name
    check_task(replace(asked, task=None), None)


def test_an_empty_query_is_refused() -> None:
    prompt = PairPrompt(query="", document="b")
    with pytest.raises(InvalidInput, match="the query is empty"):
        check_invocation(Invocation(deployment=NAME, prompt=prompt, task=Task.RERANK))
