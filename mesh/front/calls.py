"""The calls of a front to its cells: what the core asks for, made by gRPC, and what comes of it.

All calls to a controller share one stream: the tokens that an iteration gives to several of them
come in one message. A call goes out with its prompt's tokens, its seed and a key, so that whichever
cell is asked again goes on alike; it is made for the client's tenant. Before: the core's performer.
After: the cells.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, cast

import grpc

from mesh.controller.gateway import Gateway
from mesh.domain.errors import InvalidInput, MeshError, Refused, Unavailable
from mesh.domain.front import AskCell, CellEnded, CellTold, DropCall
from mesh.domain.ids import CellName, RequestId
from mesh.domain.invocation import Finished, Resume, TokenPrompt
from mesh.domain.request import Request
from mesh.domain.values import replace
from mesh.front.cells import CellLink, explained
from mesh.v1 import inference_pb2 as pb
from mesh.v1.inference_pb2_grpc import InferenceStub
from mesh.wire.access import said_for
from mesh.wire.channel import CALLS_MAX
from mesh.wire.codec import UNSENDABLE, event_from_wire, invocation_to_wire
from mesh.wire.credentials import credentials
from mesh.wire.errors import EndedCall, is_told
from mesh.wire.leader import UNCONNECTED
from mesh.wire.mailbox import Mailbox
from mesh.wire.unread import bounded

logger = logging.getLogger(__name__)

_BROKEN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)
"""How gRPC says that a stream is no more, where the other end has not."""


class _Ended:
    """How one of the calls of a stream has ended, as gRPC would raise it."""

    def __init__(self, status: pb.CallStatus) -> None:
        self._status = status

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNKNOWN  # its metadata tell more

    def details(self) -> str:
        return self._status.details

    def trailing_metadata(self) -> list[tuple[str, str | bytes]]:
        return [
            (name, raw if name.endswith("-bin") else raw.decode("utf-8", "replace"))
            for name, raw in self._status.metadata.items()
        ]


class _Stream:
    """All calls to one controller. `told` is given what they are told, and `ended` the error with
    which the stream has ended, unless this end has closed it.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        told: Callable[[pb.CallTold], None],
        ended: Callable[["_Stream", Exception | None], None],
    ) -> None:
        invoke_many: Any = InferenceStub(channel).InvokeMany  # the stubs ask for an iterator
        self._call = invoke_many(metadata=credentials().metadata)
        self.orders: Mailbox[pb.CallOrder] = Mailbox(CALLS_MAX)
        self._tasks = [
            asyncio.create_task(self._write()),
            asyncio.create_task(self._read(told, ended)),
        ]

    async def _write(self) -> None:
        try:
            # A stream that is refused is so before anything is sent: gRPC would lose the reason.
            await self._call.initial_metadata()
            while not self._call.done():
                for order in await self.orders.take():
                    await self._call.write(order)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # its reader is told why

    async def _read(
        self,
        told: Callable[[pb.CallTold], None],
        ended: Callable[["_Stream", Exception | None], None],
    ) -> None:
        error: Exception | None = None
        try:
            async for message in self._call:
                for one in message.calls:
                    told(one)
        except grpc.aio.AioRpcError as raised:
            error = raised
        except Exception as fault:
            logger.exception("a stream of calls failed")
            error = fault
        ended(self, error)

    def close(self) -> None:
        """Its calls are cancelled."""
        for task in self._tasks:
            task.cancel()
        self._call.cancel()


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
        self._streams: dict[str, _Stream] = {}
        """By the address of the controller."""
        self._open: dict[int, tuple[AskCell, _Stream]] = {}
        """The open calls, by their attempts, of which no two requests have the same."""

    def ask(self, asked: AskCell) -> None:
        link = self._links[asked.cell]
        if not link.leader:
            self._post(_lost(asked, "nobody leads it", taken=False))
            return
        try:
            order = self._order(asked)
        except UNSENDABLE as error:
            self._post(_ended(asked, InvalidInput(f"the call cannot be sent: {error}")))
            return
        if order is None:
            return  # its client has gone
        stream = self._streams.get(link.leader)
        if stream is None:
            stream = _Stream(link.channel(), self._told, self._broke)
            self._streams[link.leader] = stream
        self._open[asked.attempt] = asked, stream
        self._send(stream, order)

    def drop(self, dropped: DropCall) -> None:
        found = self._open.pop(dropped.attempt, None)
        if found is not None:
            self._send(found[1], pb.CallOrder(call=dropped.attempt))

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()

    def _order(self, ask: AskCell) -> pb.CallOrder | None:
        """The call as it is sent. Raises one of UNSENDABLE."""
        asked, request = self._gateway.asked(ask.request_id), self._request(ask.request_id)
        if asked is None or request is None:
            return None
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
        _, made_for = said_for(self._gateway.payer(ask.request_id), vouched=ask.vouched)
        return bounded(pb.CallOrder(call=ask.attempt, invoke=message, made_for=made_for))

    def _send(self, stream: _Stream, order: pb.CallOrder) -> None:
        if not stream.orders.put(order):
            self._broke(stream, Unavailable(f"{CALLS_MAX} calls wait to be sent, which is most"))

    def _told(self, told: pb.CallTold) -> None:
        ask, stream = self._open.get(told.call, (None, None))
        if ask is None or stream is None:
            return  # it was dropped
        if told.HasField("status"):
            del self._open[told.call]
            self._post(_ended(ask, explained(ask.cell, _Ended(told.status))))
            return
        try:
            event = event_from_wire(told.response)
        except Exception as error:  # the other calls of the stream go on
            told_of = error if isinstance(error, MeshError) else MeshError(f"unexpected {error!r}")
            self.drop(DropCall(request_id=ask.request_id, attempt=ask.attempt))
            self._post(_ended(ask, told_of))
            return
        told_on = CellTold(request_id=ask.request_id, attempt=ask.attempt, told=event)
        if isinstance(event, Finished):
            del self._open[told.call]
            # The client gets the tokens that have come with it first.
            asyncio.get_running_loop().call_soon(self._post, told_on)
        else:
            self._post(told_on)

    def _broke(self, stream: _Stream, error: Exception | None) -> None:
        """End each call of a stream that has ended."""
        stream.close()
        for address in [at for at, one in self._streams.items() if one is stream]:
            del self._streams[address]
        for ask, _ in [found for found in self._open.values() if found[1] is stream]:
            del self._open[ask.attempt]
            ended = _of_error(ask, error)
            if ended.lost:
                self._links[ask.cell].hurry()
            self._post(ended)


def _of_error(ask: AskCell, error: Exception | None) -> CellEnded:
    """What the core is told of a call whose stream has ended before its answer did."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return _lost(ask, str(error or "its stream ended"))
    if not is_told(cast(EndedCall, error)) and error.code() in _BROKEN:
        details = error.details() or ""
        return _lost(ask, details, taken=UNCONNECTED not in details)
    return _ended(ask, explained(ask.cell, error))


def _lost(ask: AskCell, why: str, *, taken: bool = True) -> CellEnded:
    return CellEnded(
        request_id=ask.request_id,
        attempt=ask.attempt,
        error="Unavailable",
        message=f"the cell {ask.cell} went away: {why}",
        lost=True,
        taken=taken,
    )


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
