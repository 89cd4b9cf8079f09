"""Streams of the Open Inference Protocol: pieces, many requests, refusals, and every end."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from mesh.controller.gateway import GatewayLimits
from mesh.controller.open_inference import STREAM_REQUESTS_MAX
from mesh.domain.messages import AbortRequest, SubmitRequest
from mesh.v1 import open_inference_pb2 as pb
from mesh.v1.open_inference_pb2_grpc import GRPCInferenceServiceStub
from mesh.wire.channel import dial
from mesh.wire.errors import REASON_KEY, RETRY_AFTER_KEY
from mesh.wire.serving import ABORT_S_MAX
from tests.controller.live import WAIT_S_MAX, LiveCell, live_cell, output_of
from tests.controller.tensors import request_of, text_of, told, trailing


async def test_pieces_come_when_computed_and_the_last_says_so(cell: LiveCell, stub: Any) -> None:
    node = await cell.deployed(held=True)
    stream = stub.ModelStreamInfer()
    await stream.write(request_of(stream=True))
    order = (await node.told(SubmitRequest)).order
    for index in range(2):
        await node.answer(order, index, 1, last=False)
        piece = (await stream.read()).infer_response
        assert (text_of(piece), piece.id) == ("a", "7")
        assert told(piece) == {
            "request_id": order.request.request_id,
            "triton_final_response": False,
        }
    await node.answer(order, 2, 2, last=True)
    pieces: list[pb.ModelInferResponse] = []
    while not pieces or not told(pieces[-1])["triton_final_response"]:
        pieces.append((await stream.read()).infer_response)
    assert "".join(map(text_of, pieces)) == "aa"
    assert told(pieces[-1])["output_tokens"] == 4
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF  # type: ignore[attr-defined]


async def test_requests_of_one_stream_are_answered_side_by_side(cell: LiveCell, stub: Any) -> None:
    """Whole answers and pieces, each by the id of its request."""
    await cell.deployed()

    async def requests() -> AsyncIterator[pb.ModelInferRequest]:
        for number in range(2 * STREAM_REQUESTS_MAX):
            asked = request_of(stream=number % 2 == 0)
            asked.id = str(number)
            yield asked

    texts: dict[str, list[str]] = {}
    async for answer in stub.ModelStreamInfer(requests()):
        assert not answer.error_message
        texts.setdefault(answer.infer_response.id, []).append(text_of(answer.infer_response))
    assert len(texts) == 2 * STREAM_REQUESTS_MAX
    assert {"".join(parts) for parts in texts.values()} == {"aaaa"}
    assert all(len(parts) == 1 for number, parts in texts.items() if int(number) % 2)


async def test_a_refusal_is_a_status_or_a_message_with_its_reason(tmp_path: Path) -> None:
    async with live_cell(tmp_path, gateway=GatewayLimits(calls_max=1)) as cell:
        node = await cell.deployed(held=True)
        async with dial(cell.address) as channel:
            stub: Any = GRPCInferenceServiceStub(channel)
            stream = stub.ModelStreamInfer()
            await stream.write(request_of())
            order = (await node.told(SubmitRequest)).order
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ModelInfer(request_of())
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            metadata = trailing(refused.value)
            second = request_of()
            second.id = "8"
            await stream.write(second)
            failed = await stream.read()
            assert failed.error_message.startswith("1 invocations are open, which is the limit")
            assert failed.infer_response.id == "8"
            for key in (REASON_KEY, RETRY_AFTER_KEY):
                assert told(failed.infer_response)[key] == metadata[key]
            await node.answer(order, 0, 4, last=True)
            assert text_of((await stream.read()).infer_response) == "aaaa"


async def test_an_operator_cancels_one_request_of_a_stream(cell: LiveCell, stub: Any) -> None:
    node = await cell.deployed(held=True)
    stream = stub.ModelStreamInfer()
    await stream.write(request_of(stream=True, max_tokens=400))
    order = (await node.told(SubmitRequest)).order
    # It is being written to, by more than is read.
    for index in range(20):
        await node.send(output_of(order, index, "x" * 100_000))
    await asyncio.sleep(0.2)
    await cell.ask(cell.client.cancel, order.request.request_id)
    while not (failed := await stream.read()).error_message:
        assert text_of(failed.infer_response)
    assert "was cancelled by an operator" in failed.error_message
    node.held = False
    await stream.write(request_of())
    assert text_of((await stream.read()).infer_response) == "aaaa"


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
async def test_who_leaves_frees_its_places(cell: LiveCell, stub: Any, method: str) -> None:
    node = await cell.deployed(held=True)
    if method == "ModelInfer":
        call = stub.ModelInfer(request_of())
    else:
        call = stub.ModelStreamInfer()
        await call.write(request_of(stream=True))
        await call.write(request_of())
        await cell.until(lambda: len(cell.client.requests()) == 2)
    await node.told(SubmitRequest)
    call.cancel()
    await node.told(AbortRequest)
    await cell.idle()


async def test_a_stream_that_is_not_read_ends(tmp_path: Path) -> None:
    async with live_cell(tmp_path, gateway=GatewayLimits(told_max=8)) as cell:
        node = await cell.deployed(held=True)
        narrow = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
        async with grpc.aio.insecure_channel(cell.address, options=narrow) as channel:
            stub: Any = GRPCInferenceServiceStub(channel)
            stream = stub.ModelStreamInfer()
            await stream.write(request_of(stream=True, max_tokens=400))
            order = (await node.told(SubmitRequest)).order
            await node.flood(order, "x" * 10_000)
            await asyncio.sleep(ABORT_S_MAX + 0.5)
            with pytest.raises(grpc.aio.AioRpcError, match="the stream is not read"):
                async for _ in stream:
                    pass
        await cell.idle()


@pytest.mark.own_cell
async def test_a_stopping_controller_tells_those_who_wait(cell: LiveCell, stub: Any) -> None:
    node = await cell.deployed(held=True)
    stream = stub.ModelStreamInfer()
    await stream.write(request_of())
    await node.told(SubmitRequest)
    cell.stop.set()
    assert "stopping" in (await stream.read()).error_message
    await asyncio.wait_for(cell.serving, WAIT_S_MAX)
