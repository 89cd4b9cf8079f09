"""A model's chat template: Jinja, in a sandbox, with the functions that templates rely on.

The environment is that of Hugging Face transformers (`apply_chat_template`), so that a template
written for it renders the same here.
"""

import datetime
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mesh.domain.errors import InvalidInput, UnsupportedModel
from mesh.domain.text import ChatMessage, TextAssets
from mesh.text.tool_calls import with_objects


class _Generation(Extension):
    """`{% generation %}`, with which training marks the assistant's words: here, its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Raises UnsupportedModel when the template cannot be compiled."""

    def __init__(self, template: str, assets: TextAssets) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(template)
        except Exception as error:
            # Jinja's own errors, and those of Python, to which it compiles.
            line = f" at line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            raise UnsupportedModel(
                f"the model's chat template cannot be compiled: {error}{line}",
                hint="send a plain prompt, or mend the template and deploy the model again",
            ) from error
        self._tokens = {"bos_token": assets.bos_token or "", "eos_token": assets.eos_token or ""}
        self._further: dict[str, Any] = json.loads(assets.special_tokens or "{}")
        """Special tokens of other names, which those of a call go before."""

    def render(
        self, messages: Sequence[ChatMessage], template_kwargs: str = "", tools: str = ""
    ) -> str:
        """The prompt up to where the assistant answers. `template_kwargs`, `tools`: see ChatPrompt.
        Raises InvalidInput when it refuses.
        """
        turns = [_turn(message) for message in messages]
        if not turns:
            raise InvalidInput("a conversation needs at least one message")
        own = {"messages": turns, "add_generation_prompt": True, "tools": None, **self._tokens}
        if tools:
            own["tools"] = _listed(tools, "tools")
        names = _names(template_kwargs)
        if taken := sorted(own.keys() & names.keys()):
            raise _wrong_kwargs(f"name {taken[0]}, which mesh gives the template itself")
        told = {**self._further, **names, **own}
        try:
            try:
                return self._template.render(told)
            except Exception:
                objects = [_with_objects(turn) for turn in turns]
                for otherwise in (objects, _one_by_one(objects)):
                    if otherwise != turns:
                        with suppress(Exception):
                            return self._template.render({**told, "messages": otherwise})
                raise
        except InvalidInput:
            raise
        except Exception as error:
            # A template is a program of the model's author; any failure is about these messages.
            raise InvalidInput(
                f"the chat template fails on these messages: {error}", field="messages"
            ) from error


def _names(template_kwargs: str) -> dict[str, Any]:
    try:
        names = json.loads(template_kwargs or "{}")
    except (ValueError, RecursionError) as error:
        raise _wrong_kwargs(f"are no JSON: {error}") from error
    if not isinstance(names, dict):
        raise _wrong_kwargs("are no JSON object")
    return names


def _wrong_kwargs(why: str) -> InvalidInput:
    return InvalidInput(f"chat_template_kwargs {why}", field="chat_template_kwargs")


def _turn(message: ChatMessage) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        turn["name"] = message.name
    if message.tool_calls:
        turn["tool_calls"] = _listed(message.tool_calls, "tool_calls")
    if message.reasoning_content:
        turn["reasoning_content"] = message.reasoning_content
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _with_objects(turn: dict[str, Any]) -> dict[str, Any]:
    """Without text as the arguments of a call, on which many templates fail."""
    calls = turn.get("tool_calls")
    return {**turn, "tool_calls": with_objects(calls)} if calls else turn


def _one_by_one(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each call in a turn of its own, with its results after it: templates of models that are to
    make one at a time insist on that, and the models answer with several all the same.
    """
    found, rest = list[dict[str, Any]](), list(turns)
    while rest:
        turn = rest.pop(0)
        calls = turn.get("tool_calls") or ()
        if len(calls) < 2:
            found.append(turn)
            continue
        end = next((n for n, one in enumerate(rest) if one["role"] != "tool"), len(rest))
        results, rest = rest[:end], rest[end:]
        numbers = {call.get("id"): number for number, call in enumerate(calls)}
        # Results that name no call are those of the calls in their order.
        last = len(calls) - 1
        of = [numbers.get(one.get("tool_call_id"), min(n, last)) for n, one in enumerate(results)]
        for number, call in enumerate(calls):
            said = turn if number == 0 else {"role": turn["role"], "content": ""}
            found.append({**said, "tool_calls": [call]})
            found += [one for n, one in zip(of, results, strict=True) if n == number]
    return found


def _listed(text: str, field: str) -> list[Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{field} is no JSON: {error}", field=field) from error
    if not isinstance(value, list):
        raise InvalidInput(f"{field} is no JSON list", field=field)
    return value


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, where Jinja's own filter would escape it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise InvalidInput(f"the chat template refuses these messages: {message}", field="messages")


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
