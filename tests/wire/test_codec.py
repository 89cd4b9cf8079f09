"""The codec loses nothing, and whatever is sent to it, it answers with a value or InvalidInput."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import inf, nan
from typing import Any, get_args

import numpy as np
import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import RequestId
from mesh.domain.invocation import Invocation, InvocationEvent
from mesh.domain.messages import (
    HeldRequest,
    ImportModel,
    InstanceReport,
    NodeCommand,
    NodeHello,
    NodeReport,
    NodeStarting,
    SubmitRequest,
)
from mesh.domain.model import Footprint
from mesh.domain.request import RequestTokens
from mesh.domain.slo import ColdStart, Slo
from mesh.domain.text import TextAssets
from mesh.domain.usage import Usage
from mesh.domain.views import (
    CellEvent,
    CellStatus,
    DeploymentSnapshot,
    MemoryOperationView,
    NodeSnapshot,
    ProfileView,
    RequestSnapshot,
)
from mesh.v1 import control_pb2, inference_pb2, model_pb2, node_link_pb2
from mesh.v1 import open_inference_pb2 as pb
from mesh.wire import codec
from mesh.wire.codec import (
    HELD_BYTES_MAX,
    command_from_wire,
    command_to_wire,
    from_wire,
    report_from_wire,
    report_to_wire,
    to_wire,
    view_from_wire,
)
from mesh.wire.codec_infer import INPUTS, inference_from_wire
from mesh.wire.malformed import Malformed, lenient
from mesh.wire.tensors import raw_element, read_inputs
from tests.wire.strategies import values

Codec = tuple[Any, Callable[[Any], Message], Callable[[Any], Any], type[Message]]


def mapped(kind: type, message: type[Message], read: Callable[[Any, Any], Any]) -> Codec:
    """By the mapping, and read as its users read it."""
    return kind, lambda value: to_wire(value, message), lambda found: read(found, kind), message


CODECS: dict[str, Codec] = {
    "spec": mapped(DeploymentSpec, model_pb2.DeploymentSpec, from_wire),
    "deployment": mapped(DeploymentSnapshot, control_pb2.Deployment, view_from_wire),
    "node": mapped(NodeSnapshot, control_pb2.Node, view_from_wire),
    "status": mapped(CellStatus, control_pb2.Status, view_from_wire),
    "profile": mapped(ProfileView, control_pb2.KnownProfile, view_from_wire),
    "request": mapped(RequestSnapshot, control_pb2.OpenRequest, view_from_wire),
    "cell event": mapped(CellEvent, control_pb2.CellEvent, view_from_wire),
    "usage": mapped(Usage, control_pb2.Usage, view_from_wire),
    "starting": mapped(NodeStarting, node_link_pb2.NodeStarting, from_wire),
    "text": mapped(TextAssets, model_pb2.TextAssets, from_wire),
    "invocation": (
        Invocation,
        codec.invocation_to_wire,
        codec.invocation_from_wire,
        inference_pb2.InvokeRequest,
    ),
}
for _kinds, _to_wire, _from_wire, _message in (
    (NodeCommand, command_to_wire, command_from_wire, node_link_pb2.NodeCommand),
    (NodeReport, codec.report_to_wire, report_from_wire, node_link_pb2.NodeReport),
    (InvocationEvent, codec.event_to_wire, codec.event_from_wire, inference_pb2.InvokeResponse),
):
    for _kind in get_args(_kinds):
        CODECS[_kind.__name__] = (_kind, _to_wire, _from_wire, _message)
FEW = settings().max_examples // 4
"""For each of many kinds."""
UNIONS = ("ImportModel", "NodeHello", "Accepted")
"""One of each message that holds a oneof."""


def sent(value: Any) -> Any:
    """The value without what nodes do without."""
    if isinstance(value, NodeHello):
        return replace(value, requests=tuple(map(sent, value.requests)))
    if isinstance(value, SubmitRequest | HeldRequest):
        request = replace(value.order.request, digests=(), answers=1)
        return replace(value, order=replace(value.order, request=request))
    return value


@pytest.mark.parametrize("name", CODECS)
@given(data=st.data())
@settings(max_examples=FEW)
def test_a_value_comes_back_as_it_went_and_of_damaged_bytes_comes_one_or_invalid_input(
    name: str, data: st.DataObject
) -> None:
    """Bytes changed, cut out or put in anywhere: nothing but InvalidInput ever comes of it."""
    kind, to_wire, from_wire, message = CODECS[name]
    drawn = data.draw(values(kind))
    raw = bytearray(to_wire(drawn).SerializeToString())
    assert from_wire(message.FromString(to_wire(sent(drawn)).SerializeToString())) == sent(drawn)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    parsed = lenient(message.FromString)(bytes(raw))
    if isinstance(parsed, Malformed):
        with pytest.raises(DecodeError):
            message.FromString(bytes(raw))
        return
    with suppress(InvalidInput):
        from_wire(parsed)


@pytest.mark.parametrize("name", [*UNIONS, "invocation"])
def test_a_message_with_nothing_known_in_it_is_invalid(name: str) -> None:
    _, _, from_wire, message = CODECS[name]
    newer = message.FromString(b"\xfa\x3f\x01x")  # field 1023, which no version has yet
    with pytest.raises(InvalidInput):
        from_wire(newer)


def link_read(said: Message) -> NodeCommand | NodeReport | None:
    """As its end of the link reads the command or report that this is."""
    ends: Any = (
        (node_link_pb2.NodeCommand, command_from_wire),
        (node_link_pb2.NodeReport, report_from_wire),
    )
    for whole, read in ends:
        for field in whole.DESCRIPTOR.fields:
            if field.message_type is said.DESCRIPTOR:
                return read(whole(**{field.name: said}))  # type: ignore[no-any-return]
    raise AssertionError(f"no link carries {said.DESCRIPTOR.name}")


def hello_of(**changes: Any) -> node_link_pb2.NodeHello:
    given: dict[str, Any] = {
        "node_id": "n1",
        "run_id": "r",
        "device": "cpu",
        "memory_bytes": 100,
        **changes,
    }
    return node_link_pb2.NodeHello(**given)


MODEL = model_pb2.ModelInfo(model_id="m")
INVALID: tuple[tuple[Message, str], ...] = (
    (node_link_pb2.LoadInstance(instance_id="i1"), "LoadInstance lacks model"),
    (node_link_pb2.LoadInstance(instance_id="i1", model=MODEL), "LoadInstance lacks profile"),
    (node_link_pb2.UseProfile(instance_id="i1"), "UseProfile lacks profile"),
    (node_link_pb2.ProfileDone(operation_id="o1"), "ProfileDone lacks profile"),
    (node_link_pb2.ProfileRefined(instance_id="i1"), "ProfileRefined lacks profile"),
    (hello_of(device="tpu"), r"NodeHello.device is 'tpu'; .* cpu, gpu"),
    (node_link_pb2.InstanceGone(), "InstanceGone lacks instance_id"),
    (node_link_pb2.ResizeKv(instance_id="i1"), "ResizeKv.kv_blocks is 0; it must be 1 or more"),
    (node_link_pb2.ResizeKv(kv_blocks=1), "ResizeKv lacks instance_id"),
    (node_link_pb2.KvResized(kv_blocks=4), "KvResized lacks instance_id"),
    *(
        (
            node_link_pb2.KvResized(instance_id="i1", kv_blocks=4, elapsed_s=elapsed_s),
            r"KvResized\.elapsed_s is .* 0 or more, and finite",
        )
        for elapsed_s in (-1.0, nan, inf)
    ),
    *(
        (node_link_pb2.TokensReport(instance_id="i1", starved=["r1", starved]), said)
        for starved, said in (("", "TokensReport lacks starved"), ("x" * 256, "has 256 characters"))
    ),
    *(
        (node_link_pb2.TokensReport(instance_id="i1", busy_s=[1.0, s]), r"TokensReport\.busy_s is")
        for s in (-1.0, nan, inf)
    ),
    *(
        (
            hello_of(load_rates={"disk": node_link_pb2.LoadRate(fixed_s=s, bytes_per_s=rate)}),
            r"LoadRate\.(fixed_s|bytes_per_s) is",
        )
        for s, rate in ((-1.0, 1e9), (nan, 1e9), (inf, 1e9), (0.0, nan))
    ),
)


@pytest.mark.parametrize("field", ["here", "swaps_to"])
def test_no_more_than_all_weights_are_on_a_device(field: str) -> None:
    footprint = model_pb2.Footprint(weights_bytes=1, kv_block_bytes=1, block_tokens=1)
    report = node_link_pb2.InstanceReport(instance_id="i1", deployment="d", model_id="m", out=True)
    report.footprint.CopyFrom(footprint)
    report.kv_blocks = report.context_tokens_max = report.batch_max = 1
    setattr(report, field, 1.0)
    from_wire(report, InstanceReport)
    setattr(report, field, 1e308)
    with pytest.raises(InvalidInput, match=rf"{field} is 1e\+308; it must be between 0 and 1"):
        from_wire(report, InstanceReport)


def test_missing_parts_unknown_words_and_numbers_that_are_none_are_named() -> None:
    for message, said in INVALID:
        with pytest.raises(InvalidInput, match=said):
            link_read(message)


def test_a_node_that_takes_more_than_its_limit_by_itself_is_turned_away() -> None:
    taken = link_read(hello_of(base_bytes=100))
    assert isinstance(taken, NodeHello)
    assert taken.base_bytes == 100
    with pytest.raises(InvalidInput, match="base_bytes is 101, above memory_bytes") as caught:
        link_read(hello_of(base_bytes=101))
    assert "--memory" in caught.value.hint


def test_what_cannot_be_read_or_carried_of_a_hello_is_left_out_alone() -> None:
    """A grammar of a later version, a text that UTF-8 cannot hold, and more than a hello has."""
    submitted = node_link_pb2.SubmitRequest(request_id="k-1", instance_id="i1", attempt=1)
    submitted.sampling.SetInParent()
    submitted.slo.CopyFrom(model_pb2.Slo(ttft_s=1.0, ttft_tokens_per_s=1.0, tpot_s=1.0))
    later = node_link_pb2.HeldRequest(submitted=submitted)
    later.submitted.sampling.grammar.kind = "of a later version"
    readable = node_link_pb2.HeldRequest(submitted=submitted)
    hello = link_read(hello_of(requests=[later, readable, node_link_pb2.HeldRequest()]))
    assert isinstance(hello, NodeHello)
    assert [held.order.request.request_id for held in hello.requests] == ["k-1"]
    (held,) = hello.requests
    output = RequestTokens(request_id=RequestId("k-1"), attempt=1, first_index=0, token_ids=(1,))
    broken = replace(held, outputs=(replace(output, text="\ud800"),))
    large = replace(held, outputs=(replace(output, embedding=(0.5,) * (HELD_BYTES_MAX // 16)),))
    written = report_to_wire(replace(hello, requests=(broken, large, large, large, held)))
    sizes = [one.ByteSize() for one in written.hello.requests]
    assert sizes[0] > HELD_BYTES_MAX // 4
    assert sizes[-1] < 100
    assert sum(sizes) <= HELD_BYTES_MAX
    assert written.hello.requests[-1].submitted.request_id == "k-1"


def test_a_memory_operation_is_needed_at_some_time() -> None:
    """Or never, when nobody waits for it."""
    message = control_pb2.MemoryOperation(kind="resize", instance_id="i1", needed_in_s=inf)
    assert view_from_wire(message, MemoryOperationView).needed_in_s == inf
    message.needed_in_s = nan
    with pytest.raises(InvalidInput, match="needed_in_s is nan"):
        view_from_wire(message, MemoryOperationView)


def test_numbers_that_others_divide_by_are_never_0() -> None:
    with pytest.raises(InvalidInput, match="block_tokens is 0"):
        from_wire(model_pb2.Footprint(weights_bytes=1, kv_block_bytes=1), Footprint)
    with pytest.raises(InvalidInput, match="ttft_tokens_per_s is 0"):
        from_wire(model_pb2.Slo(ttft_s=1.0, tpot_s=1.0), Slo)


def test_who_knows_nothing_of_cold_starts_is_taken_late() -> None:
    slo = model_pb2.Slo(ttft_s=1.0, ttft_tokens_per_s=1.0, tpot_s=1.0)
    assert from_wire(slo, Slo).cold_start is ColdStart.LATE
    with pytest.raises(InvalidInput, match="cold_start is 'never'; it must be one of late, refuse"):
        from_wire(model_pb2.Slo(ttft_s=1.0, cold_start="never"), Slo)


def test_who_knows_nothing_of_weights_leaves_them_to_the_node() -> None:
    asked = node_link_pb2.ImportModel(operation_id="op", source="pkg://x/y")
    found = link_read(asked)
    assert isinstance(found, ImportModel)
    assert found.weights is None
    asked.weights = "i2"
    with pytest.raises(
        InvalidInput, match="weights is 'i2'; it must be one of i8, i4, i4-g128, f16, file"
    ):
        link_read(asked)


def test_who_knows_nothing_of_tensor_parallelism_has_one_device() -> None:
    spec = model_pb2.DeploymentSpec(
        slo=model_pb2.Slo(ttft_s=1.0, ttft_tokens_per_s=1.0, tpot_s=1.0),
        scaling=model_pb2.Scaling(),
    )
    assert from_wire(spec, DeploymentSpec).tensor_parallel == 1
    hello = link_read(hello_of())
    assert isinstance(hello, NodeHello)
    assert hello.tensor_parallel_max == 1


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
def test_raw_bytes_do_no_harm(raw: bytes, name: str, data: st.DataObject, count: int) -> None:
    request = pb.ModelInferRequest(model_name="chat", raw_input_contents=[raw_element("hi"), raw])
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    datatype = data.draw(st.sampled_from(INPUTS[name]))
    request.inputs.add(name=name, datatype=datatype, shape=[count])
    with suppress(InvalidInput):
        assert inference_from_wire(request).raw
