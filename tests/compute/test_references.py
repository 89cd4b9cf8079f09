"""The profiles that come along are whole."""

from itertools import pairwise

import pytest

from mesh.compute.references import REFERENCES
from mesh.domain.profile import Profile
from mesh.domain.reasons import DeviceKind


def test_each_has_a_model_and_a_device_of_its_own() -> None:
    keys = [(profile.model_id, profile.fingerprint) for profile in REFERENCES]
    assert len(set(keys)) == len(keys)
    assert {profile.device for profile in REFERENCES} == set(DeviceKind)


@pytest.mark.parametrize("profile", REFERENCES, ids=lambda p: f"{p.model_id} on {p.hardware}")
def test_its_tables_begin_with_one_token_and_ascend(profile: Profile) -> None:
    assert profile.measured
    for grid in (profile.prefill, profile.decode):
        assert grid.rows[0] == 1
        assert all(left < right for left, right in pairwise(grid.rows))
        for above, below in pairwise(grid.seconds):
            assert all(a <= b for a, b in zip(above, below, strict=True))
        for row in grid.seconds:
            assert 0.001 < row[0] <= row[-1] < 10


def test_a_published_figure_is_found_again() -> None:
    """SLINFER, table I: Llama-2-7B on the Xeon, 196 ms for a batch of 32 at 1,024 tokens."""
    profile = REFERENCES[0]
    assert profile.model_id == "Llama-2-7B"
    assert profile.decode.at(32, 1024) == 0.196
    assert profile.prefill.at(1024, 0) == 0.567
