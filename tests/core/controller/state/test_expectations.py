"""What the cell expects of a model on a device, before and after it has seen it."""

from dataclasses import replace

from mesh.core.controller.state.expectations import LOAD_S_LEAST, WAKE_S_LEAST, Expectations
from mesh.domain.ids import ModelId
from mesh.domain.steps import LoadTier
from tests.core.cells import FOOTPRINT, MODEL, hello
from tests.support.profiles import FINGERPRINT, PROFILE, profile


def test_a_measured_profile_holds_for_its_model_and_scales_to_others() -> None:
    known = Expectations([PROFILE])
    assert known.profile(MODEL, FOOTPRINT, hello()) == PROFILE
    other = replace(MODEL, model_id=ModelId("sha256-ffff"), parameters=200_000)
    estimate = known.profile(other, FOOTPRINT, hello())
    assert (estimate.model_id, estimate.measured) == ("sha256-ffff", False)
    assert PROFILE.hardware in estimate.scaled_from


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
    small = known.load_s(MODEL.model_id, FINGERPRINT, 0)
    assert small == LOAD_S_LEAST
    assert known.load_s(MODEL.model_id, FINGERPRINT, 1 << 30) > 2.0
    known.learn_load(MODEL.model_id, FINGERPRINT, 4.0)
    assert known.load_s(MODEL.model_id, FINGERPRINT, 1 << 30) == 4.0
    known.learn_load(MODEL.model_id, FINGERPRINT, 2.0)
    assert known.load_s(MODEL.model_id, FINGERPRINT, 1 << 30) == 3.0
    assert known.load_s(MODEL.model_id, "another", 0) == small


def test_a_wake_is_learned_apart_from_a_load_and_expected_to_be_no_longer() -> None:
    known = Expectations()
    size = 1 << 30

    def expected(tier: LoadTier) -> float:
        return known.load_s(MODEL.model_id, FINGERPRINT, size, tier)

    assert WAKE_S_LEAST < expected(LoadTier.HOST) < expected(LoadTier.DISK)
    known.learn_load(MODEL.model_id, FINGERPRINT, 0.05)
    assert expected(LoadTier.HOST) == expected(LoadTier.DISK) == 0.05, "no wake has been seen"
    known.learn_load(MODEL.model_id, FINGERPRINT, 4.0)
    known.learn_load(MODEL.model_id, FINGERPRINT, 0.25, LoadTier.HOST)
    known.learn_load(MODEL.model_id, FINGERPRINT, 0.75, LoadTier.HOST)
    assert expected(LoadTier.HOST) == 0.5
    assert expected(LoadTier.DISK) == (0.05 + 4.0) / 2
