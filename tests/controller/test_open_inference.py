"""The Open Inference Protocol, spoken to a live controller: answers, streams, every bad input."""

import asyncio
import json
import re
import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from mesh import __version__
from mesh.controller.gateway import GatewayLimits
from mesh.controller.open_inference import STREAM_REQUESTS_MAX
from mesh.domain.messages import AbortRequest, SubmitRequest
from mesh.v1 import open_inference_pb2 as pb
from mesh.v1.open_inference_pb2_grpc import GRPCInferenceServiceStub
from mesh.wire.channel import dial
from mesh.wire.errors import REASON_KEY, RETRY_AFTER_KEY
from mesh.wire.serving import ABORT_S_MAX
from tests.controller.live import SPEC, WAIT_S_MAX, LiveCell, live_cell
from tests.controller.test_gateway import output_of

SERVICE = "/inference.GRPCInferenceService"


def request_of(text: str = "hi", raw: bool = False, **parameters: Any) -> pb.ModelInferRequest:
    """`parameters` become the request's own, by the types of their values."""
    asked = pb.ModelInferRequest(model_name="chat", id="7")
    tensor = asked.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    if raw:
        asked.raw_input_contents.append(struct.pack("<I", len(text)) + text.encode())
    else:
        tensor.contents.bytes_contents.append(text.encode())
    for name, value in {"max_tokens": 4, **parameters}.items():
        kinds = {bool: "bool", int: "int64", float: "double", str: "string"}
        setattr(asked.parameters[name], f"{kinds[type(value)]}_param", value)
    return asked


def tensor(
    asked: pb.ModelInferRequest, name: str, datatype: str, shape: list[int], **contents: Any
) -> pb.ModelInferRequest:
    held = pb.InferTensorContents(**contents)
    asked.inputs.add(name=name, datatype=datatype, shape=shape, contents=held)
    return asked


@pytest.fixture
async def stub(cell: LiveCell) -> AsyncIterator[Any]:
    async with dial(cell.address) as channel:
        yield GRPCInferenceServiceStub(channel)


def text_of(answer: pb.ModelInferResponse) -> str:
    (output,) = answer.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("text_output", "BYTES", [1])
    if not answer.raw_output_contents:
        (found,) = output.contents.bytes_contents
        return found.decode()
    (raw,) = answer.raw_output_contents
    assert struct.unpack("<I", raw[:4]) == (len(raw) - 4,)
    return raw[4:].decode()


def told(answer: pb.ModelInferResponse) -> dict[str, Any]:
    found = answer.parameters.items()
    return {name: getattr(one, str(one.WhichOneof("parameter_choice"))) for name, one in found}


def trailing(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    found: Any = error.trailing_metadata() or ()
    return dict(found)


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert "mesh-error" in trailing(caught.value)
    return caught.value.code(), str(caught.value.details())


async def test_what_is_live_ready_and_there_is_told(cell: LiveCell, stub: Any) -> None:
    assert (await stub.ServerLive(pb.ServerLiveRequest())).live
    assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready, "there is no node"
    await cell.deployed()
    assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
    for name, version, ready in (
        *(("chat", "", True), ("chat", "1", True)),
        *(("chat", "2", False), ("chta", "", False)),
    ):
        asked = pb.ModelReadyRequest(name=name, version=version)
        assert (await stub.ModelReady(asked)).ready is ready, "loaded or not"
    server = await stub.ServerMetadata(pb.ServerMetadataRequest())
    assert (server.name, server.version) == ("mesh", __version__)
    model = await stub.ModelMetadata(pb.ModelMetadataRequest(name="chat"))
    assert (model.name, list(model.versions)) == ("chat", ["1"])
    inputs = {one.name: (one.datatype, list(one.shape)) for one in model.inputs}
    assert inputs["text_input"] == ("BYTES", [1])
    assert inputs["stop"] == ("BYTES", [-1])
    assert [(one.name, one.datatype) for one in model.outputs] == [("text_output", "BYTES")]
    missing = await status_of(stub.ModelMetadata(pb.ModelMetadataRequest(name="chta")))
    assert missing == (grpc.StatusCode.NOT_FOUND, "there is no deployment 'chta'")


@pytest.mark.parametrize("raw", [False, True])
async def test_a_whole_answer(cell: LiveCell, stub: Any, raw: bool) -> None:
    """Its tensor is raw where the request's was."""
    await cell.deployed()
    call = stub.ModelInfer(request_of(raw=raw))
    answer = await call
    assert (answer.model_name, answer.model_version, answer.id) == ("chat", "1", "7")
    assert text_of(answer) == "aaaa"
    assert bool(answer.raw_output_contents) is raw
    assert dict(await call.initial_metadata())["x-request-id"] == "r1-1"
    assert told(answer) == {
        "request_id": "r1-1",
        "triton_final_response": True,
        "finish_reason": "length",
        "prompt_tokens": 2,
        "cached_prompt_tokens": 0,
        "output_tokens": 4,
    }


def by_parameters() -> pb.ModelInferRequest:
    return request_of(temperature=0.5, top_p="0.9", seed=7, top_k=-1, stop="z", ignore_eos=True)


def by_json() -> pb.ModelInferRequest:
    """It goes before parameters, which Triton's own sample sends as well."""
    given = {"temperature": "0.5", "top_p": 0.9, "seed": 7, "top_k": -1, "stop": ["z"]}
    text = json.dumps({**given, "max_tokens": 4, "ignore_eos": True, "min_p": None})
    asked = request_of(temperature="0.1", max_tokens="9")
    return tensor(asked, "sampling_parameters", "BYTES", [1], bytes_contents=[text.encode()])


def by_tensors() -> pb.ModelInferRequest:
    asked = request_of(max_tokens=9)
    tensor(asked, "max_tokens", "INT32", [1], int_contents=[4])
    tensor(asked, "temperature", "FP32", [1, 1], fp32_contents=[0.5])
    tensor(asked, "top_p", "FP64", [1], fp64_contents=[0.9])
    tensor(asked, "seed", "UINT64", [1], uint64_contents=[7])
    tensor(asked, "stop", "BYTES", [1], bytes_contents=[b"z"])
    return tensor(asked, "ignore_eos", "BOOL", [1], bool_contents=[True])


def by_raw_tensors() -> pb.ModelInferRequest:
    asked = pb.ModelInferRequest(model_name="chat")
    for name, datatype, raw in (
        ("stop", "BYTES", b"\1\0\0\0z"),
        ("seed", "UINT8", b"\7"),
        ("text_input", "BYTES", b"\2\0\0\0hi"),
        ("max_tokens", "UINT16", struct.pack("<H", 4)),
        ("temperature", "FP32", struct.pack("<f", 0.5)),
        ("top_p", "FP64", struct.pack("<d", 0.9)),
        ("ignore_eos", "BOOL", b"\1"),
        ("exclude_input_in_output", "BOOL", b"\1"),
    ):
        asked.inputs.add(name=name, datatype=datatype, shape=[1])
        asked.raw_input_contents.append(raw)
    return asked


@pytest.mark.parametrize("asked", [by_parameters(), by_json(), by_tensors(), by_raw_tensors()])
async def test_what_governs_an_answer_comes_in_three_ways(
    cell: LiveCell, stub: Any, asked: pb.ModelInferRequest
) -> None:
    node = await cell.deployed()
    await stub.ModelInfer(asked)
    request = (await node.told(SubmitRequest)).order.request
    assert request.prompt_tokens == (71, 72), "as it is, without the chat template"
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (4, 0.5, 0.9)
    assert (sampling.seed, sampling.top_k, sampling.stop) == (7, 0, ("z",))
    assert sampling.ignore_eos


async def test_limits_of_its_own_come_in_metadata(cell: LiveCell, stub: Any) -> None:
    node = await cell.deployed()
    own = (("x-slo-ttft-ms", "60000"), ("x-slo-tpot-ms", "5000.5"))
    await stub.ModelInfer(request_of(), metadata=own)
    order = (await node.told(SubmitRequest)).order
    assert (order.slo.ttft_limit_s(9), order.slo.tpot_s) == (60.0, 5.0005)
    for wrong in ("soon", "-1"):
        metadata = (("x-slo-ttft-ms", wrong),)
        code, _ = await status_of(stub.ModelInfer(request_of(), metadata=metadata))
        assert code is grpc.StatusCode.INVALID_ARGUMENT


def bad() -> Iterator[tuple[pb.ModelInferRequest, str]]:
    nothing = pb.ModelInferRequest(model_name="chat")
    yield nothing, "lacks the input 'text_input'"
    for name, datatype, shape, contents, said in (
        ("prompt", "BYTES", [1], {"bytes_contents": [b"x"]}, "no input 'prompt'"),
        ("text_input", "FP32", [1], {"fp32_contents": [1.0]}, "'FP32'; it must be BYTES"),
        ("text_input", "STRING", [1], {"bytes_contents": [b"x"]}, "'STRING'; it must be BYTES"),
        ("text_input", "BYTES", [2], {"bytes_contents": [b"x", b"y"]}, "one row, no batch"),
        ("text_input", "BYTES", [2, 1], {"bytes_contents": [b"x", b"y"]}, "one row, no batch"),
        ("text_input", "BYTES", [-1, -1], {"bytes_contents": [b"x"]}, "one row, no batch"),
        ("text_input", "BYTES", [], {"bytes_contents": [b"x"]}, "one row, no batch"),
        ("text_input", "BYTES", [1], {"bytes_contents": [b"x", b"y"]}, "has 2 bytes_contents"),
        ("text_input", "BYTES", [1], {"int_contents": [1]}, "has 0 bytes_contents"),
        ("text_input", "BYTES", [1], {"bytes_contents": [b"\xff\xfe"]}, "is no UTF-8"),
        ("text_input", "BYTES", [1], {"bytes_contents": [b""]}, "the prompt is empty"),
    ):
        wrong = pb.ModelInferRequest(model_name="chat")
        yield tensor(wrong, name, datatype, shape, **contents), said
    twice = tensor(request_of(), "text_input", "BYTES", [1], bytes_contents=[b"x"])
    yield twice, "'text_input' is given twice"
    many = tensor(request_of(), "stop", "BYTES", [65], bytes_contents=[b"x"] * 65)
    yield many, r"shape \[65\]; it must be \[0\] to \[64\]"
    yield tensor(request_of(), "stop", "BYTES", [17], bytes_contents=[b"x"] * 17), "17 stop strings"
    for raws, said in (
        ([b"", b""], "2 raw_input_contents for 1 inputs"),
        ([b"\2\0\0\0hi!"], "7 raw bytes, which are not 1 elements"),
        ([b"\xff\xff\xff\xffhi"], "not 1 elements"),
        ([b"\2\0"], "not 1 elements"),
    ):
        wrong = request_of(raw=True)
        wrong.raw_input_contents[:] = raws
        yield wrong, said
    both = request_of()
    both.raw_input_contents.append(b"\2\0\0\0hi")
    yield both, "contents beside raw_input_contents"
    number = request_of(raw=True)
    number.inputs.add(name="max_tokens", datatype="INT32", shape=[1])
    number.raw_input_contents.append(b"\1\0")
    yield number, "has 2 raw bytes; its shape says 4"
    for parameters, said in (
        ({"max_token": 4}, "'max_token' is not known here"),
        ({"max_tokens": "4.5"}, "max_tokens is '4.5'; it must be an integer"),
        ({"max_tokens": True}, "max_tokens is True; it must be an integer"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": "nan"}, "temperature is nan"),
        ({"temperature": "warm"}, "temperature is 'warm'; it must be a number"),
        ({"top_k": 1 << 32}, "top_k is 4294967296"),
        ({"ignore_eos": 1}, "ignore_eos is 1; it must be true or false"),
        ({"stop": 1}, "stop is 1; it must be text"),
        ({"stream": True}, "ModelInfer answers by one message"),
        ({"exclude_input_in_output": False}, "is the answer alone"),
        ({"sequence_id": 1}, "'sequence_id' is not known"),
    ):
        yield request_of(**parameters), said
    for text, said in (
        ("{", "is no valid JSON"),
        ("[" * 100_000, "is no valid JSON"),
        ("[]", "is no JSON object"),
        ('{"n": 2}', "'n' is not known here"),
        ('{"max_tokens": [1]}', r"max_tokens is \[1\]"),
        ('{"temperature": 1%s}' % ("0" * 400), "it must be a number"),
        ('{"stop": "\\ud800"}', "it must be text"),
    ):
        wrong = request_of()
        held = {"bytes_contents": [text.encode()]}
        yield tensor(wrong, "sampling_parameters", "BYTES", [1], **held), said
    output = request_of()
    output.outputs.add(name="logits")
    yield output, "no output 'logits'"
    shared = request_of()
    shared.inputs[0].parameters["shared_memory_region"].string_param = "x"
    yield shared, "parameter 'shared_memory_region'"


async def test_bad_input_is_named_and_the_cell_serves_on(cell: LiveCell, stub: Any) -> None:
    """By a status of ModelInfer, and by the same words in a stream, which goes on."""
    await cell.deployed()
    stream = stub.ModelStreamInfer()
    for asked, said in bad():
        code, details = await status_of(stub.ModelInfer(asked))
        assert code is grpc.StatusCode.INVALID_ARGUMENT, said
        assert re.search(said, details), details
        if asked.parameters["stream"].bool_param:
            continue
        await stream.write(asked)
        failed = await stream.read()
        assert failed.error_message.startswith(details)
        assert failed.infer_response.id == asked.id
        assert told(failed.infer_response)["mesh-error"] == "InvalidInput"
    assert text_of(await stub.ModelInfer(request_of())) == "aaaa"
    await stream.write(request_of())
    assert text_of((await stream.read()).infer_response) == "aaaa"


async def test_models_and_versions_that_are_not_there_are_not_found(
    cell: LiveCell, stub: Any
) -> None:
    await cell.deployed()
    other, later = request_of(), request_of()
    other.model_name, later.model_version = "chta", "2"
    for asked, said in ((other, "no deployment 'chta'"), (later, "serves revision 1, not '2'")):
        code, details = await status_of(stub.ModelInfer(asked))
        assert (code, said in details) == (grpc.StatusCode.NOT_FOUND, True)


async def test_bytes_that_are_no_message_are_invalid_input(cell: LiveCell) -> None:
    await cell.deployed()
    good = request_of().SerializeToString()
    async with dial(cell.address) as channel:
        raw: Any = channel
        for damaged in (b"\x0a\x02\xff\xfe", b"\xff\xff\xff"):
            code, details = await status_of(raw.unary_unary(f"{SERVICE}/ModelInfer")(damaged))
            assert (code, details[:16]) == (grpc.StatusCode.INVALID_ARGUMENT, "no valid message")
            stream = raw.stream_stream(f"{SERVICE}/ModelStreamInfer")(iter([damaged, good]))
            answers = [pb.ModelStreamInferResponse.FromString(one) async for one in stream]
            assert sorted(one.error_message[:16] for one in answers) == ["", "no valid message"]


async def test_pieces_come_as_they_are_computed_and_the_last_says_so(
    cell: LiveCell, stub: Any
) -> None:
    node = await cell.deployed()
    node.held = True
    stream = stub.ModelStreamInfer()
    await stream.write(request_of(stream=True))
    order = (await node.told(SubmitRequest)).order
    for index in range(2):
        await node.answer(order, index, 1, last=False)
        piece = (await stream.read()).infer_response
        assert (text_of(piece), piece.id) == ("a", "7")
        assert told(piece) == {"request_id": "r1-1", "triton_final_response": False}
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
        node = await cell.deployed()
        node.held = True
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
    node = await cell.deployed()
    node.held = True
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
async def test_a_client_that_leaves_frees_its_places(
    cell: LiveCell, stub: Any, method: str
) -> None:
    node = await cell.deployed()
    node.held = True
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
        node = await cell.deployed()
        node.held = True
        narrow = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
        async with grpc.aio.insecure_channel(cell.address, options=narrow) as channel:
            stub: Any = GRPCInferenceServiceStub(channel)
            stream = stub.ModelStreamInfer()
            await stream.write(request_of(stream=True, max_tokens=400))
            order = (await node.told(SubmitRequest)).order
            for index in range(400):
                await node.send(output_of(order, index, "x" * 10_000))
                if any(isinstance(command, AbortRequest) for command in node.commands):
                    break
            await node.told(AbortRequest)
            await asyncio.sleep(ABORT_S_MAX + 0.5)
            with pytest.raises(grpc.aio.AioRpcError, match="the stream is not read"):
                async for _ in stream:
                    pass
        await cell.idle()


async def test_a_stopping_controller_tells_those_who_wait(cell: LiveCell, stub: Any) -> None:
    node = await cell.deployed()
    node.held = True
    stream = stub.ModelStreamInfer()
    await stream.write(request_of())
    await node.told(SubmitRequest)
    cell.stop.set()
    assert "stopping" in (await stream.read()).error_message
    await asyncio.wait_for(cell.serving, WAIT_S_MAX)


async def test_a_revision_is_a_version(cell: LiveCell, stub: Any) -> None:
    await cell.deployed()
    changed = replace(SPEC, slo=replace(SPEC.slo, ttft_s=9.0))
    assert await cell.ask(cell.client.deploy, changed) == "revision 2 serves"
    assert (await stub.ModelInfer(request_of())).model_version == "2"
    model = await stub.ModelMetadata(pb.ModelMetadataRequest(name="chat", version="2"))
    assert list(model.versions) == ["2"]
