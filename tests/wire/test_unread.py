"""Words of a later version: what they are said of has failed or is left out, and the rest holds."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.domain.errors import InvalidInput
from mesh.domain.messages import (
    ImportDone,
    ImportFailed,
    ImportModel,
    InstanceLoaded,
    LoadFailed,
    LoadInstance,
    NodeCommand,
    NodeHello,
    NodeReport,
    RequestReturned,
    SubmitRequest,
    TokensReport,
    UseProfile,
)
from mesh.domain.reasons import FinishReason
from mesh.domain.steps import LoadRate, LoadTier
from mesh.v1 import model_pb2
from mesh.v1 import node_link_pb2 as pb
from mesh.wire.codec_command import command_from_wire, command_to_wire
from mesh.wire.codec_node import report_from_wire, report_to_wire
from mesh.wire.unread import refused, report_read
from tests.wire.strategies import values

HINT = "both ends of the wire should run the same version of mesh"


def answer(command: NodeCommand, change: Callable[[pb.NodeCommand], None]) -> NodeReport | None:
    message = command_to_wire(command)
    change(message)
    with pytest.raises(InvalidInput) as caught:
        command_from_wire(message)
    return refused(message, caught.value)


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_a_command_with_an_unknown_word_is_answered_as_failed(data: st.DataObject) -> None:
    def load_in_2_bits(message: pb.NodeCommand) -> None:
        message.load_instance.model.weights = "i2"

    def import_in_2_bits(message: pb.NodeCommand) -> None:
        message.import_model.weights = "i2"

    def in_rhyme(message: pb.NodeCommand) -> None:
        message.submit_request.sampling.grammar.kind = "rhyme"

    load = data.draw(values(LoadInstance))
    failed = answer(load, load_in_2_bits)
    assert isinstance(failed, LoadFailed)
    assert (failed.instance_id, failed.error) == (load.instance_id, "InvalidInput")
    assert "ModelInfo.weights is 'i2'; it must be one of i8, i4" in failed.message
    assert failed.hint == HINT

    asked = data.draw(values(ImportModel))
    failed = answer(asked, import_in_2_bits)
    assert isinstance(failed, ImportFailed)
    assert (failed.operation_id, failed.error) == (asked.operation_id, "InvalidInput")
    assert "ImportModel.weights is 'i2'" in failed.message
    assert failed.hint == HINT

    submit = data.draw(values(SubmitRequest))
    returned = answer(submit, in_rhyme)
    assert isinstance(returned, RequestReturned)
    assert returned.request_id == submit.order.request.request_id
    assert returned.attempt == submit.order.attempt
    assert "Grammar.kind is 'rhyme'" in returned.message


@given(values(UseProfile))
def test_what_no_report_could_say_has_failed_has_no_answer(use: UseProfile) -> None:
    def of_a_tpu(message: pb.NodeCommand) -> None:
        message.use_profile.profile.device = "tpu"

    assert answer(use, of_a_tpu) is None


@given(values(ImportDone))
def test_an_import_into_something_unknown_has_failed(done: ImportDone) -> None:
    message = report_to_wire(done)
    assert report_read(message) == done
    message.import_done.model.weights = "i2"
    failed = report_read(message)
    assert isinstance(failed, ImportFailed)
    assert (failed.operation_id, failed.error) == (done.operation_id, "InvalidInput")
    assert "ModelInfo.weights is 'i2'" in failed.message
    assert failed.hint == HINT


def test_a_report_of_an_unknown_kind_is_none_and_a_malformed_one_is_invalid() -> None:
    assert report_read(pb.NodeReport.FromString(b"\xfa\x3f\x01x")) is None
    with pytest.raises(InvalidInput, match="InstanceGone lacks instance_id"):
        report_read(pb.NodeReport(instance_gone=pb.InstanceGone()))


def test_a_request_that_ends_in_an_unknown_way_has_failed() -> None:
    outputs = [model_pb2.RequestTokens(finish=word) for word in ("bored", "stop", "")]
    told = report_from_wire(pb.NodeReport(tokens=pb.TokensReport(outputs=outputs)))
    assert isinstance(told, TokensReport)
    ends = [output.finish for output in told.outputs]
    assert ends == [FinishReason.FAILED, FinishReason.STOP, None]


def test_what_is_held_or_loaded_from_an_unknown_tier_is_left_out_or_from_disk() -> None:
    rate = LoadRate(fixed_s=1.0, bytes_per_s=1e9)
    wire_rate = pb.LoadRate(fixed_s=1.0, bytes_per_s=1e9)
    said = pb.NodeHello(
        node_id="n1",
        run_id="r",
        device="cpu",
        load_rates={"host": wire_rate, "tape": wire_rate},
        models=pb.HeldModels(
            held=[pb.HeldModel(model_id="m", tier=tier) for tier in ("tape", "disk")]
        ),
    )
    hello = report_from_wire(pb.NodeReport(hello=said))
    assert isinstance(hello, NodeHello)
    assert hello.load_rates == ((LoadTier.HOST, rate),)
    assert hello.models is not None
    assert [model.tier for model in hello.models] == [LoadTier.DISK]
    for tier in ("tape", ""):
        loaded = pb.InstanceLoaded(instance_id="i1", tier=tier)
        loaded.footprint.kv_block_bytes = loaded.footprint.block_tokens = 1
        told = report_from_wire(pb.NodeReport(instance_loaded=loaded))
        assert isinstance(told, InstanceLoaded)
        assert told.tier is LoadTier.DISK
