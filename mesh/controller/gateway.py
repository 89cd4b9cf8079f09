"""The gateway: a client's call becomes a request, and what the core says of it becomes the answer.

On the way in: read, check, tokenise, draw a seed, post InvokeRequested. On the way out: tokens as
they come, then the times. A client that goes away, lets its deadline pass or reads too slowly
becomes CancelRequested, so that its place is free within an iteration.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from mesh.controller.invocation_checks import check_invocation, check_token_ids, sampling_of
from mesh.controller.lookup import no_deployment
from mesh.controller.stream import ClientStream, Told
from mesh.controller.tokenizers import Tokenizers, chars_of
from mesh.domain.actions import DeliverTokens, RefuseRequest, TellAccepted, TellWaiting
from mesh.domain.deployment import Deployment
from mesh.domain.errors import Cancelled, Refused
from mesh.domain.events import CancelRequested, ControllerEvent, InvokeRequested
from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.invocation import Invocation, Prompt, TokenPrompt
from mesh.domain.reasons import RefusalReason
from mesh.domain.request import Request
from mesh.domain.views import CellSnapshot
from mesh.runtime.clock import Clock
from mesh.v1 import inference_pb2 as pb
from mesh.v1.inference_pb2_grpc import InferenceServicer
from mesh.wire.codec_invoke import invocation_from_wire

CHARS_PER_TOKEN_MAX = 256
"""No vocabulary has longer tokens, but for runs of blanks."""


class Cell(Protocol):
    """What the gateway asks the core."""

    def deployment(self, name: DeploymentName) -> Deployment | None: ...

    def snapshot(self, now_s: float) -> CellSnapshot: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits:
    calls_max: int = 8192
    """Open at one time, those that are still being tokenised included."""
    told_max: int = 1024
    """Messages that may wait for one client to read; then it is cancelled as too slow."""


class Gateway(InferenceServicer):
    """The Inference service, and the Clients port of the performer. Request ids are r<epoch>-<n>:
    the epoch keeps them apart from those that a node still holds from before a restart.
    """

    def __init__(
        self,
        *,
        cell: Cell,
        post: Callable[[ControllerEvent], None],
        clock: Clock,
        tokenizers: Tokenizers,
        rng: random.Random,
        epoch: int,
        limits: GatewayLimits,
    ) -> None:
        self._cell = cell
        self._post = post
        self._clock = clock
        self._tokenizers = tokenizers
        self._rng = rng
        self._epoch = epoch
        self._limits = limits
        self._calls = 0
        self._requests = 0
        self._streams: dict[RequestId, ClientStream] = {}
        self._writers: dict[RequestId, asyncio.Task[Any]] = {}
        self._stopping = False

    def stop(self) -> None:
        """Take no further calls."""
        self._stopping = True

    async def Invoke(  # type: ignore[override]  # noqa: N802
        self, request: pb.InvokeRequest, context: Any
    ) -> None:
        arrived_s = self._clock.now_s()
        self._check_open()
        self._calls += 1
        try:
            await self._relay(await self._stream(invocation_from_wire(request), arrived_s), context)
        finally:
            self._calls -= 1

    def accepted(self, told: TellAccepted) -> None:
        self._tell(told.request_id, told)

    def waiting(self, told: TellWaiting) -> None:
        self._tell(told.request_id, told)

    def deliver(self, tokens: DeliverTokens) -> None:
        self._tell(tokens.outputs.request_id, tokens)

    def refuse(self, refusal: RefuseRequest) -> None:
        self._tell(refusal.request_id, refusal)

    def _tell(self, request_id: RequestId, told: Told) -> None:
        stream = self._streams.get(request_id)
        if stream is not None and not stream.tell(told, self._clock.now_s()):
            self._drop(stream)

    def _drop(self, stream: ClientStream) -> None:
        """The client reads too slowly: free its place, and wake the handler that waits for it."""
        request_id = stream.request.request_id
        del self._streams[request_id]
        self._writers[request_id].cancel()
        if not stream.ended:
            stream.ended = True
            self._post(CancelRequested(request_id=request_id))

    def _check_open(self) -> None:
        if self._stopping:
            raise Refused("the controller is stopping", reason=RefusalReason.SHUTTING_DOWN)
        if self._calls >= self._limits.calls_max:
            raise Refused(
                f"{self._calls} invocations are open, which is the limit",
                reason=RefusalReason.QUEUE_FULL,
                retry_after_s=1.0,
            )

    async def _stream(self, asked: Invocation, arrived_s: float) -> ClientStream:
        """Everything before the request is posted. Raises NotFound, InvalidInput, Refused."""
        deployment = self._cell.deployment(asked.deployment)
        if deployment is None:
            raise no_deployment(asked.deployment, self._cell.snapshot(arrived_s))
        check_invocation(asked)
        prompt_tokens = await self._tokens(asked.prompt, deployment)
        room_tokens = deployment.context_tokens_max - len(prompt_tokens)
        if self._stopping:  # it was tokenised meanwhile, and the core has said its last
            raise Refused("the controller is stopping", reason=RefusalReason.SHUTTING_DOWN)
        self._requests += 1
        request = Request(
            request_id=RequestId(f"r{self._epoch}-{self._requests}"),
            deployment=asked.deployment,
            prompt_tokens=prompt_tokens,
            sampling=sampling_of(asked, room_tokens=room_tokens, rng=self._rng),
        )
        return ClientStream(
            request=request,
            slo=deployment.spec.slo,
            arrived_s=arrived_s,
            told_max=self._limits.told_max,
        )

    async def _tokens(self, prompt: Prompt, deployment: Deployment) -> tuple[int, ...]:
        """The prompt's tokens. One that cannot fit is refused before it is tokenised; one that
        does not fit, by the core.
        """
        if isinstance(prompt, TokenPrompt):
            check_token_ids(prompt.token_ids, deployment.model.vocabulary_tokens)
            return prompt.token_ids
        chars, context_tokens = chars_of(prompt), deployment.context_tokens_max
        if chars > context_tokens * CHARS_PER_TOKEN_MAX:
            raise Refused(
                f"the prompt has {chars} characters; the context of {deployment.spec.name!r} holds "
                f"{context_tokens} tokens, of at most {CHARS_PER_TOKEN_MAX} characters each",
                reason=RefusalReason.PROMPT_TOO_LONG,
            )
        return await self._tokenizers.tokens(deployment.model.model_id, prompt)

    async def _relay(self, stream: ClientStream, context: Any) -> None:
        """Post the request and write what comes of it, to its end or the client's."""
        request_id = stream.request.request_id
        self._streams[request_id] = stream
        writer = self._writers[request_id] = running_task()
        try:
            self._post(InvokeRequested(request=stream.request))
            await self._write(stream, context)
        except asyncio.CancelledError:
            if request_id in self._streams or context.done():
                raise
            writer.uncancel()
            raise Cancelled(
                f"{request_id} was cancelled: {self._limits.told_max} messages wait to be read, "
                "which is the limit",
                hint="read the answer as it comes",
            ) from None
        finally:
            self._streams.pop(request_id, None)
            del self._writers[request_id]
            if not stream.ended:
                self._post(CancelRequested(request_id=request_id))

    async def _write(self, stream: ClientStream, context: Any) -> None:
        while not stream.finished:
            for message in await stream.responses():
                await context.write(message)


def running_task() -> "asyncio.Task[Any]":
    """The task that this runs in; grpc runs every handler in one of its own."""
    task = asyncio.current_task()
    assert task is not None
    return task
