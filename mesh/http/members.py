"""Which member of which protocol means what.

Readers copy by this table what is the same in other words (`copied`); docs/members.md is made from
it, and a test holds it to the schemas: each member with a type of its own has a row. Before: bodies
that were read. After: a call in the words of Chat Completions.
"""

from functools import cache
from typing import Any, Literal

from mesh.domain.values import dataclass

Protocol = Literal["chat", "completions", "responses", "messages", "ollama"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One meaning, and the members of each protocol that have it, with spaces between them. Of one
    in an object both names are told.
    """

    means: str
    field: str = ""
    """The member of Chat Completions that other protocols' are copied to as they are."""
    chat: str = ""
    completions: str = ""
    responses: str = ""
    messages: str = ""
    ollama: str = ""

    def of(self, protocol: Protocol) -> list[str]:
        named: str = getattr(self, protocol)
        return named.split()


def _everywhere(means: str, name: str, **others: str) -> Row:
    """One that OpenAI's older protocols have by the same name, and that is copied from others."""
    return Row(means=means, field=name, chat=name, completions=name, **others)


def _option(means: str, name: str, **others: str) -> Row:
    return _everywhere(means, name, **{"ollama": f"options.{name}", **others})


ROWS = (
    Row(
        means="the deployment",
        chat="model",
        completions="model",
        responses="model",
        messages="model",
        ollama="model",
    ),
    Row(
        means="what is to be answered or continued",
        chat="messages",
        completions="prompt",
        responses="input",
        messages="messages",
        ollama="messages prompt",
    ),
    Row(
        means="instructions before all else",
        responses="instructions",
        messages="system",
        ollama="system",
    ),
    Row(means="an earlier answer that is continued", responses="previous_response_id"),
    Row(means="what comes after the answer", completions="suffix", ollama="suffix"),
    Row(means="the prompt is continued as it is", ollama="raw"),
    _everywhere("a stream", "stream", responses="stream", messages="stream", ollama="stream"),
    Row(means="what a stream tells of usage", chat="stream_options", completions="stream_options"),
    Row(
        means="the most tokens of the answer",
        field="max_tokens",
        chat="max_completion_tokens max_tokens",
        completions="max_tokens",
        responses="max_output_tokens",
        messages="max_tokens",
        ollama="options.num_predict",
    ),
    _everywhere("the least", "min_tokens"),
    _option("temperature", "temperature", responses="temperature", messages="temperature"),
    _option("nucleus", "top_p", responses="top_p", messages="top_p"),
    _option("the likeliest tokens alone", "top_k", messages="top_k"),
    _option("the least share of the likeliest one's probability", "min_p"),
    _option("the seed", "seed"),
    _option("presence penalty", "presence_penalty"),
    _option("frequency penalty", "frequency_penalty"),
    _option("repetition penalty", "repetition_penalty", ollama="options.repeat_penalty"),
    _everywhere("added to logits", "logit_bias"),
    _option("texts that end the answer", "stop", messages="stop_sequences"),
    _everywhere("tokens that end it", "stop_token_ids"),
    _everywhere("the model's own ends do not", "ignore_eos"),
    Row(means="so many answers", chat="n", completions="n"),
    Row(means="the likeliest of so many", completions="best_of"),
    Row(means="the prompt is told, too", chat="echo", completions="echo"),
    Row(
        means="log-probabilities",
        chat="logprobs",
        completions="logprobs",
        responses="include",
        ollama="logprobs",
    ),
    Row(
        means="those of so many likeliest tokens",
        field="top_logprobs",
        chat="top_logprobs",
        responses="top_logprobs",
        ollama="top_logprobs",
    ),
    _everywhere("those of the prompt's tokens", "prompt_logprobs"),
    Row(
        means="a format that the answer keeps to",
        chat="response_format structured_outputs",
        completions="response_format structured_outputs",
        responses="text",
        messages="output_config",
        ollama="format",
    ),
    Row(means="tools", chat="tools", responses="tools", messages="tools", ollama="tools"),
    Row(
        means="which of them",
        chat="tool_choice",
        responses="tool_choice",
        messages="tool_choice",
    ),
    Row(
        means="several calls at a time",
        chat="parallel_tool_calls",
        responses="parallel_tool_calls",
    ),
    Row(
        means="whether the model thinks aloud",
        chat="chat_template_kwargs",
        responses="reasoning",
        messages="thinking",
        ollama="think",
    ),
    _everywhere("who shares what is cached", "cache_salt"),
    _everywhere("the SLO class", "service_tier", responses="service_tier"),
    Row(means="the answer is kept", responses="store"),
    Row(means="it is made in the background", responses="background"),
    Row(means="comes back with it", responses="metadata"),
)


def copied(body: Any, protocol: Protocol) -> dict[str, Any]:
    """What a body of a protocol says in words of its own, by the members of Chat Completions."""
    return {field: _at(body, path) for field, path in _copied(protocol)}


@cache
def _copied(protocol: Protocol) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The members of Chat Completions, and where each is in a body of the protocol."""
    return tuple(
        (row.field, tuple(names[0].split(".")))
        for row in ROWS
        if row.field and (names := row.of(protocol))
    )


def _at(body: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        body = None if body is None else getattr(body, name)
    return body
