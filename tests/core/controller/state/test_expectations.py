"""What the cell expects of a model on a device, before and after it has seen it."""

from dataclasses import replace

import pytest

from mesh.compute.load_times import PRIORS
from mesh.core.controller.state.expectations import LOAD_TIMES_MAX, Expectations
from mesh.domain.ids import ModelId, NodeId
from mesh.domain.model import Mixture, ModelFormat, Task
from mesh.domain.operators import Role
from mesh.domain.profile import OperatorTimes
from mesh.domain.reasons import ProfileSource
from mesh.domain.steps import LoadRate, LoadTier
from tests.core.cells import FOOTPRINT, MODEL, hello
from tests.support.profiles import PROFILE, profile


def test_a_measured_profile_holds_for_its_model_and_scales_to_others() -> None:
    known = Expectations([PROFILE])
    assert known.profile(MODEL, FOOTPRINT, hello()) == PROFILE
    other = replace(MODEL, model_id=ModelId("sha256-ffff"), parameters=200_000)
    estimate = known.profile(other, FOOTPRINT, hello())
    assert (estimate.model_id, estimate.measured) == ("sha256-ffff", False)
    assert PROFILE.hardware in estimate.scaled_from


def test_where_operators_were_counted_a_model_is_estimated_by_its_widths() -> None:
    head = OperatorTimes(name=Role.HEAD, prefill=PROFILE.prefill, decode=PROFILE.decode)
    known = Expectations([replace(PROFILE, operators=(head,), widths=MODEL.widths)])
    other = replace(MODEL, model_id=ModelId("sha256-ffff"), parameters=1, vocabulary_tokens=384)
    estimate = known.profile(other, FOOTPRINT, hello())
    assert estimate.origin is ProfileSource.OPERATORS
    assert estimate.prefill.at(8, 0) == pytest.approx(3 * PROFILE.prefill.at(8, 0))
    for unlike in (
        replace(other, mixture=Mixture(experts=8, chosen=2, parameters=1)),
        replace(other, format=ModelFormat.OPENVINO_IR),
        replace(other, task=Task.EMBED),
        replace(other, intermediate_size=0),
    ):
        assert known.profile(unlike, FOOTPRINT, hello()).origin is ProfileSource.ESTIMATE


def test_a_profile_that_is_measured_later_takes_the_place_of_an_estimate() -> None:
    known = Expectations()
    assert not known.profile(MODEL, FOOTPRINT, hello()).measured
    known.learn_profile(PROFILE)
    assert known.profile(MODEL, FOOTPRINT, hello()) == PROFILE
    newer = profile(measured_s=9.0)
    known.learn_profile(newer)
    assert known.profile(MODEL, FOOTPRINT, hello()) == newer
    assert known.measured(MODEL.model_id) == [newer]


def test_a_load_is_expected_to_take_what_it_took_lately() -> None:
    known = Expectations()
    node, size = hello(), 1 << 30
    assert known.load_s(node, 0) == PRIORS[LoadTier.DISK].fixed_s
    assert known.load_s(node, size) == PRIORS[LoadTier.DISK].load_s(size) > 2.0
    known.learn_load(node, size, 4.0)
    assert known.load_s(node, size) == pytest.approx(4.0)
    alike = replace(node, node_id=NodeId("n2"))
    assert known.load_s(alike, size) == pytest.approx(4.0), "it has the same hardware"
    known.learn_load(alike, size, 2.0)
    assert known.load_s(alike, size) == pytest.approx(2.0)
    assert known.load_s(node, size) == pytest.approx(4.0), "its own loads say more"
    other = replace(node, node_id=NodeId("n3"), fingerprint="another")
    assert known.load_s(other, 0) == PRIORS[LoadTier.DISK].fixed_s
    rate = LoadRate(fixed_s=0.25, bytes_per_s=float(size))
    measured = replace(other, load_rates=((LoadTier.DISK, rate),))
    assert known.load_s(measured, size) == 1.25


def test_the_load_times_of_ever_other_nodes_are_kept_of_so_many() -> None:
    known = Expectations()
    nodes = [
        replace(hello(), node_id=NodeId(f"n{n}"), fingerprint=f"f{n}")
        for n in range(LOAD_TIMES_MAX // 2 + 1)
    ]
    for node in nodes:
        known.learn_load(node, 0, 4.0)
    assert known.load_s(nodes[0], 0) == PRIORS[LoadTier.DISK].fixed_s
    assert known.load_s(nodes[1], 0) == known.load_s(nodes[-1], 0) == pytest.approx(4.0)


def test_a_wake_is_learned_apart_from_a_load_and_expected_to_be_no_longer() -> None:
    known = Expectations()
    size = 1 << 30

    def expected(tier: LoadTier) -> float:
        return known.load_s(hello(), size, tier)

    assert PRIORS[LoadTier.HOST].fixed_s < expected(LoadTier.HOST) < expected(LoadTier.DISK)
    known.learn_load(hello(), size, 0.05)
    assert expected(LoadTier.HOST) == expected(LoadTier.DISK), "no wake has been seen"
    assert expected(LoadTier.DISK) == pytest.approx(0.05)
    known.learn_load(hello(), size, 4.0)
    known.learn_load(hello(), size, 0.25, LoadTier.HOST)
    assert expected(LoadTier.HOST) == pytest.approx(0.25)
    assert 2.0 < expected(LoadTier.DISK) <= 5.0


def test_what_is_nearer_takes_no_longer_and_what_is_farther_no_less() -> None:
    known = Expectations()
    size = 1 << 27
    known.learn_load(hello(), size, 9.0)
    before = [known.load_s(hello(), size, tier) for tier in LoadTier]
    assert before == sorted(before, reverse=True)
    assert before[LoadTier.REMOTE.nearness] == before[LoadTier.DISK.nearness] == pytest.approx(9.0)
    known.learn_load(hello(), size, 0.5, LoadTier.PREPARED)
    known.learn_load(hello(), size, 20.0, LoadTier.REMOTE)
    after = [known.load_s(hello(), size, tier) for tier in LoadTier]
    assert after[:3] == pytest.approx([20.0, 9.0, 0.5])
    known.learn_load(other := replace(hello(), node_id=NodeId("n9")), size, 0.1, LoadTier.PREPARED)
    assert known.load_s(other, size, LoadTier.CACHED) == pytest.approx(0.1), "as from farther away"
    assert [times.tier for times in known.load_times(hello())] == list(LoadTier)[:3]


def test_a_load_beside_iterations_takes_longer_where_the_node_says_so_as_loads_have_shown() -> None:
    known, size = Expectations(), 1 << 27
    node = replace(hello(), busy_load_factor=2.0)

    def expected(*, beside: bool, tier: LoadTier = LoadTier.DISK) -> float:
        return known.load_s(node, size, tier, beside=beside)

    for tier in LoadTier:
        alone_s = expected(beside=False, tier=tier)
        assert expected(beside=True, tier=tier) == pytest.approx(2.0 * alone_s)
    known.learn_load(node, size, 1.0)
    assert (expected(beside=False), expected(beside=True)) == pytest.approx((1.0, 2.0))
    for _ in range(8):
        known.learn_load(node, size, 1.5, computed_s=1.5)
        known.learn_load(node, size, 1.0)
    assert (expected(beside=False), expected(beside=True)) == pytest.approx((1.0, 1.5))
    known.learn_load(node, size, 0.9, LoadTier.PREPARED, computed_s=0.45)
    assert expected(beside=False, tier=LoadTier.PREPARED) == pytest.approx(0.9 / 1.25)
    assert expected(beside=True, tier=LoadTier.PREPARED) == pytest.approx(1.5 * 0.9 / 1.25)
    other = replace(node, node_id=NodeId("n2"))
    assert known.slowdown(other) == pytest.approx(0.5), "as on nodes like it"
    known.learn_load(other, size, 1.0)
    assert known.slowdown(other) == pytest.approx(0.5), "one alone says nothing of it"
    assert known.slowdown(replace(other, busy_load_factor=1.0)) == 0.0, "it states something else"
    plain, without = Expectations(), hello()
    plain.learn_load(without, size, 1.0, computed_s=1.0)
    assert plain.load_s(without, size) == plain.load_s(without, size, beside=True)


def test_an_estimate_is_no_longer_than_likely_and_a_promise_is_planned_with_more() -> None:
    """Loads take 1 s, except some that are held up; what the node has to compute comes on top."""
    known, size = Expectations(), 1 << 27
    node = replace(hello(), busy_load_factor=2.0)
    for seconds in (1.0, 1.0, 3.0, 1.0, 1.0):
        known.learn_load(node, size, seconds)
    assert known.estimate_s(node, size) == pytest.approx(1.0)
    assert known.load_s(node, size) > 1.5
    assert known.estimate_s(node, size, computes_s=60.0) == pytest.approx(2.0)
    assert known.estimate_s(node, size, computes_s=0.75) == pytest.approx(1.5), "half of its time"


def test_load_times_say_what_a_node_stated_and_by_what_its_loads_differ() -> None:
    known = Expectations()
    size = 1 << 30
    rate = LoadRate(fixed_s=1.0, bytes_per_s=float(size))
    node = replace(hello(), load_rates=((LoadTier.DISK, rate),))
    (stated,) = known.load_times(node)
    assert (stated.tier, stated.fixed_s, stated.bytes_per_s) == (LoadTier.DISK, 1.0, size)
    assert (stated.loads, stated.factor) == (0, 1.0)
    known.learn_load(node, size, 4.0)
    known.learn_load(node, size, 2.0)
    known.learn_load(node, size, 0.1, LoadTier.HOST)
    from_disk, woken = known.load_times(node)
    assert from_disk.loads == 2
    assert from_disk.factor == pytest.approx(1.5)
    assert (woken.tier, woken.loads) == (LoadTier.HOST, 1)
