"""Placements keep memory and device time; on small cases they are near the exact ones."""

import random
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.errors import InvalidInput
from mesh.plan.conserving import models, operators
from mesh.plan.placement import (
    Piece,
    Placement,
    devices_of,
    place_conserving,
    place_greedy,
    place_whole,
)
from mesh.plan.planners import plan_model, plan_operators
from mesh.plan.problem import held_bytes
from tests.plan.problems import known, staffed, whole_load

PIECES = st.lists(
    st.tuples(st.floats(0.01, 1.0), st.integers(1, 100), st.integers(0, 5)), min_size=1, max_size=30
)


def made(drawn: list[tuple[float, int, int]]) -> list[Piece]:
    ordered = sorted(drawn, key=lambda one: one[2])
    return [Piece(station=of, load=load, memory_bytes=size) for load, size, of in ordered]


def packed(pieces: list[Piece], load: float, memory_bytes: int) -> Placement:
    """The placement on the fewest devices with which any is found."""
    tried = (place_conserving(pieces, load, memory_bytes, n) for n in range(1, len(pieces) + 1))
    return next(placement for placement in tried if placement is not None)


@given(PIECES)
def test_no_device_has_more_than_its_time_and_memory(drawn: list[tuple[float, int, int]]) -> None:
    pieces = made(drawn)
    placement = packed(pieces, 1.2, 150)
    stations = [number for number, devices in enumerate(placement) for _ in devices]
    assert stations == [piece.station for piece in pieces]
    at = [device for devices in placement for device in devices]
    for device in range(max(at) + 1):
        own = [piece for piece, there in zip(pieces, at, strict=True) if there == device]
        assert sum(piece.load for piece in own) <= 1.2 * (1 + 1e-6)
        assert sum(piece.memory_bytes for piece in own) <= 150


def fewest(pieces: list[Piece], devices: list[tuple[float, int]]) -> int:
    """The fewest devices of load 1 and 100 bytes that take all pieces beside what some hold, by
    trying all.
    """
    if not pieces:
        return len(devices)
    first, *others = pieces
    found = fewest(others, [*devices, (first.load, first.memory_bytes)])
    for n, (load, taken_bytes) in enumerate(devices):
        load, taken_bytes = load + first.load, taken_bytes + first.memory_bytes
        if load <= 1 + 1e-9 and taken_bytes <= 100:
            placed = [*devices[:n], (load, taken_bytes), *devices[n + 1 :]]
            found = min(found, fewest(others, placed))
    return found


def test_200_small_cases_are_within_five_per_cent_of_the_exact_ones() -> None:
    draw = random.Random(1)
    found = exact = 0
    for _ in range(200):
        count = draw.randint(2, 9)
        pieces = made(
            [(draw.uniform(0.05, 0.9), draw.randint(5, 90), number) for number in range(count)]
        )
        placement = packed(pieces, 1.0, 100)
        least = fewest(pieces, [])
        assert least <= devices_of(placement) <= least + 1
        found += devices_of(placement)
        exact += least
    assert found <= 1.05 * exact


def test_what_is_too_large_for_a_device_is_said() -> None:
    with pytest.raises(InvalidInput, match=r"takes 2\.0 GB; a device has 1\.0 GB"):
        place_conserving([Piece(station=0, load=0.1, memory_bytes=2 * 10**9)], 1.0, 10**9, 1)
    with pytest.raises(InvalidInput, match=r"has a load of 2\.000"):
        place_conserving([Piece(station=0, load=2.0, memory_bytes=1)], 1.0, 10**9, 1)
    three = [Piece(station=0, load=0.9, memory_bytes=1)] * 3
    assert place_conserving(three, 1.0, 9, 2) is None


@pytest.mark.parametrize(("tokens", "models_", "shared"), [(1024, 4, 2), (2048, 7, 4)])
def test_algorithm_2_plans_less_device_time_than_the_work_takes(
    tokens: int, models_: int, shared: int
) -> None:
    """As printed, it lengthens who joins a device and not who is there."""
    problem = known(40, tokens)
    plan = plan_operators(problem)
    placement = place_greedy(problem, plan)
    assert devices_of(place_whole(plan_model(problem))) == models_
    assert devices_of(placement) == shared
    most = problem.yields(1)[-1]
    assert whole_load(problem) > most * devices_of(placement)


def test_whole_models_may_share_a_device() -> None:
    assert place_whole(staffed(known(40).whole, replicas=5), lanes=2) == ((0, 0, 1, 1, 2),)


def test_conserving_candidates_take_no_more_than_devices_yield() -> None:
    """Candidates of whole models, then of operators: those with the fewest devices come first."""
    problem = known(20)
    load = whole_load(problem)
    yields = problem.yields(1)
    first = next(models(problem, 1))
    assert first.devices > load
    assert first.expected_s <= problem.slo_s
    every = list(operators(problem, plan_operators, first))
    assert every[-1] is first
    assert [one.devices for one in every] == sorted(one.devices for one in every)
    for one in every[:-1]:
        assert one.lanes is not None
        assert one.devices * yields[one.lanes] > load
        assert one.memory_bytes(problem) < first.memory_bytes(problem) or (
            one.devices < first.devices
        )


def test_what_shares_a_device_has_its_weights_once() -> None:
    """Two streams of a whole model, and the operators of one, alike; algorithm 2 counts its bases,
    too: 65,536 tokens of the mixture fit with one operator's activations, not with all of them.
    """
    problem = known(1, 65536, "qwen2-57b-a14b")
    plan = plan_operators(problem)
    choices = [each.choice for each in plan]
    once = held_bytes(choices, dict.fromkeys(range(len(choices)), 1), None)
    assert once == problem.whole[0].memory_bytes <= problem.table.device.memory_bytes
    assert len(place_greedy(problem, plan)) == len(plan)
    stations = zip(plan, problem.stations, strict=True)
    with pytest.raises(InvalidInput, match="one replica takes 136"):
        place_greedy(problem, tuple(replace(each, choice=of[-1]) for each, of in stations))
    whole = known(4, 512).whole[0]
    two = held_bytes((whole,), {0: 2}, 2)
    assert two - whole.memory_bytes == whole.kv_bytes + whole.transient_bytes
    candidates = list(islice(models(known(4, 1024, "qwen2-57b-a14b"), 2), 8))
    assert any(len(of.placement[0]) == 2 * of.devices for of in candidates), "57 GB, once"
    batches = {of.plan[0].batch for of in candidates}
    assert {1, 8} <= batches, "the smallest and the largest batch are candidates"
