"""What the cell expects of a model on a device, before and after it has seen it."""

from dataclasses import replace

from mesh.core.expectations import LOAD_S_LEAST, Expectations
from mesh.domain.ids import ModelId
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
