"""No malformed profile, and no factor that is none, gets past the codec."""

from collections.abc import Callable
from math import inf, nan

import pytest

from mesh.domain.errors import InvalidInput
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.messages import Heartbeat, ProfileRefined, TokensReport
from mesh.domain.model import Widths
from mesh.domain.profile import Profile, Stalls
from mesh.domain.views import InstanceSnapshot
from mesh.v1 import control_pb2, model_pb2, node_link_pb2, profile_pb2
from mesh.wire.codec import (
    SIZES_MAX,
    from_wire,
    report_from_wire,
    report_to_wire,
    to_wire,
    view_from_wire,
)
from tests.support.profiles import PROFILE
from tests.wire.test_codec import link_read

INSTANCE = InstanceId("i1")


def grid(
    rows: tuple[int, ...] = (1, 2),
    columns: tuple[int, ...] = (0, 4),
    seconds: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0),
) -> profile_pb2.Grid:
    return profile_pb2.Grid(rows=rows, columns=columns, seconds=seconds)


@pytest.mark.parametrize(
    ("malformed", "said"),
    [
        (grid(rows=()), r"Profile\.decode\.rows has 0 sizes"),
        (grid(columns=()), r"Profile\.decode\.columns has 0 sizes"),
        (grid(rows=tuple(range(1, SIZES_MAX + 2))), f"rows has {SIZES_MAX + 1} sizes"),
        (grid(rows=(0, 2)), "rows begins with 0; it must be 1 or more"),
        (grid(rows=(2, 1)), "rows is 2, 1; it must ascend"),
        (grid(columns=(4, 4)), "columns is 4, 4; it must ascend"),
        (grid(rows=(1, 2, 3)), "4 seconds for 3 rows and 2 columns; it must have 6"),
        (grid(columns=(0,)), "4 seconds for 2 rows and 1 columns; it must have 2"),
        (grid(seconds=()), "0 seconds for 2 rows"),
        (grid(seconds=(1.0, 2.0, 3.0, -4.0)), "seconds has -4"),
        (grid(seconds=(1.0, 2.0, nan, 4.0)), "seconds has nan"),
        (grid(seconds=(inf, 2.0, 3.0, 4.0)), "seconds has inf"),
    ],
)
def test_a_malformed_grid_is_named_and_told(malformed: profile_pb2.Grid, said: str) -> None:
    message = to_wire(PROFILE, profile_pb2.Profile)
    message.decode.CopyFrom(malformed)
    with pytest.raises(InvalidInput, match=said):
        from_wire(message, Profile)
    message = to_wire(PROFILE, profile_pb2.Profile)
    message.prefill.CopyFrom(malformed)
    with pytest.raises(InvalidInput, match=said.replace("decode", "prefill")):
        from_wire(message, Profile)


@pytest.mark.parametrize(
    ("changed", "value", "said"),
    [
        ("model_id", "", "lacks model_id"),
        ("device", "tpu", "device is 'tpu'"),
        ("measured_s", -1.0, "measured_s is -1"),
    ],
)
def test_a_profile_says_what_it_is_of_and_took(changed: str, value: object, said: str) -> None:
    message = to_wire(PROFILE, profile_pb2.Profile)
    setattr(message, changed, value)
    with pytest.raises(InvalidInput, match=said):
        from_wire(message, Profile)


def test_a_profile_has_both_grids() -> None:
    message = to_wire(PROFILE, profile_pb2.Profile)
    message.ClearField("decode")
    with pytest.raises(InvalidInput, match="Profile lacks decode"):
        from_wire(message, Profile)
    message.ClearField("prefill")
    with pytest.raises(InvalidInput, match="Profile lacks prefill"):
        from_wire(message, Profile)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [(0, "chosen"), (9, r"Mixture\.chosen is 9; of 8 experts it cannot be")],
)
def test_each_token_of_a_mixture_takes_some_of_its_experts(chosen: int, said: str) -> None:
    message = to_wire(PROFILE, profile_pb2.Profile)
    message.mixture.CopyFrom(model_pb2.Mixture(experts=8, chosen=chosen, parameters=1))
    with pytest.raises(InvalidInput, match=said):
        from_wire(message, Profile)


def test_no_width_of_a_model_is_0() -> None:
    """Times are divided by them."""
    message = to_wire(PROFILE, profile_pb2.Profile)
    sizes = dict.fromkeys((field.name for field in model_pb2.Widths.DESCRIPTOR.fields), 1)
    message.widths.CopyFrom(model_pb2.Widths(**sizes))
    assert from_wire(message, Profile).widths == Widths(**sizes)
    message.widths.kv_heads = 0
    with pytest.raises(InvalidInput, match=r"Widths\.kv_heads is 0; it must be 1 or more"):
        from_wire(message, Profile)


def refined_by(correction: float = 0.0, planned: float = 0.0) -> object:
    refined = node_link_pb2.ProfileRefined(
        instance_id="i1",
        profile=to_wire(PROFILE, profile_pb2.Profile),
        correction=correction,
        correction_planned=planned,
    )
    return link_read(refined)


def beat_of(
    correction: float, planned: float = 0.0, stalls: profile_pb2.Stalls | None = None
) -> object:
    """A heartbeat of a node with one instance."""
    instance = node_link_pb2.InstanceReport(
        instance_id="i1",
        model_id="m",
        footprint=model_pb2.Footprint(kv_block_bytes=1, block_tokens=1),
        correction=correction,
        correction_planned=planned,
        stalls=stalls,
    )
    return link_read(node_link_pb2.Heartbeat(instances=[instance]))


FACTORS: dict[str, Callable[[float], object]] = {
    "correction of tokens": lambda value: link_read(
        node_link_pb2.TokensReport(instance_id="i1", correction=value)
    ),
    "correction in a heartbeat": lambda value: beat_of(value),
    "planned correction in a heartbeat": lambda value: beat_of(1.0, value),
    "correction of a refined profile": lambda value: refined_by(value),
    "its planned correction": lambda value: refined_by(1.0, value),
    "correction of an instance": lambda value: view_from_wire(
        control_pb2.Instance(state="ready", correction=value), InstanceSnapshot
    ),
    "load slowdown": lambda value: link_read(node_link_pb2.Heartbeat(load_slowdown=value)),
}


@pytest.mark.parametrize("value", [nan, inf, -inf, -0.5])
@pytest.mark.parametrize("factor", FACTORS)
def test_a_factor_that_would_spoil_predictions_is_invalid(factor: str, value: float) -> None:
    with pytest.raises(InvalidInput, match="it must be above 0 and finite"):
        FACTORS[factor](value)


@pytest.mark.parametrize("field", ["longest_s", "ago_s"])
@pytest.mark.parametrize("value", [nan, inf, -0.5])
def test_a_stall_lasts_a_number_of_seconds(field: str, value: float) -> None:
    stalls = profile_pb2.Stalls(count=1, **{field: value})
    with pytest.raises(InvalidInput, match=f"Stalls.{field} is .*; it must be 0 or more"):
        beat_of(1.0, stalls=stalls)


def test_a_node_whose_version_knows_no_factors_counts_as_1() -> None:
    tokens = node_link_pb2.TokensReport(instance_id="i1")
    assert link_read(tokens) == TokensReport(instance_id=INSTANCE, outputs=(), correction=1.0)
    beat = link_read(node_link_pb2.Heartbeat(rss_bytes=1))
    assert beat == Heartbeat(rss_bytes=1, load_slowdown=1.0, engine_bytes=0)
    of_old = beat_of(0.0)
    assert isinstance(of_old, Heartbeat)
    assert of_old.instances[0].correction == 1.0
    assert of_old.instances[0].correction_planned == 1.0
    assert of_old.instances[0].stalls == Stalls()
    assert view_from_wire(control_pb2.Instance(state="ready"), InstanceSnapshot).correction == 1.0


def test_nor_does_one_that_refines_a_profile_without_factors_say_that_they_are_1() -> None:
    refined = ProfileRefined(instance_id=INSTANCE, profile=PROFILE)
    assert refined.correction is refined.correction_planned is None
    assert refined_by() == refined
    assert report_from_wire(report_to_wire(refined)) == refined


def test_what_is_left_of_prompts_keeps_its_order() -> None:
    """The core takes them in the order that the node computes them in."""
    left = ((RequestId("r2"), 300), (RequestId("r1"), 7))
    report = TokensReport(instance_id=INSTANCE, outputs=(), prefill_left=left, correction=0.5)
    assert report_from_wire(report_to_wire(report)) == report
