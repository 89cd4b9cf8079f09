"""Requests of the Open Inference Protocol, and what their answers say."""

import struct
from typing import Any

import grpc
import pytest

from mesh.v1 import open_inference_pb2 as pb


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
