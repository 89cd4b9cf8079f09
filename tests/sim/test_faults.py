"""Which faults a run has: they follow from the seed, in time, and as often as the scenario says."""

from collections import Counter
from dataclasses import replace

import pytest

from mesh.domain.errors import InvalidInput
from mesh.domain.ids import NodeId
from mesh.sim.faults import SHAPES, FaultKind, Faults, check_faults, occurrences

NODES = [NodeId("a"), NodeId("b"), NodeId("c")]
FAULTS = Faults(until_s=600.0, per_minute=dict.fromkeys(FaultKind, 3.0))


def test_they_follow_from_the_seed_and_a_further_kind_leaves_the_others_alone() -> None:
    drawn = occurrences(FAULTS, NODES, 5)
    assert drawn == occurrences(FAULTS, NODES, 5)
    assert drawn != occurrences(FAULTS, NODES, 6)
    fewer = replace(FAULTS, per_minute={FaultKind.CRASH: 3.0})
    assert list(occurrences(fewer, NODES, 5)) == [f for f in drawn if f.kind is FaultKind.CRASH]


def test_they_are_in_order_over_in_time_and_within_their_bounds() -> None:
    drawn = occurrences(FAULTS, NODES, 1)
    assert [f.at_s for f in drawn] == sorted(f.at_s for f in drawn)
    for fault in drawn:
        shape = SHAPES[fault.kind]
        assert 0 <= fault.at_s <= fault.until_s <= FAULTS.until_s
        assert fault.until_s - fault.at_s <= shape.lasts_s[1]
        assert shape.size[0] <= fault.size <= shape.size[1]
    assert {fault.node_id for fault in drawn} == set(NODES)


def test_there_are_as_many_as_the_scenario_says() -> None:
    counts = Counter(fault.kind for seed in range(20) for fault in occurrences(FAULTS, NODES, seed))
    assert all(500 < counts[kind] < 700 for kind in FaultKind), counts


def test_where_each_seed_has_its_own_mix_some_lack_a_kind_and_some_have_much_of_it() -> None:
    varied = replace(FAULTS, vary=True)
    crashes = [
        sum(f.kind is FaultKind.CRASH for f in occurrences(varied, NODES, seed))
        for seed in range(100)
    ]
    assert crashes.count(0) >= 10
    assert sum(count > 60 for count in crashes) >= 10


@pytest.mark.parametrize(
    "faults",
    [
        replace(FAULTS, until_s=0.0),
        replace(FAULTS, per_minute={FaultKind.CRASH: -1.0}),
        replace(FAULTS, per_minute={FaultKind.CRASH: float("nan")}),
    ],
)
def test_what_cannot_be_meant_is_refused(faults: Faults) -> None:
    with pytest.raises(InvalidInput, match="faults"):
        check_faults(faults)
