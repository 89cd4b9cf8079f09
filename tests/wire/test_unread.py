"""Words of a later version: what they are said of has failed or is left out, and the rest holds."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict, ParseDict
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.domain.errors import InvalidInput
from mesh.domain.ids import OperationId
from mesh.domain.invocation import Finished
from mesh.domain.lifecycle import InstanceState
from mesh.domain.messages import (
    AbortRequest,
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
from mesh.domain.views import (
    CellStatus,
    DeploymentSnapshot,
    InstanceSnapshot,
    NodeSnapshot,
    ProfileView,
    RequestSnapshot,
)
from mesh.report.plain import plain, plain_fields
from mesh.v1 import control_pb2, inference_pb2, model_pb2
from mesh.v1 import node_link_pb2 as pb
from mesh.wire.codec import (
    command_from_wire,
    command_to_wire,
    event_from_wire,
    report_from_wire,
    report_to_wire,
    to_wire,
    view_from_wire,
)
from mesh.wire.unread import command_written, refused, report_read, reports_written
from tests.wire.strategies import values
from tests.wire.test_codec import CODECS, FEW, hello_of, link_read

HINT = "both ends of the wire should run the same version of mesh"

WORDS = frozenset(
    (
        *("cold_start", "device", "devices", "format", "phase"),
        *("precision", "state", "tier", "tool_format", "weights"),
    )
)
"""Fields of views that hold one, or several."""
TABLES = frozenset({"footprints", "refused"})
"""Fields of views whose keys are names that somebody gave, which may be those of other fields."""


def answer(command: NodeCommand, change: Callable[[pb.NodeCommand], None]) -> NodeReport | None:
    message = command_to_wire(command)
    change(message)
    with pytest.raises(InvalidInput) as caught:
        command_from_wire(message)
    return refused(message, caught.value)


@given(st.data())
@settings(max_examples=FEW)
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
    told = link_read(pb.TokensReport(outputs=outputs))
    assert isinstance(told, TokensReport)
    ends = [output.finish for output in told.outputs]
    assert ends == [FinishReason.FAILED, FinishReason.STOP, None]


def test_what_is_held_or_loaded_from_an_unknown_tier_is_left_out_or_from_disk() -> None:
    rate = LoadRate(fixed_s=1.0, bytes_per_s=1e9)
    wire_rate = pb.LoadRate(fixed_s=1.0, bytes_per_s=1e9)
    held = [pb.HeldModel(model_id="m", tier=tier) for tier in ("tape", "disk")]
    rates = {"host": wire_rate, "tape": wire_rate}
    hello = link_read(hello_of(load_rates=rates, models=pb.HeldModels(held=held)))
    assert isinstance(hello, NodeHello)
    assert hello.load_rates == ((LoadTier.HOST, rate),)
    assert hello.models is not None
    assert [model.tier for model in hello.models] == [LoadTier.DISK]
    for tier in ("tape", ""):
        loaded = pb.InstanceLoaded(instance_id="i1", tier=tier)
        loaded.footprint.kv_block_bytes = loaded.footprint.block_tokens = 1
        told = link_read(loaded)
        assert isinstance(told, InstanceLoaded)
        assert told.tier is LoadTier.DISK


def of_later(value: Any) -> Any:
    """The same with another word in place of each; tables hold none."""
    if isinstance(value, list):
        return [of_later(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: item if name in TABLES else (_another if name in WORDS else of_later)(item)
        for name, item in value.items()
    }


def _another(words: Any) -> Any:
    return ["later"] * len(words) if isinstance(words, list) else words and "later"


@pytest.mark.parametrize("kind", [DeploymentSnapshot, NodeSnapshot, ProfileView, RequestSnapshot])
@given(data=st.data())
@settings(max_examples=FEW)
def test_views_keep_unknown_words_and_all_beside_them(kind: type, data: st.DataObject) -> None:
    to_wire, from_wire, message = next(codec[1:] for codec in CODECS.values() if codec[0] is kind)
    view = data.draw(values(kind))
    said = MessageToDict(to_wire(view), preserving_proto_field_name=True)
    assert plain(from_wire(ParseDict(of_later(said), message()))) == of_later(plain(view))


@given(values(CellStatus))
def test_refusals_for_an_unknown_reason_are_counted_by_its_word(status: CellStatus) -> None:
    message = to_wire(status, control_pb2.Status)
    message.refused["too_loud"] = 7
    found = view_from_wire(message, CellStatus)
    refused: dict[str, int] = dict(status.refused)
    assert dict(found.refused) == {**refused, "too_loud?": 7}
    assert plain_fields(found)["refused"] == {**refused, "too_loud": 7}


def test_a_word_that_is_not_known_is_none_of_those_that_are_and_marked_for_people() -> None:
    instance = view_from_wire(control_pb2.Instance(state="frozen", tier="disk"), InstanceSnapshot)
    assert f"{instance.state}, {instance.tier}" == "frozen?, disk"
    assert isinstance(instance.state, InstanceState)
    assert instance.state not in list(InstanceState)
    assert instance.state.value == "frozen"
    with pytest.raises(ValueError, match="frozen"):
        InstanceState("frozen")
    with pytest.raises(InvalidInput, match="Instance lacks state"):
        view_from_wire(control_pb2.Instance(), InstanceSnapshot)


def test_an_answer_that_ends_in_an_unknown_way_is_told_to_its_end() -> None:
    end = inference_pb2.Finished(reason="bored", output_tokens=7)
    finished = event_from_wire(inference_pb2.InvokeResponse(finished=end))
    assert isinstance(finished, Finished)
    assert (finished.reason.value, finished.output_tokens) == ("bored", 7)


HUGE = (
    {"context_tokens_max": 10**18},
    {"stop_token_ids": (1, 2**70)},
    {"kv_heads": -1},
    {"parameters": 1.5},
    {"source": "caf\udce9"},
)


@pytest.mark.parametrize("beyond", HUGE)
@given(done=values(ImportDone), load=values(LoadInstance))
@settings(max_examples=5, deadline=None)
def test_what_does_not_fit_its_message_has_failed(
    beyond: dict[str, Any], done: ImportDone, load: LoadInstance
) -> None:
    (message,) = reports_written(replace(done, model=replace(done.model, **beyond)))
    failed = report_from_wire(message)
    assert isinstance(failed, ImportFailed)
    assert (failed.operation_id, failed.error) == (done.operation_id, "ModelError")
    assert "does not fit" in failed.message
    assert "again" not in failed.hint

    answer = command_written(replace(load, model=replace(load.model, **beyond)))
    assert isinstance(answer, LoadFailed)
    assert answer.instance_id == load.instance_id


@given(values(SubmitRequest), values(AbortRequest))
def test_a_request_that_does_not_fit_is_returned_and_an_abort_cannot_be(
    submit: SubmitRequest, abort: AbortRequest
) -> None:
    sampling = replace(submit.order.request.sampling, max_tokens=2**40)
    request = replace(submit.order.request, sampling=sampling)
    answer = command_written(replace(submit, order=replace(submit.order, request=request)))
    assert isinstance(answer, RequestReturned)
    assert answer.request_id == submit.order.request.request_id
    with pytest.raises(InvalidInput, match="AbortRequest"):
        command_written(replace(abort, attempt=2**40))


def test_a_failure_whose_words_utf8_cannot_hold_is_told_in_others() -> None:
    failed = ImportFailed(operation_id=OperationId("o"), error="TornModel", message="no \ud800")
    (message,) = reports_written(failed)
    assert report_from_wire(message) == replace(failed, message="no ?")


@given(values(TokensReport))
def test_requests_whose_tokens_cannot_be_told_are_returned(told: TokensReport) -> None:
    outputs = tuple(replace(output, token_ids=(2**70,)) for output in told.outputs)
    returned = [report_from_wire(m) for m in reports_written(replace(told, outputs=outputs))]
    ids = [(one.request_id, one.attempt) for one in returned if isinstance(one, RequestReturned)]
    assert ids == [(output.request_id, output.attempt) for output in outputs]


def test_a_message_that_the_other_end_refuses_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.wire.unread.MESSAGE_BYTES_MAX", 1000)
    failed = ImportFailed(operation_id=OperationId("o"), error="TornModel", message="x" * 2000)
    assert reports_written(failed) == []
