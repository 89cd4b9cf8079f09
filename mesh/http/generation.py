"""`/v1/completions` and `/v1/chat/completions`: one endpoint, with two schemas and two writers.

The status waits for the first token, so that a refusal is one. Before: the routes. After: the
gateway is asked, and what it yields is written as a stream or whole.
"""

from collections.abc import Sequence

from starlette.types import Receive, Scope, Send

from mesh.domain.errors import InvalidInput
from mesh.domain.invocation import Finished, Tokens, check_complete
from mesh.http.answers import DONE, Writer
from mesh.http.asking import grammar_member, invocations, with_defaults, with_slo
from mesh.http.bodies import Body, read
from mesh.http.exchange import Bodies, Exchange
from mesh.http.logprobs import TokenBytes
from mesh.http.together import Gateway, Numbered, together


class Generation:
    """An ASGI application."""

    def __init__(
        self, gateway: Gateway, body: type[Body], writer: type[Writer], bodies: Bodies
    ) -> None:
        self._gateway = gateway
        self._bodies = bodies
        self._body = body
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._bodies)
        async with exchange.answering():
            async with exchange.body() as raw:
                body = read(self._body, raw)
            asked = with_slo(invocations(body), exchange.header)
            deployment = self._gateway.deployment(asked[0].deployment)
            exchange.context_tokens = deployment.context_tokens_max
            defaults = await self._gateway.sampling_defaults(deployment)
            asked = tuple(with_defaults(one, defaults) for one in asked)
            bytes_of = None
            if asked[0].logprobs is not None:
                bytes_of = await self._gateway.token_bytes(deployment)
            try:
                async with (
                    exchange.watched(),
                    together(self._gateway, asked, exchange.named) as events,
                ):
                    if body.stream:
                        await self._stream(body, bytes_of, events, exchange)
                    else:
                        await self._whole(body, bytes_of, len(asked), events, exchange)
            except InvalidInput as error:
                if error.field == "grammar":
                    error.field = grammar_member(body)
                raise

    async def _stream(
        self, body: Body, bytes_of: TokenBytes | None, events: Numbered, exchange: Exchange
    ) -> None:
        with_usage = bool(body.stream_options and body.stream_options.include_usage)
        writer: Writer | None = None
        opened: set[int] = set()
        ends: list[Finished] = []
        async for number, event in events:
            writer = writer or self._writer(
                exchange.request_id, body.model, with_usage=with_usage, bytes_of=bytes_of
            )
            match event:
                case Tokens(token_ids=(_, *_)):
                    chunk = writer.piece(number, event)
                case Finished():
                    check_complete(event)
                    ends.append(event)
                    chunk = writer.ending(number, event)
                case _:
                    continue
            if number not in opened:
                opened.add(number)
                chunk = writer.opening(number) + chunk
            if not exchange.begun:
                await exchange.stream(chunk)
            elif chunk:
                await exchange.write(chunk)
        usage = writer.usage(ends) if writer and with_usage else b""
        await exchange.end(usage + DONE)

    async def _whole(
        self,
        body: Body,
        bytes_of: TokenBytes | None,
        answers: int,
        events: Numbered,
        exchange: Exchange,
    ) -> None:
        parts: list[list[Tokens]] = [[] for _ in range(answers)]
        ends: dict[int, Finished] = {}
        async for number, event in events:
            match event:
                case Tokens():
                    parts[number].append(event)
                case Finished():
                    check_complete(event)
                    ends[number] = event
        writer = self._writer(exchange.request_id, body.model, with_usage=True, bytes_of=bytes_of)
        whole = [_joined(one) for one in parts]
        await exchange.json(writer.whole(whole, [ends[number] for number in range(answers)]))


def _joined(parts: Sequence[Tokens]) -> Tokens:
    return Tokens(
        first_index=0,
        token_ids=tuple(token for part in parts for token in part.token_ids),
        text="".join(part.text for part in parts),
        logprobs=tuple(told for part in parts for told in part.logprobs),
    )
