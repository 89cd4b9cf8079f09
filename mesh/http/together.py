"""The invocations of one call: asked together, their events in one stream, each with its number.

One that fails ends all. Before: `generation`. After: the gateway, which is asked once for each.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

from mesh.domain.deployment import Deployment
from mesh.domain.grammar import Grammar
from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.invocation import Finished, Invocation, InvocationEvent
from mesh.domain.request import Request
from mesh.domain.text import SamplingDefaults, ToolFormat
from mesh.text.thoughts import Thinking

EVENTS_MAX = 64
"""At most so many events of a call with several invocations wait to be written."""


class Call(Protocol):
    """An invocation under way."""

    @property
    def request_id(self) -> RequestId: ...

    @property
    def request(self) -> Request: ...

    def __aiter__(self) -> AsyncIterator[InvocationEvent]: ...


Headers = Callable[[], Iterable[tuple[bytes, bytes]]]


class Gateway(Protocol):
    """What HTTP asks the gateway; everything raises errors of the tree."""

    @property
    def stopping(self) -> bool: ...

    def now_s(self) -> float: ...

    def deployment(self, name: DeploymentName) -> Deployment: ...

    async def sampling_defaults(self, deployment: Deployment) -> SamplingDefaults: ...

    async def tool_format(self, deployment: Deployment) -> ToolFormat: ...

    async def calls_by_tokens(self, deployment: Deployment) -> bool: ...

    async def thinking(self, deployment: Deployment, template_kwargs: str) -> Thinking | None: ...

    async def token_bytes(self, deployment: Deployment) -> Callable[[int], bytes]: ...

    async def tokens(self, asked: Invocation, *, is_part: bool = False) -> tuple[int, ...]: ...

    async def text(self, deployment: Deployment, token_ids: tuple[int, ...]) -> str: ...

    async def check_grammar(self, grammar: Grammar) -> None: ...

    def check(self, asked: Invocation) -> None: ...

    def call(
        self, asked: Invocation, headers: Headers, *, answers: int = 1, first: Any = None
    ) -> AbstractAsyncContextManager[Call]: ...

    def left(self, request_id: RequestId) -> None: ...


Numbered = AsyncIterator[tuple[int, InvocationEvent]]


@asynccontextmanager
async def together(
    gateway: Gateway,
    asked: Sequence[Invocation],
    named: Callable[[RequestId], None],
    headers: Headers,
    answers: int = 1,
) -> AsyncIterator[Numbered]:
    """Events of all, in the order in which they come; `named` is told the requests' ids. Each
    `answers` that follow each other are to one prompt, which is computed once. Leaving the block
    cancels what has not ended.
    """
    if len(asked) == 1:
        async with gateway.call(asked[0], headers) as call:
            named(call.request_id)
            yield ((0, event) async for event in call)
        return
    came: asyncio.Queue[tuple[int, InvocationEvent | Exception]] = asyncio.Queue(EVENTS_MAX)

    firsts = [asyncio.get_running_loop().create_future() for _ in asked[::answers]]

    async def relay(number: int, one: Invocation) -> None:
        of, is_first = firsts[number // answers], number % answers == 0
        try:
            first, wanted = (None, answers) if is_first else (await of, 1)
            async with gateway.call(one, headers, answers=wanted, first=first) as call:
                if is_first:
                    of.set_result(call)
                named(call.request_id)
                async for event in call:
                    await came.put((number, event))
        except Exception as error:
            await came.put((number, error))

    relays = [asyncio.create_task(relay(number, one)) for number, one in enumerate(asked)]
    try:
        yield _until_finished(came, len(asked))
    finally:
        for task in relays:
            task.cancel()
        await asyncio.gather(*relays, return_exceptions=True)


async def _until_finished(
    came: "asyncio.Queue[tuple[int, InvocationEvent | Exception]]", open_: int
) -> Numbered:
    while open_:
        number, event = await came.get()
        if isinstance(event, Exception):
            raise event
        yield number, event
        open_ -= isinstance(event, Finished)
