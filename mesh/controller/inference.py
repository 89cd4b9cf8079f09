"""The Inference service: calls of the gateway, written as protobuf into gRPC contexts.

A stream of many calls has a task for each, with a context that writes into the stream's. What they
write while a message is on its way goes together in the next one.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from mesh.controller.gateway import Gateway
from mesh.domain.errors import InvalidInput, Refused
from mesh.domain.reasons import RefusalReason
from mesh.v1 import inference_pb2 as pb
from mesh.v1.inference_pb2_grpc import InferenceServicer
from mesh.wire.access import FOR, RPCS, Gate
from mesh.wire.channel import CALLS_MAX
from mesh.wire.codec import event_to_wire, invocation_from_wire
from mesh.wire.mailbox import Mailbox
from mesh.wire.malformed import Malformed
from mesh.wire.serving import admitted, answered
from mesh.wire.unread import bounded

WRITE_BYTES_MAX = 1 << 20
"""The size of a message that tells several calls; what one call is told may be larger."""
_INVOKE = "/mesh.v1.Inference/Invoke"


class Inference(InferenceServicer):
    """Errors of the tree become the call's status in `mesh.wire.serving`. Each call of a stream of
    many passes `gate` as one of its own would.
    """

    def __init__(self, gateway: Gateway, gate: Gate) -> None:
        self._gateway = gateway
        self._invoke = answered(admitted(self.Invoke, _INVOKE, gate, RPCS[_INVOKE]))
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Have streams of many calls end once theirs have, which the core answers now."""
        self._stopping.set()

    async def Invoke(  # type: ignore[override]  # noqa: N802
        self, request: pb.InvokeRequest, context: Any
    ) -> None:
        asked = invocation_from_wire(request)
        async with self._gateway.call(asked, context.invocation_metadata) as call:
            async for event in call:
                await context.write(event_to_wire(event))

    async def InvokeMany(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[pb.CallOrder | Malformed], context: Any
    ) -> None:
        await context.send_initial_metadata(())  # the caller waits for them before it sends calls
        many = _Many(context)
        reading = asyncio.ensure_future(self._read(request_iterator, many))
        writing = asyncio.ensure_future(many.write())
        stopping = asyncio.ensure_future(self._stopping.wait())
        tasks: list[asyncio.Future[Any]] = [reading, writing, stopping]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
            else:
                reading.cancel()
            calls = asyncio.gather(*many.calls.values(), return_exceptions=True)
            tasks.append(calls)
            ends: list[asyncio.Future[Any]] = [calls, writing]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            many.told.close()
            await writing
        finally:
            tasks += many.calls.values()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._stopping.is_set():
            raise Refused("the controller is stopping", reason=RefusalReason.SHUTTING_DOWN)

    async def _read(self, orders: AsyncIterator[pb.CallOrder | Malformed], many: "_Many") -> None:
        """Begin and cancel calls. Raises InvalidInput or Refused for what ends the stream."""
        async for order in orders:
            if isinstance(order, Malformed):
                raise InvalidInput(order.message)
            task = many.calls.get(order.call)
            if not order.HasField("invoke"):
                if task is not None:
                    task.cancel()
                continue
            if task is not None:
                raise InvalidInput(
                    f"call {order.call} is open", hint="give each call a number of its own"
                )
            if many.open >= CALLS_MAX:
                message = f"{CALLS_MAX} calls of the stream have not ended, which is the limit"
                raise Refused(message, reason=RefusalReason.QUEUE_FULL, retry_after_s=1.0)
            many.begin(order.call, self._invoke(order.invoke, _OneOfMany(many, order)))


class _Many:
    """The calls of one stream, and what of them is to be written."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.calls: dict[int, asyncio.Task[None]] = {}
        self.told: Mailbox[pb.CallTold] = Mailbox(2 * CALLS_MAX)
        """Two of each call at most: see `_OneOfMany`."""
        self._written = asyncio.Event()
        """What is in the mailbox has been written."""

    @property
    def open(self) -> int:
        """The calls, and what waits to be written."""
        return len(self.calls) + 2 * CALLS_MAX - self.told.room

    def begin(self, number: int, call: Any) -> None:
        self.calls[number] = task = asyncio.ensure_future(call)
        task.add_done_callback(lambda _: self.calls.pop(number))

    def tell(self, told: pb.CallTold) -> asyncio.Event:
        """What is set once it is written."""
        self.told.put(told)
        return self._written

    async def write(self) -> None:
        while told := await self.told.take():
            written, self._written = self._written, asyncio.Event()
            for some in _by_size(told):
                await self.context.write(pb.CallsTold(calls=some))
            written.set()


class _OneOfMany:
    """The context of one of the calls, in the place of gRPC's."""

    def __init__(self, many: _Many, order: pb.CallOrder) -> None:
        self._many = many
        self._number = order.call
        self._made_for = order.made_for
        self._written = asyncio.Event()
        """Set once what it told last is written."""
        self._written.set()

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        of_stream = tuple(self._many.context.invocation_metadata() or ())
        return (*of_stream, (FOR, self._made_for)) if self._made_for else of_stream

    def auth_context(self) -> Any:
        return self._many.context.auth_context()

    def done(self) -> bool:
        return bool(self._many.context.done())

    async def write(self, response: pb.InvokeResponse) -> None:
        # A message that is too large ends this call, not the stream.
        await self._tell(bounded(pb.CallTold(call=self._number, response=response)))

    async def abort(
        self, code: object, details: str, metadata: Iterable[tuple[str, str | bytes]]
    ) -> None:
        said = {k: v.encode() if isinstance(v, str) else v for k, v in metadata}
        status = pb.CallStatus(details=details, metadata=said)
        await self._tell(pb.CallTold(call=self._number, status=status))

    async def _tell(self, told: pb.CallTold) -> None:
        """Return once what came before it is written: what comes at the same time goes together,
        and the call's next events wait in the gateway, which bounds them.
        """
        before, self._written = self._written, self._many.tell(told)
        await before.wait()


def _by_size(told: Iterable[pb.CallTold]) -> Iterator[list[pb.CallTold]]:
    """In messages of bounded size."""
    some: list[pb.CallTold] = []
    size_bytes = 0
    for one in told:
        one_bytes = one.ByteSize()
        if some and size_bytes + one_bytes > WRITE_BYTES_MAX:
            yield some
            some, size_bytes = [], 0
        some.append(one)
        size_bytes += one_bytes
    yield some
