"""The transition tables and the page that is generated from them."""

import pytest

from mesh.domain.lifecycle import INSTANCE, TABLES, InstanceState, advance
from scripts.gen_lifecycle import TARGET, page


def test_the_documented_diagrams_are_current() -> None:
    assert TARGET.read_text(encoding="utf-8") == page(), "run python scripts/gen_lifecycle.py"


def test_every_state_can_be_reached_and_every_target_is_a_state() -> None:
    for table in TABLES.values():
        states = list(table)
        reached = {states[0]}
        for _ in states:
            reached |= {to for state in reached for to in table[state]}
        assert reached == set(states)


def test_a_transition_that_is_not_in_the_table_fails_where_it_is_made() -> None:
    assert advance(INSTANCE, InstanceState.LOADING, InstanceState.READY) is InstanceState.READY
    with pytest.raises(ValueError, match="from gone to ready"):
        advance(INSTANCE, InstanceState.GONE, InstanceState.READY)
