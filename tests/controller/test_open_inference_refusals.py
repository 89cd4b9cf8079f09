"""Bad input by the Open Inference Protocol: each is named, and the cell serves on."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc

from mesh.domain.model import Task
from mesh.v1 import open_inference_pb2 as pb
from mesh.wire.channel import dial
from tests.controller.live import EMBEDS, SPEC, LiveCell
from tests.controller.tensors import request_of, status_of, tensor, text_of, told

SERVICE = "/inference.GRPCInferenceService"


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
        (
            *("text_input", "BYTES", [1], {"bytes_contents": [b"x"], "int_contents": [1]}),
            "has int_contents beside bytes_contents",
        ),
        ("max_tokens", "INT8", [1], {"int_contents": [300]}, "holds what is no INT8"),
        ("max_tokens", "UINT8", [1], {"uint_contents": [1 << 31]}, "holds what is no UINT8"),
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


async def test_unknown_models_and_versions_are_not_found(cell: LiveCell, stub: Any) -> None:
    await cell.deployed()
    other, later = request_of(), request_of()
    other.model_name, later.model_version = "chta", "2"
    for asked, said in ((other, "no deployment 'chta'"), (later, "serves revision 1, not '2'")):
        code, details = await status_of(stub.ModelInfer(asked))
        assert (code, said in details) == (grpc.StatusCode.NOT_FOUND, True)


async def test_what_computes_no_text_is_not_ready_and_says_what_it_has(
    cell: LiveCell, stub: Any
) -> None:
    await cell.node(embeds=True)
    await cell.ask(cell.client.deploy, replace(SPEC, name=EMBEDS, task=Task.EMBED))
    assert not (await stub.ModelReady(pb.ModelReadyRequest(name=EMBEDS))).ready
    asked = request_of()
    asked.model_name = EMBEDS
    said = "'embeds' has task embed; asked for was text"
    for call in (stub.ModelMetadata(pb.ModelMetadataRequest(name=EMBEDS)), stub.ModelInfer(asked)):
        assert await status_of(call) == (grpc.StatusCode.INVALID_ARGUMENT, said)


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
