"""The codec loses nothing, and whatever is sent to it, it answers with a value or InvalidInput."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, get_args

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import InvalidInput
from mesh.domain.invocation import Invocation, InvocationEvent
from mesh.domain.messages import ImportModel, NodeCommand, NodeHello, NodeReport, SubmitRequest
from mesh.domain.slo import ColdStart
from mesh.domain.views import (
    CellEvent,
    CellStatus,
    DeploymentSnapshot,
    NodeSnapshot,
    ProfileView,
    RequestSnapshot,
)
from mesh.v1 import control_pb2, inference_pb2, model_pb2, node_link_pb2
from mesh.wire import codec_command, codec_invoke, codec_model, codec_node, codec_views
from mesh.wire.malformed import Malformed, lenient
from tests.wire.strategies import values

Codec = tuple[Any, Callable[[Any], Message], Callable[[Any], Any], type[Message]]
CODECS: dict[str, Codec] = {
    "spec": (
        DeploymentSpec,
        codec_model.spec_to_wire,
        codec_model.spec_from_wire,
        model_pb2.DeploymentSpec,
    ),
    "invocation": (
        Invocation,
        codec_invoke.invocation_to_wire,
        codec_invoke.invocation_from_wire,
        inference_pb2.InvokeRequest,
    ),
    "deployment": (
        DeploymentSnapshot,
        codec_views.deployment_to_wire,
        codec_views.deployment_from_wire,
        control_pb2.Deployment,
    ),
    "node": (
        NodeSnapshot,
        codec_views.node_to_wire,
        codec_views.node_from_wire,
        control_pb2.Node,
    ),
    "status": (
        CellStatus,
        codec_views.status_to_wire,
        codec_views.status_from_wire,
        control_pb2.Status,
    ),
    "profile": (
        ProfileView,
        codec_views.profile_view_to_wire,
        codec_views.profile_view_from_wire,
        control_pb2.KnownProfile,
    ),
    "request": (
        RequestSnapshot,
        codec_views.open_request_to_wire,
        codec_views.open_request_from_wire,
        control_pb2.OpenRequest,
    ),
    "cell event": (
        CellEvent,
        codec_views.cell_event_to_wire,
        codec_views.cell_event_from_wire,
        control_pb2.CellEvent,
    ),
}
for _kinds, _to_wire, _from_wire, _message in (
    (
        NodeCommand,
        codec_command.command_to_wire,
        codec_command.command_from_wire,
        node_link_pb2.NodeCommand,
    ),
    (
        NodeReport,
        codec_node.report_to_wire,
        codec_node.report_from_wire,
        node_link_pb2.NodeReport,
    ),
    (
        InvocationEvent,
        codec_invoke.event_to_wire,
        codec_invoke.event_from_wire,
        inference_pb2.InvokeResponse,
    ),
):
    for _kind in get_args(_kinds):
        CODECS[_kind.__name__] = (_kind, _to_wire, _from_wire, _message)
UNIONS = ("ImportModel", "NodeHello", "Accepted")
"""One of each message that holds a oneof."""


@pytest.mark.parametrize("name", CODECS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_value_comes_back_as_it_went(name: str, data: st.DataObject) -> None:
    kind, to_wire, from_wire, message = CODECS[name]
    value = data.draw(values(kind))
    if isinstance(value, SubmitRequest):  # nodes do without
        request = replace(value.order.request, digests=())
        value = replace(value, order=replace(value.order, request=request))
    assert from_wire(message.FromString(to_wire(value).SerializeToString())) == value


@pytest.mark.parametrize("name", CODECS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_damaged_bytes_give_a_value_or_invalid_input(name: str, data: st.DataObject) -> None:
    """Bytes changed, cut out or put in anywhere: nothing but InvalidInput ever comes of it."""
    kind, to_wire, from_wire, message = CODECS[name]
    raw = bytearray(to_wire(data.draw(values(kind))).SerializeToString())
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


def test_missing_parts_and_unknown_words_are_named() -> None:
    load = node_link_pb2.LoadInstance(instance_id="i1")
    with pytest.raises(InvalidInput, match="LoadInstance lacks model"):
        codec_command.command_from_wire(node_link_pb2.NodeCommand(load_instance=load))
    hello = node_link_pb2.NodeHello(node_id="n1", run_id="r", device="tpu")
    with pytest.raises(InvalidInput, match=r"NodeHello.device is 'tpu'; .* cpu, gpu"):
        codec_node.report_from_wire(node_link_pb2.NodeReport(hello=hello))
    gone = node_link_pb2.NodeReport(instance_gone=node_link_pb2.InstanceGone())
    with pytest.raises(InvalidInput, match="InstanceGone lacks instance_id"):
        codec_node.report_from_wire(gone)


def test_numbers_that_others_divide_by_are_never_0() -> None:
    with pytest.raises(InvalidInput, match="block_tokens is 0"):
        codec_model.footprint_from_wire(model_pb2.Footprint(weights_bytes=1, kv_block_bytes=1))
    with pytest.raises(InvalidInput, match="ttft_tokens_per_s is 0"):
        codec_model.slo_from_wire(model_pb2.Slo(ttft_s=1.0, tpot_s=1.0))


def test_who_knows_nothing_of_cold_starts_is_taken_late() -> None:
    slo = model_pb2.Slo(ttft_s=1.0, ttft_tokens_per_s=1.0, tpot_s=1.0)
    assert codec_model.slo_from_wire(slo).cold_start is ColdStart.LATE
    with pytest.raises(InvalidInput, match="cold_start is 'never'; it must be one of late, refuse"):
        codec_model.slo_from_wire(model_pb2.Slo(ttft_s=1.0, cold_start="never"))


def test_who_knows_nothing_of_weights_leaves_them_to_the_node() -> None:
    asked = node_link_pb2.ImportModel(operation_id="op", source="pkg://x/y")
    found = codec_command.command_from_wire(node_link_pb2.NodeCommand(import_model=asked))
    assert isinstance(found, ImportModel)
    assert found.weights is None
    asked.weights = "i2"
    with pytest.raises(
        InvalidInput, match="weights is 'i2'; it must be one of i8, i4, i4-g128, f16, file"
    ):
        codec_command.command_from_wire(node_link_pb2.NodeCommand(import_model=asked))


def test_who_knows_nothing_of_tensor_parallelism_has_one_device() -> None:
    spec = model_pb2.DeploymentSpec(
        slo=model_pb2.Slo(ttft_s=1.0, ttft_tokens_per_s=1.0, tpot_s=1.0),
        scaling=model_pb2.Scaling(),
    )
    assert codec_model.spec_from_wire(spec).tensor_parallel == 1
    said = node_link_pb2.NodeHello(node_id="n1", run_id="r", device="cpu")
    hello = codec_node.report_from_wire(node_link_pb2.NodeReport(hello=said))
    assert isinstance(hello, NodeHello)
    assert hello.tensor_parallel_max == 1
