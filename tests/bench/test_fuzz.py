"""Drawn messages are of their type, damaged ones at times of none, and no method is left out."""

import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from bench.fuzz.messages import raw_messages
from bench.fuzz.rpc import methods
from mesh.v1 import inference_pb2
from mesh.wire.access import RPCS

INVOKE = inference_pb2.InvokeRequest.DESCRIPTOR


def test_every_method_that_there_are_roles_for_is_asked() -> None:
    asked = {f"/{m.containing_service.full_name}/{m.name}" for m in methods()}
    assert asked == set(RPCS)


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), method=st.sampled_from(methods()))
def test_a_drawn_message_is_one_of_its_type(data: st.DataObject, method: MethodDescriptor) -> None:
    kind = method.input_type
    raw = data.draw(raw_messages(kind, ["chat"], False))
    GetMessageClass(kind).FromString(raw)


def test_names_that_exist_are_drawn() -> None:
    found = find(
        raw_messages(INVOKE, ["chat"], False),
        lambda raw: inference_pb2.InvokeRequest.FromString(raw).deployment == "chat",
    )
    assert b"chat" in found


def test_damaged_bytes_come_to_no_message_at_times() -> None:
    def broken(raw: bytes) -> bool:
        try:
            inference_pb2.InvokeRequest.FromString(raw)
        except DecodeError:
            return True
        return False

    raw = find(raw_messages(INVOKE, ["chat"], True), broken)
    with pytest.raises(DecodeError):
        inference_pb2.InvokeRequest.FromString(raw)
