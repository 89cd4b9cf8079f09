"""Many calls on one stream: each ends as one of its own would, and none is in another's way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from mesh.controller.gateway import GatewayLimits
from mesh.controller.inference import WRITE_BYTES_MAX, _Many, _OneOfMany
from mesh.domain.errors import Cancelled, InvalidInput, MeshError, NotFound, Refused
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import Accepted, Finished, Invocation, Tokens
from mesh.domain.messages import AbortRequest, SubmitRequest
from mesh.domain.reasons import RefusalReason
from mesh.front.calls import _Ended
from mesh.v1 import inference_pb2 as pb
from mesh.v1.inference_pb2_grpc import InferenceStub
from mesh.wire.channel import dial
from mesh.wire.codec import event_from_wire, event_to_wire, invocation_to_wire
from mesh.wire.errors import EndedCall, error_of
from tests.controller.live import WAIT_S_MAX, LiveCell, asking, live_cell


class Many:
    """A stream of calls, and what has been told of each."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.told: dict[int, list[Any]] = {}
        self.messages = 0

    async def ask(self, number: int, asked: Invocation | None = None, made_for: str = "") -> None:
        message = invocation_to_wire(asked or asking())
        await self.call.write(pb.CallOrder(call=number, invoke=message, made_for=made_for))

    async def cancel(self, number: int) -> None:
        await self.call.write(pb.CallOrder(call=number))

    async def read(self) -> bool:
        """One message, or the end, which is told by False. Raises an end with an error."""
        try:
            async with asyncio.timeout(WAIT_S_MAX):
                message = await self.call.read()
        except grpc.aio.AioRpcError as error:
            raise error_of(cast(EndedCall, error)) from error
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]
            return False
        self.messages += 1
        for one in message.calls:
            failed = one.HasField("status")
            event = error_of(_Ended(one.status)) if failed else event_from_wire(one.response)
            self.told.setdefault(one.call, []).append(event)
        return True

    async def until(self, number: int, kind: type) -> Any:
        """The first event of a kind of a call."""
        while not (found := [e for e in self.told.get(number, ()) if isinstance(e, kind)]):
            assert await self.read()
        return found[0]

    async def rest(self) -> None:
        await self.call.done_writing()
        while await self.read():
            pass


@asynccontextmanager
async def many(cell: LiveCell, **metadata: str) -> AsyncIterator[Many]:
    async with dial(cell.address) as channel:
        invoke: Any = InferenceStub(channel).InvokeMany
        call = invoke(metadata=tuple(metadata.items()))
        yield Many(call)
        call.cancel()


def text_of(events: list[Any]) -> str:
    return "".join(event.text for event in events if isinstance(event, Tokens))


@pytest.mark.own_cell
async def test_each_call_of_a_stream_is_told_as_one_of_its_own(cell: LiveCell) -> None:
    await cell.deployed()
    async with many(cell) as stream:
        for number in (1, 2, 3):
            await stream.ask(number, asking(max_tokens=10 * number))
        await stream.ask(4, replace(asking(), deployment=DeploymentName("chatt")))
        await stream.ask(5, asking(max_tokens=0))
        await stream.rest()
        for number in (1, 2, 3):
            events = stream.told[number]
            assert isinstance(events[-1], Finished)
            assert text_of(events) == "a" * 10 * number
            assert sum(isinstance(event, Accepted) for event in events) == 1
        (unknown,), (wrong,) = stream.told[4], stream.told[5]
        assert isinstance(unknown, NotFound)
        assert (unknown.message, bool(unknown.hint)) == ("there is no deployment 'chatt'", True)
        assert isinstance(wrong, InvalidInput)
    assert (await cell.status()).served == 3


async def test_what_comes_while_a_message_is_written_is_told_in_the_next() -> None:
    written: list[list[int]] = []
    free = asyncio.Event()

    class Context:
        async def write(self, message: pb.CallsTold) -> None:
            written.append([one.call for one in message.calls])
            await free.wait()

    stream = _Many(Context())
    writing = asyncio.create_task(stream.write())
    one, other, third = (_OneOfMany(stream, pb.CallOrder(call=n)) for n in (1, 2, 9))
    piece, large = (event_to_wire(tokens(text)) for text in ("x", "x" * WRITE_BYTES_MAX))

    async def tell(call: _OneOfMany) -> None:
        for _ in range(3):
            await call.write(piece)

    telling = [asyncio.create_task(tell(call)) for call in (one, other)]
    await asyncio.sleep(0.01)
    telling[0].cancel()  # what waits with it is not
    await third.write(large)
    assert written == [[1, 1, 2, 2]], "the third waits until the first is written"
    free.set()
    await telling[1]
    stream.told.close()
    await writing
    assert written == [[1, 1, 2, 2], [9], [2]]


def tokens(text: str) -> Tokens:
    return Tokens(first_index=0, token_ids=(1,), text=text)


async def test_a_call_that_is_cancelled_leaves_the_stream_to_others(cell: LiveCell) -> None:
    node = await cell.deployed(held=True)
    async with many(cell) as stream:
        await stream.ask(1)
        await stream.until(1, Accepted)
        await node.told(SubmitRequest)
        await stream.cancel(1)
        await stream.cancel(3)  # nobody knows it, which does no harm
        await node.told(AbortRequest)
        node.held = False
        await stream.ask(2)
        assert (await stream.until(2, Finished)).output_tokens == 4
        assert not [event for event in stream.told[1] if isinstance(event, Tokens | MeshError)]


async def test_a_caller_who_leaves_has_left_all_calls(cell: LiveCell) -> None:
    node = await cell.deployed(held=True)
    async with many(cell) as stream:
        await stream.ask(1)
        await stream.until(1, Accepted)
        await node.told(SubmitRequest)
    await node.told(AbortRequest)
    await cell.idle()


async def test_a_caller_who_reads_nothing_has_its_calls_cancelled(tmp_path: Path) -> None:
    """The stream fills, then the bounded mailbox of its call: the place is freed."""
    async with live_cell(tmp_path, gateway=GatewayLimits(told_max=8)) as cell:
        node = await cell.deployed(held=True)
        narrow = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
        async with grpc.aio.insecure_channel(cell.address, options=narrow) as channel:
            invoke: Any = InferenceStub(channel).InvokeMany
            stream = Many(invoke())
            await stream.ask(1)
            order = (await node.told(SubmitRequest)).order
            await node.flood(order, "x" * 10_000)
            told = await stream.until(1, MeshError)
            assert isinstance(told, Cancelled)
            assert "messages wait to be read" in told.message
        await cell.idle()


async def test_a_controller_that_stops_ends_the_calls_and_then_the_stream(tmp_path: Path) -> None:
    async with live_cell(tmp_path) as cell:
        await cell.deployed(held=True)
        async with many(cell) as idle, many(cell) as stream:
            await idle.ask(1, asking(max_tokens=0))
            await idle.until(1, InvalidInput)
            await stream.ask(1)
            await stream.until(1, Accepted)
            cell.stop.set()
            refused = await stream.until(1, Refused)
            assert refused.reason is RefusalReason.SHUTTING_DOWN
            for one in (stream, idle):
                with pytest.raises(Refused) as told:
                    await one.read()
                assert told.value.reason is RefusalReason.SHUTTING_DOWN


async def test_a_number_of_an_open_call_ends_the_stream(cell: LiveCell) -> None:
    await cell.deployed(held=True)
    async with many(cell) as stream:
        await stream.ask(1)
        await stream.until(1, Accepted)
        await stream.ask(1)
        with pytest.raises(InvalidInput, match="call 1 is open"):
            await stream.until(1, Finished)
    await cell.idle()


async def test_calls_that_have_not_ended_are_bounded(
    cell: LiveCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.controller.inference.CALLS_MAX", 2)
    await cell.deployed(held=True)
    async with many(cell) as stream:
        for number in range(3):
            await stream.ask(number)
        with pytest.raises(Refused) as told:
            await stream.until(0, Finished)
        assert told.value.reason is RefusalReason.QUEUE_FULL
    await cell.idle()
