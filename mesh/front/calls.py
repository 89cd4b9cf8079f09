"""The calls of a front to its cells: what the core asks for, made by gRPC, and what comes of it.

A call goes out with its prompt's tokens, its seed and a key, so that whichever cell is asked again
goes on alike; it is made for the client's tenant. Before: the core's performer. After: the cells.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import cast

import grpc

from mesh.controller.gateway import Gateway
from mesh.domain.errors import InvalidInput, MeshError, Refused
from mesh.domain.front import AskCell, CellEnded, CellTold, DropCall
from mesh.domain.ids import CellName, RequestId
from mesh.domain.invocation import Finished, Resume, TokenPrompt
from mesh.domain.request import Request
from mesh.domain.values import replace
from mesh.front.cells import CellLink, explained
from mesh.v1.inference_pb2_grpc import InferenceStub
from mesh.wire.access import said_for
from mesh.wire.codec import event_from_wire, invocation_to_wire
from mesh.wire.credentials import credentials
from mesh.wire.errors import EndedCall, is_told
from mesh.wire.resuming import UNCONNECTED

logger = logging.getLogger(__name__)

_BROKEN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)
"""How gRPC says that a stream is no more, where the other end has not."""


class FrontCalls:
    """The CellCalls port. `request` knows the open requests."""

    def __init__(
        self,
        links: Mapping[CellName, CellLink],
        *,
        gateway: Gateway,
        request: Callable[[RequestId], Request | None],
        post: Callable[[CellTold | CellEnded], None],
    ) -> None:
        self._links = links
        self._gateway = gateway
        self._request = request
        self._post = post
        self._tasks: dict[tuple[RequestId, int], asyncio.Task[None]] = {}
        """The open calls, by their requests and attempts."""

    def ask(self, asked: AskCell) -> None:
        of = asked.request_id, asked.attempt
        self._tasks[of] = task = asyncio.create_task(self._call(asked))
        task.add_done_callback(lambda done: self._done(asked, done))

    def drop(self, dropped: DropCall) -> None:
        task = self._tasks.get((dropped.request_id, dropped.attempt))
        if task is not None:
            task.cancel()

    def _done(self, asked: AskCell, task: "asyncio.Task[None]") -> None:
        self._tasks.pop((asked.request_id, asked.attempt))
        if not task.cancelled() and (fault := task.exception()) is not None:
            logger.error("a call to %s failed", asked.cell, exc_info=fault)
            self._post(_ended(asked, MeshError(f"unexpected {type(fault).__name__}: {fault}")))

    async def _call(self, ask: AskCell) -> None:
        link, attempt = self._links[ask.cell], ask.attempt
        asked, request = self._gateway.asked(ask.request_id), self._request(ask.request_id)
        if asked is None or request is None:
            return  # its client has gone
        count = len(ask.output_tokens)
        resume = Resume(next_index=count, output_tokens=ask.output_tokens, age_s=ask.age_s)
        message = invocation_to_wire(
            replace(
                asked,
                prompt=TokenPrompt(token_ids=request.prompt_tokens),
                seed=request.sampling.seed,
                key=asked.key or ask.request_id,
                resume=resume if ask.resumes else None,
            )
        )
        shown = said_for(self._gateway.payer(ask.request_id), vouched=ask.vouched)
        error: grpc.aio.AioRpcError | None = None
        finished, call = False, None
        try:
            if link.leader:
                stub = InferenceStub(link.channel())
                call = stub.Invoke(message, metadata=(*credentials().metadata, shown))
                async for response in call:
                    told = event_from_wire(response)
                    finished = isinstance(told, Finished)
                    self._post(CellTold(request_id=ask.request_id, attempt=attempt, told=told))
        except grpc.aio.AioRpcError as raised:
            error = raised
        except InvalidInput as raised:
            self._post(_ended(ask, raised))
            return
        finally:
            if call is not None:
                call.cancel()
        if finished:
            return
        ended = _of_error(ask, error)
        if ended.lost:
            link.hurry()
        self._post(ended)


def _of_error(ask: AskCell, error: grpc.aio.AioRpcError | None) -> CellEnded:
    """What the core is told of a call that has ended before its answer did."""
    if error is None or (not is_told(cast(EndedCall, error)) and error.code() in _BROKEN):
        details = "nobody leads it" if error is None else error.details() or ""
        return CellEnded(
            request_id=ask.request_id,
            attempt=ask.attempt,
            error="Unavailable",
            message=f"the cell {ask.cell} went away: {details}",
            lost=True,
            taken=error is not None and UNCONNECTED not in details,
        )
    return _ended(ask, explained(ask.cell, error))


def _ended(ask: AskCell, error: MeshError) -> CellEnded:
    refused = error if isinstance(error, Refused) else None
    return CellEnded(
        request_id=ask.request_id,
        attempt=ask.attempt,
        error=type(error).__name__,
        message=error.message,
        hint=error.hint,
        reason=None if refused is None else refused.reason,
        retry_after_s=0.0 if refused is None else refused.retry_after_s,
    )
