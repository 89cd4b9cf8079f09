"""How calls end whose stream ends: each is told, with what the core decides by."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from mesh.domain.access import ANYONE
from mesh.domain.errors import StandsBy
from mesh.domain.front import AskCell, CellEnded, CellTold, DropCall
from mesh.domain.ids import CellName, DeploymentName, RequestId
from mesh.domain.invocation import Finished, Invocation, TokenPrompt, Tokens
from mesh.domain.reasons import FinishReason
from mesh.domain.request import Request
from mesh.front.calls import FrontCalls
from mesh.v1 import inference_pb2 as pb
from mesh.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from mesh.wire.channel import bind, dial
from mesh.wire.codec import event_to_wire
from mesh.wire.serving import Guard

CELL = CellName("a")
NAME = DeploymentName("chat")
WAIT_S_MAX = 20.0
Handler = Callable[[AsyncIterator[pb.CallOrder], Any], Awaitable[None]]


class Front:
    """The calls of a front to one controller, and what the core is told of them."""

    def __init__(self, address: str) -> None:
        self.posted: list[CellTold | CellEnded] = []
        self.hurried = 0
        self.channel = dial(address)
        self.link = SimpleNamespace(leader=address, channel=lambda: self.channel, hurry=self.hurry)
        asked = Invocation(deployment=NAME, prompt=TokenPrompt(token_ids=(1,)))
        gateway = SimpleNamespace(asked=lambda _: asked, payer=lambda _: ANYONE)
        self.calls = FrontCalls(
            {CELL: cast(Any, self.link)},
            gateway=cast(Any, gateway),
            request=lambda r: Request(request_id=r, deployment=NAME, prompt_tokens=(1, 2)),
            post=self.posted.append,
        )

    def hurry(self) -> None:
        self.hurried += 1

    def ask(self, *attempts: int) -> None:
        for n in attempts:
            self.calls.ask(AskCell(cell=CELL, request_id=RequestId(f"r{n}"), attempt=n))

    async def until(self, count: int) -> list[CellTold | CellEnded]:
        async with asyncio.timeout(WAIT_S_MAX):
            while len(self.posted) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return self.posted


@asynccontextmanager
async def before(handler: Handler | None, guard: Guard | None = None) -> AsyncIterator[Front]:
    """A front before a controller that answers a stream so; None: it knows no such streams."""
    server = grpc.aio.server(interceptors=[guard] if guard is not None else [])
    if handler is not None:
        service = type("Service", (InferenceServicer,), {"Invoke": None, "InvokeMany": None})()
        cast(Any, service).InvokeMany = handler
        add_InferenceServicer_to_server(service, server)
    address = bind(server, "127.0.0.1:0")
    await server.start()
    front = Front(address)
    try:
        yield front
    finally:
        front.calls.close()
        await server.stop(None)
        await front.channel.close(None)


async def test_what_is_told_together_goes_to_each_call_and_its_end_is_its_own() -> None:
    orders: list[pb.CallOrder] = []

    async def answer(requests: AsyncIterator[pb.CallOrder], context: Any) -> None:
        await context.send_initial_metadata(())
        async for order in requests:
            orders.append(order)
            if order.call == 3 and order.HasField("invoke"):
                break
        token = event_to_wire(Tokens(first_index=0, token_ids=(5,), text="x"))
        last = Finished(
            reason=FinishReason.LENGTH, prompt_tokens=2, output_tokens=1, ttft_s=0.0, tpot_s=0.0
        )
        said = {"mesh-error": b"NotFound", "mesh-hint-bin": "für".encode()}
        told = (
            pb.CallTold(call=1, response=token),
            pb.CallTold(call=2, status=pb.CallStatus(details="there is none", metadata=said)),
            pb.CallTold(call=1, response=event_to_wire(last)),
            pb.CallTold(call=3, response=pb.InvokeResponse()),
            pb.CallTold(call=9, response=token),
        )
        await context.write(pb.CallsTold(calls=told))
        async for order in requests:
            orders.append(order)  # noqa: PERF401

    async with before(answer) as front:
        front.ask(1, 2, 3)
        front.calls.drop(DropCall(request_id=RequestId("r9"), attempt=9))
        token, failed, malformed, last = await front.until(4)
        assert isinstance(token, CellTold)
        assert (token.request_id, token.attempt) == ("r1", 1)
        assert isinstance(failed, CellEnded)
        assert (failed.error, failed.message, failed.hint) == ("NotFound", "there is none", "für")
        assert isinstance(last, CellTold)
        assert isinstance(malformed, CellEnded)
        assert (malformed.attempt, malformed.error) == (3, "InvalidInput")
        front.ask(4)
        front.calls.drop(DropCall(request_id=RequestId("r4"), attempt=4))
        front.calls.drop(DropCall(request_id=RequestId("r1"), attempt=1))  # it has ended
        async with asyncio.timeout(WAIT_S_MAX):
            while len(orders) < 6:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert [(o.call, o.HasField("invoke")) for o in orders] == [
            *((1, True), (2, True), (3, True)),
            *((3, False), (4, True), (4, False)),
        ]
        assert len(front.posted) == 4


async def test_a_controller_that_stands_by_is_known_as_such() -> None:
    guard = Guard()
    guard.instead = lambda known: StandsBy("this controller stands by")

    async def unasked(requests: AsyncIterator[pb.CallOrder], context: Any) -> None:
        raise AssertionError

    async with before(unasked, guard) as front:
        front.ask(1, 2)
        found = await front.until(2)
        assert [(e.error, e.lost) for e in found if isinstance(e, CellEnded)] == [
            *[("StandsBy", False)] * 2
        ]


async def test_a_controller_of_an_earlier_version_is_said_to_be_one() -> None:
    async with before(None) as front:
        front.ask(1)
        (ended,) = await front.until(1)
        assert isinstance(ended, CellEnded)
        assert (ended.error, ended.lost) == ("Unavailable", False)
        assert ended.hint == "update the controllers of cells before fronts"


async def test_calls_whose_stream_breaks_are_lost_and_another_stream_is_made() -> None:
    streams = 0

    async def leave(requests: AsyncIterator[pb.CallOrder], context: Any) -> None:
        nonlocal streams
        streams += 1
        await context.send_initial_metadata(())
        async for order in requests:
            if order.call % 2 == 0:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "reset")

    async with before(leave) as front:
        front.ask(1, 2)
        await front.until(2)
        front.ask(4)
        found = await front.until(3)
        assert [(e.lost, e.taken) for e in found if isinstance(e, CellEnded)] == [(True, True)] * 3
        assert (streams, front.hurried) == (2, 3)


async def test_a_call_that_nobody_took_is_not_lost_as_one_that_somebody_has() -> None:
    async with before(None) as front:
        front.link.leader = ""
        front.ask(1)
    gone = Front("127.0.0.1:1")
    gone.ask(1)
    for found in (*front.posted, *await gone.until(1)):
        assert isinstance(found, CellEnded)
        assert (found.lost, found.taken) == (True, False)
    gone.calls.close()
    await gone.channel.close(None)


async def test_calls_that_wait_to_be_sent_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.front.calls.CALLS_MAX", 2)

    async def hang(requests: AsyncIterator[pb.CallOrder], context: Any) -> None:
        await asyncio.Event().wait()

    async with before(hang) as front:
        front.ask(1, 2)
        assert not front.posted
        front.ask(3)
        found = await front.until(3)
        assert all(isinstance(one, CellEnded) and one.lost for one in found)
