"""Policies by name."""

import pytest

from mesh.domain.errors import InvalidInput
from mesh.policy.registry import DEFAULT_POLICY, policy


def test_a_policy_is_found_by_its_name_and_an_unknown_one_lists_the_known() -> None:
    assert policy(DEFAULT_POLICY).name == DEFAULT_POLICY
    with pytest.raises(InvalidInput, match="no policy 'nope'") as caught:
        policy("nope")
    assert DEFAULT_POLICY in caught.value.hint
