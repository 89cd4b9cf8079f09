"""Tensors of the Open Inference Protocol: both forms hold the same; no bytes do more than err."""

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.errors import InvalidInput
from mesh.v1 import open_inference_pb2 as pb
from mesh.wire.codec_infer import INPUTS, inference_from_wire
from mesh.wire.tensors import raw_element, read_inputs

FIELDS = {
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
}


def one(datatype: str, shape: list[int], **contents: Any) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest()
    held = pb.InferTensorContents(**contents) if contents else None
    request.inputs.add(name="x", datatype=datatype, shape=shape, contents=held)
    return request


def read(request: pb.ModelInferRequest, datatype: str) -> list[Any]:
    return read_inputs(request, {"x": (datatype,)}, several="x")["x"]


@pytest.mark.parametrize("datatype", FIELDS)
@given(data=st.data())
def test_integers_raw_and_typed_are_the_same(datatype: str, data: st.DataObject) -> None:
    limits = np.iinfo(datatype.lower())
    values = data.draw(st.lists(st.integers(int(limits.min), int(limits.max)), max_size=8))
    raw = one(datatype, [len(values)])
    raw.raw_input_contents.append(np.array(values, dtype=datatype.lower()).tobytes())
    typed = one(datatype, [len(values)], **{FIELDS[datatype]: values})
    assert read(raw, datatype) == read(typed, datatype) == values


@given(values=st.lists(st.floats(allow_nan=False), max_size=8))
def test_numbers_raw_and_typed_are_the_same(values: list[float]) -> None:
    raw = one("FP64", [len(values)])
    raw.raw_input_contents.append(np.array(values, dtype="float64").tobytes())
    assert read(raw, "FP64") == read(one("FP64", [len(values)], fp64_contents=values), "FP64")


@given(values=st.lists(st.text(st.characters(codec="utf-8")), max_size=8))
def test_texts_raw_and_typed_are_the_same(values: list[str]) -> None:
    raw = one("BYTES", [len(values)])
    raw.raw_input_contents.append(b"".join(map(raw_element, values)))
    typed = one("BYTES", [len(values)], bytes_contents=[value.encode() for value in values])
    assert read(raw, "BYTES") == read(typed, "BYTES") == values


@given(
    raw=st.binary(max_size=40),
    name=st.sampled_from(sorted(INPUTS)),
    data=st.data(),
    count=st.integers(-1, 3),
)
def test_no_raw_bytes_do_more_than_err(
    raw: bytes, name: str, data: st.DataObject, count: int
) -> None:
    request = pb.ModelInferRequest(model_name="chat", raw_input_contents=[raw_element("hi"), raw])
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    datatype = data.draw(st.sampled_from(INPUTS[name]))
    request.inputs.add(name=name, datatype=datatype, shape=[count])
    with suppress(InvalidInput):
        assert inference_from_wire(request).raw
