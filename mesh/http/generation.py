"""One endpoint for the paths of all protocols that generate, with a reader and a writer for each.

The status waits for the first token, so that a refusal is one. Before: the routes. After: the
gateway is asked, and what it yields is written as a stream or whole.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from starlette.requests import Request

from mesh.domain.deployment import Deployment
from mesh.domain.errors import InvalidInput
from mesh.domain.invocation import (
    Accepted,
    ChatPrompt,
    Finished,
    Invocation,
    Tokens,
    Waiting,
    check_complete,
)
from mesh.domain.text import ToolFormat
from mesh.domain.values import replace
from mesh.http.answers import AnswerTo, UsageTold, Writer
from mesh.http.asking import (
    answers_of,
    grammar_member,
    invocations,
    logprobs_of,
    with_defaults,
    with_slo,
    with_tools,
)
from mesh.http.bodies import Body, ChatBody
from mesh.http.exchange import Apart, Bodies, Endpoint, Exchange
from mesh.http.together import Gateway, Numbered, together
from mesh.http.tools import offers_tools, requires_call
from mesh.text.answer_reader import NOTHING_ELSE, Reading
from mesh.text.grammars import after_thought

NewWriter = Callable[[AnswerTo], Writer]


class OfAnyTask(partial[Writer]):
    """Makes the writer of a call that a deployment of any task answers."""

    of_any_task = True


Read = Callable[[bytes], tuple[Body, NewWriter | Apart]]
"""Reads the bytes of a call, and says who writes its answers, or that it is made apart."""


class Generation(Endpoint):
    """Computes answers. `tells_stops`: they name the stop string that they end at."""

    def __init__(
        self, gateway: Gateway, read: Read, bodies: Bodies, *, tells_stops: bool = False
    ) -> None:
        self._gateway = gateway
        self._bodies = bodies
        self._read = read
        self._tells_stops = tells_stops

    async def answer(self, exchange: Exchange, request: Request) -> None:
        async with exchange.body(self._bodies) as raw:
            body, writer = self._read(raw)
        asked = with_slo(invocations(body), exchange.header)
        deployment = self._gateway.deployment(asked[0].deployment)
        exchange.context_tokens = deployment.context_tokens_max
        defaults = await self._gateway.sampling_defaults(deployment)
        asked = tuple(with_defaults(one, defaults) for one in asked)
        if isinstance(writer, OfAnyTask | Apart) and writer.of_any_task:
            asked = tuple(replace(one, task=deployment.spec.task) for one in asked)
        bytes_of, reading = None, NOTHING_ELSE
        told = (asked[0].logprobs, asked[0].prompt_logprobs)
        if told != (None, None) or (self._tells_stops and asked[0].stop):
            bytes_of = await self._gateway.token_bytes(deployment)
        try:
            if isinstance(body, ChatBody):
                reading, chat = await self._reading(deployment, body, asked[0])
                asked = tuple(replace(chat, seed=one.seed) for one in asked)
            if isinstance(writer, Apart):
                self._gateway.check(asked[0])
                await writer.answer(exchange, self._reads, request.scope, raw)
                return
            made, shown = answers_of(body)
            to = AnswerTo(
                asked=replace(asked[0], logprobs=logprobs_of(body)),
                answers=made,
                answers_shown=shown,
                usage=_usage_told(body),
                bytes_of=bytes_of,
                reading=reading,
            )

            def write() -> Writer:
                return writer(replace(to, id_=exchange.request_id, slo_class=exchange.slo_class))

            with exchange.watched(self._gateway.left):
                gateway, named, headers = self._gateway, exchange.named, exchange.headers
                async with together(gateway, asked, named, headers, made) as events:
                    if body.stream:
                        await self._stream(write, events, exchange)
                    else:
                        await self._whole(write, asked, events, exchange)
        except InvalidInput as error:
            if error.field == "grammar":
                error.field = grammar_member(body)
            raise

    def _reads(self, read: Read) -> "Generation":
        return Generation(self._gateway, read, self._bodies)

    async def _reading(
        self, deployment: Deployment, body: ChatBody, asked: Invocation
    ) -> tuple[Reading, Invocation]:
        """What the answer may hold beside words, and the invocation of one that does."""
        assert isinstance(asked.prompt, ChatPrompt)
        thinking = await self._gateway.thinking(deployment, asked.prompt.template_kwargs)
        form = ToolFormat.NONE
        if offers_tools(body.tools, body.tool_choice):
            form = await self._gateway.tool_format(deployment)
            by_tokens = await self._gateway.calls_by_tokens(deployment)
            asked = with_tools(asked, body, form, by_tokens=by_tokens)
        if thinking is not None and asked.grammar is not None:
            await self._gateway.check_grammar(asked.grammar)  # as it was asked for
            asked = replace(asked, grammar=after_thought(asked.grammar, thinking))
        alone = form is not ToolFormat.NONE and requires_call(body.tool_choice)
        return Reading(thinking, form, calls_alone=alone), asked

    async def _stream(
        self, write: Callable[[], Writer], events: Numbered, exchange: Exchange
    ) -> None:
        writer: Writer | None = None
        opened: set[int] = set()
        ends: dict[int, Finished] = {}
        async for number, event in events:
            match event:
                case Accepted():
                    exchange.accepted(event)
                    writer = writer or write()
                    writer.accepted(number, event)
                    continue
                case Waiting() | Tokens(token_ids=()):
                    continue
            assert writer is not None, "an answer is accepted first"
            chunk = b"" if number in opened else writer.opening(number)
            opened.add(number)
            match event:
                case Tokens():
                    chunk += writer.piece(number, event)
                case Finished():
                    check_complete(event)
                    ends[number] = event
                    chunk += writer.ending(number, event)
            if not exchange.begun:
                await exchange.stream(chunk, kind=writer.stream_type, failing=writer.failing)
            elif chunk:
                await exchange.write(chunk)
        assert writer is not None, "an answer has at least one event"
        await exchange.end(writer.closing([ends[number] for number in sorted(ends)]))

    async def _whole(
        self,
        write: Callable[[], Writer],
        asked: Sequence[Invocation],
        events: Numbered,
        exchange: Exchange,
    ) -> None:
        parts: list[list[Tokens]] = [[] for _ in asked]
        ends: dict[int, Finished] = {}
        async for number, event in events:
            match event:
                case Accepted():
                    exchange.accepted(event)
                case Tokens():
                    parts[number].append(event)
                case Finished():
                    check_complete(event)
                    ends[number] = event
        whole = partial(write().whole, parts, [ends[number] for number in range(len(asked))])
        # The log-probabilities of prompts may take seconds to write.
        aside = asked[0].prompt_logprobs is not None
        await exchange.json(await asyncio.to_thread(whole) if aside else whole())


def _usage_told(body: Body) -> UsageTold:
    """As vLLM has it: what each chunk tells is an addition to what the last one does."""
    options = body.stream_options
    if options is None or not options.include_usage:
        return UsageTold.NEVER
    return UsageTold.EACH if options.continuous_usage_stats else UsageTold.LAST
