"""From a body of OpenAI's protocol to invocations: what its members mean, and which are refused.

Before: `bodies` has read it. After: the gateway, which checks the numbers as it does for everyone.
A member that would change the answer, and is not built, is refused by its name; what has no effect
is ignored.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mesh.domain.checks import CONTEXT_TOKENS_MAX
from mesh.domain.errors import InvalidInput
from mesh.domain.grammar import Grammar, GrammarKind
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import (
    ChatPrompt,
    FillPrompt,
    Invocation,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from mesh.domain.request import TokenBias
from mesh.domain.text import ChatMessage, SamplingDefaults, ToolFormat
from mesh.domain.values import replace
from mesh.http import tools
from mesh.http.bodies import Body, ChatBody, CompletionBody, Message, TextPart
from mesh.http.tools import Strict, calls_of, check_tools, requires_call
from mesh.text.grammars import ANY_OBJECT, choice_grammar, json_grammar
from mesh.wire.own_slo import with_own_slo

PROMPTS_MAX = 16
"""The most prompts of one call."""
ANSWERS_MAX = 128
"""The most answers of one call, as with OpenAI."""
NOT_BUILT: Mapping[str, tuple[object, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "priority": (0,),
    "include_reasoning": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "container": (),
    "context": ([],),
    "images": ([],),
    "mcp_servers": ([],),
    "conversation": (),
    "moderation": (),
    "truncation": ("disabled",),
}
"""Members that are refused, unless they ask for nothing: null, or one of these values."""
_SEEDS = 1 << 63
_OPENAI = SamplingDefaults(temperature=1.0, top_p=1.0)


def answers_of(body: Body) -> tuple[int, int]:
    """How many answers each prompt of the body gets, and how many of them are told. Raises
    InvalidInput.
    """
    told = 1 if body.n is None else body.n
    made = body.best_of if isinstance(body, CompletionBody) and body.best_of is not None else told
    for name, count, least in (("n", told, 1), ("best_of", made, told)):
        if not least <= count <= ANSWERS_MAX:
            said = f"{name} is {count}; it must be {least} to {ANSWERS_MAX}"
            raise InvalidInput(said, field=name)
    if made > told and body.stream:
        raise InvalidInput(
            "best_of: the best answers are known at their end", hint="send no stream: true"
        )
    return made, told


def invocations(body: Body) -> tuple[Invocation, ...]:
    """One for each answer to a prompt of the body, those of a prompt after each other. With a seed
    each is drawn with the one that follows that of the answer before it. Raises InvalidInput.
    """
    check_built(body)
    made, told = answers_of(body)
    logprobs = logprobs_of(body)
    asked = Invocation(
        deployment=DeploymentName(body.model),
        prompt=TextPrompt(text=""),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=0 if body.top_k == -1 else body.top_k,
        seed=_seed(body.seed),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=_logit_bias(body.logit_bias or {}),
        max_tokens=_max_tokens(body),
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        logprobs=0 if made > told and logprobs is None else logprobs,
        prompt_logprobs=_prompt_logprobs(body),
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        grammar=_grammar(body),
        cache_salt=body.cache_salt or "",
        slo_class=body.service_tier or "",
    )
    if asked.top_p == 0 and (asked.temperature or 0) >= 0:
        asked = replace(asked, temperature=0.0, top_p=1.0)  # the likeliest token alone is left
    prompts = _prompts(body)
    if made * len(prompts) > ANSWERS_MAX:
        raise InvalidInput(
            f"{len(prompts)} prompts with {made} answers each; {ANSWERS_MAX} answers are the limit",
            field="n",
        )
    first = [replace(asked, prompt=prompt) for prompt in prompts]
    return tuple(one for asked in first for one in (asked, *_further(asked, made)))


def _further(asked: Invocation, made: int) -> Iterator[Invocation]:
    for number in range(1, made):
        seed = asked.seed
        yield replace(asked, seed=None if seed is None else (seed + number) % _SEEDS)


def with_defaults(asked: Invocation, model: SamplingDefaults) -> Invocation:
    """What is not given is as the model's makers recommend, else as OpenAI's protocol says."""
    given: dict[str, float | int | None] = {}
    for field in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        values = (getattr(asked, field), getattr(model, field), getattr(_OPENAI, field))
        given[field] = next((value for value in values if value is not None), None)
    return replace(asked, **given)  # type: ignore[arg-type]


def with_slo(
    asked: tuple[Invocation, ...], header: Callable[[bytes], bytes | None]
) -> tuple[Invocation, ...]:
    """Those of a call that brings an SLO class or its own limits. Raises InvalidInput."""
    return tuple(with_own_slo(one, lambda name: header(name.encode())) for one in asked)


def with_tools(
    asked: Invocation, body: ChatBody, form: ToolFormat, *, by_tokens: bool
) -> Invocation:
    """One of a call that offers tools, to a model that calls them so. Raises InvalidInput."""
    several = body.parallel_tool_calls is not False
    return tools.with_tools(
        asked, body.tools or (), body.tool_choice, form, several=several, by_tokens=by_tokens
    )


def grammar_member(body: Body) -> str:
    """Which of its members the grammar is of."""
    if isinstance(body, ChatBody) and requires_call(body.tool_choice):
        return "tools"
    return "response_format" if body.structured_outputs is None else "structured_outputs"


def _grammar(body: Body) -> Grammar | None:
    said, wanted = body.structured_outputs, body.response_format
    given = [wanted is not None and wanted.type != "text"]
    if said is not None:
        given += [
            value is not None for value in (said.json_, said.regex, said.choice, said.grammar)
        ]
        if not any(given):
            raise InvalidInput(
                "structured_outputs names nothing",
                hint="give one of json, regex, choice or grammar",
                field="structured_outputs",
            )
    if sum(given) > 1:
        raise InvalidInput("an answer can keep to one grammar alone", field=grammar_member(body))
    if said is not None:
        if said.json_ is not None:
            return json_grammar(said.json_)
        if said.regex is not None:
            return Grammar(kind=GrammarKind.REGEX, text=said.regex)
        if said.choice is not None:
            return choice_grammar(said.choice, "structured_outputs.choice")
        return Grammar(kind=GrammarKind.LARK, text=said.grammar or "")
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return ANY_OBJECT
    if wanted.json_schema is None:
        raise InvalidInput("response_format lacks json_schema", field="response_format.json_schema")
    return json_grammar(wanted.json_schema.schema_, strict=bool(wanted.json_schema.strict))


def check_built(body: Strict) -> None:
    """Raises InvalidInput for a member that would change the answer, and is not built."""
    members = vars(body)
    for field, nothing in NOT_BUILT.items():
        value = members.get(field)
        if value is not None and value not in nothing:
            raise InvalidInput(f"{field} is not supported here", hint="leave it out", field=field)


def logprobs_of(body: Body) -> int | None:
    """For how many of the likeliest tokens, beside the one that was drawn, log-probabilities are
    asked for; `None` when not even for that one.
    """
    match body:
        case CompletionBody():
            return body.logprobs
        case ChatBody(logprobs=True):
            return body.top_logprobs or 0
        case ChatBody(top_logprobs=int(top)) if top:
            raise InvalidInput(
                f"top_logprobs is {top}, and logprobs is not true",
                hint="send logprobs: true, too",
                field="top_logprobs",
            )
    return None


def _prompt_logprobs(body: Body) -> int | None:
    """The same for the tokens of the prompt; they are told whole alone. Raises InvalidInput."""
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidInput(
            "prompt_logprobs are not streamed", hint="send no stream: true", field="prompt_logprobs"
        )
    if isinstance(body, CompletionBody) and body.echo:
        return max(body.logprobs or 0, body.prompt_logprobs or 0)
    return body.prompt_logprobs


def _logit_bias(given: Mapping[str, float]) -> tuple[TokenBias, ...]:
    """Raises InvalidInput."""
    wrong = next((key for key in given if not key.isascii() or not key.isdecimal()), None)
    if wrong is not None:
        raise InvalidInput(f"logit_bias has {wrong!r}, which is no token's id", field="logit_bias")
    return tuple(TokenBias(token_id=int(key), bias=bias) for key, bias in given.items())


def _max_tokens(body: Body) -> int:
    """The gateway takes off what the context does not hold."""
    given = body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        given = body.max_completion_tokens
    if isinstance(body, CompletionBody) and body.echo and given == 0:
        return 1  # it is computed, and not told
    return CONTEXT_TOKENS_MAX if given is None else given


def _seed(given: int | None) -> int | None:
    """Nodes know seeds of 63 bits: a negative one of 64 bits stands for one of those."""
    return given if given is None or not -_SEEDS <= given < 0 else given + _SEEDS


def _prompts(body: Body) -> Sequence[Prompt]:
    match body:
        case ChatBody():
            check_tools(body.tools, body.tool_choice)
            return (chat_prompt(body.messages, body.chat_template_kwargs),)
        case CompletionBody():
            return _filled(body) if body.suffix else _continued(body.prompt)
        case _:
            raise TypeError(type(body))


def chat_prompt(messages: Sequence[Message], kwargs: Mapping[str, Any] | None) -> ChatPrompt:
    """A conversation; `kwargs` are those of the chat template."""
    told = json.dumps(kwargs) if kwargs else ""
    return ChatPrompt(messages=tuple(map(_message, messages)), template_kwargs=told)


def _continued(given: str | list[str] | list[int] | list[list[int]]) -> Sequence[Prompt]:
    prompts = prompts_of(given)
    if not 1 <= len(prompts) <= PROMPTS_MAX:
        raise InvalidInput(
            f"prompt holds {len(prompts)} prompts; it must hold 1 to {PROMPTS_MAX}", field="prompt"
        )
    return prompts


def prompts_of(given: str | list[str] | list[int] | list[list[int]]) -> list[Prompt]:
    several: list[Any] = [given] if isinstance(given, str) else given
    if several and isinstance(several[0], int):
        several = [several]
    return [
        TextPrompt(text=one) if isinstance(one, str) else TokenPrompt(token_ids=tuple(one))
        for one in several
    ]


def _filled(body: CompletionBody) -> Sequence[Prompt]:
    if not isinstance(body.prompt, str) or body.echo:
        wrong = "echo" if body.echo else "suffix"
        raise InvalidInput(
            f"{wrong}: what comes before a suffix is one text, which is not echoed", field=wrong
        )
    return [FillPrompt(prefix=body.prompt, suffix=body.suffix or "")]


def _message(message: Message) -> ChatMessage:
    content, calls = message.content, message.tool_calls
    if isinstance(content, list):
        parts = (part.text if isinstance(part, TextPart) else part.refusal for part in content)
        content = "".join(parts)
    return ChatMessage(
        role="system" if message.role == "developer" else message.role,
        content=content or message.refusal or "",
        name=message.name or "",
        tool_calls=calls_of(calls) if calls else "",
        tool_call_id=message.tool_call_id or "",
        reasoning_content=message.reasoning_content or message.reasoning or "",
    )
