"""The Open Inference Protocol, spoken to a live controller: what is there, and whole answers."""

import json
import struct
from dataclasses import replace
from typing import Any

import grpc
import pytest

from mesh import __version__
from mesh.domain.messages import SubmitRequest
from mesh.v1 import open_inference_pb2 as pb
from tests.controller.live import SPEC, LiveCell
from tests.controller.tensors import request_of, status_of, tensor, text_of, told


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
    assert told(answer) == {
        "request_id": dict(await call.initial_metadata())["x-request-id"],
        "triton_final_response": True,
        "finish_reason": "length",
        "prompt_tokens": 2,
        "cached_prompt_tokens": 0,
        "output_tokens": 4,
    }


def by_parameters() -> pb.ModelInferRequest:
    return request_of(temperature=0.5, top_p="0.9", seed=7, top_k=-1, stop="z", ignore_eos=True)


def by_json() -> pb.ModelInferRequest:
    """It goes before parameters, which Triton's own sample sends as well, but for what is null."""
    given = {"temperature": "0.5", "top_p": 0.9, "seed": 7, "top_k": -1, "stop": ["z"]}
    nothing = {"min_p": None, "stream": None, "max_tokens": None}
    text = json.dumps({**given, **nothing, "ignore_eos": True})
    asked = request_of(temperature="0.1", max_tokens="4", min_p=0.0)
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


async def test_a_revision_is_a_version(cell: LiveCell, stub: Any) -> None:
    await cell.deployed()
    changed = replace(SPEC, slo=replace(SPEC.slo, ttft_s=9.0))
    assert (await cell.ask(cell.client.deploy, changed)).message == "revision 2 serves"
    assert (await stub.ModelInfer(request_of())).model_version == "2"
    model = await stub.ModelMetadata(pb.ModelMetadataRequest(name="chat", version="2"))
    assert list(model.versions) == ["2"]
