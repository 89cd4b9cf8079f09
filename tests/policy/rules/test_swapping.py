"""Which weights the swap rule has on the device."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf, nan

import pytest

from mesh.domain.errors import InvalidInput
from mesh.domain.ids import InstanceId
from mesh.policy.rules.headroom import HEADROOM
from mesh.policy.rules.registry import rule_named
from mesh.policy.rules.swapping import (
    SWAPPING,
    WHOLE,
    Swap,
    Swapping,
    SwapRule,
    Weights,
    by_whole,
    wanted,
)
from mesh.policy.rules.turns import name_of


def part(name: str, share: float, due_s: float = inf, *, may_go: bool = True) -> Weights:
    return Weights(
        instance_id=InstanceId(name), weights_bytes=80, share=share, due_s=due_s, may_go=may_go
    )


def here(name: str, due_s: float = inf, *, may_go: bool = True) -> Weights:
    return part(name, 1.0, due_s, may_go=may_go)


def out(name: str, due_s: float = inf) -> Weights:
    return part(name, 0.0, due_s)


@pytest.mark.parametrize(
    ("weights", "free_bytes", "goes"),
    [
        ([here("a", 1.0), out("b", 9.0), out("c", 5.0)], 80, "c"),
        ([out("c", 5.0), out("b", 5.0)], 80, "b"),
        ([here("a", 1.0), out("b")], 80, None),
        ([here("a", 9.0), here("b", 7.0), out("c", 5.0)], 0, "a"),
        ([here("a"), here("b", 7.0), out("c", 5.0)], 79, "a"),
        ([here("a", 9.0, may_go=False), here("b", 7.0), out("c", 5.0)], 0, "b"),
        ([here("a", 4.0), here("b", 5.0), out("c", 5.0)], 0, None),
        ([here("a", 4.0), here("d", 5.0), out("c", 5.0)], 0, "d"),
        ([here("a", 1.0), here("b", 2.0)], -1, "b"),
        ([here("a", 1.0, may_go=False)], -1, None),
    ],
    ids=[
        *("due-first-comes", "lesser-id-comes", "idle-stays-out"),
        *("due-last-goes", "idle-goes-first", "who-computes-stays"),
        *("nobody-is-due-later", "greater-id-goes"),
        *("room-for-a-cache", "no-room-yet"),
    ],
)
def test_who_changes_sides(weights: list[Weights], free_bytes: int, goes: str | None) -> None:
    found = WHOLE.swap(weights, free_bytes)
    assert (found and found.instance_id) == goes


def test_several_go_only_where_they_make_room_together() -> None:
    large = Weights(instance_id=InstanceId("c"), weights_bytes=160, share=0.0, due_s=5.0)
    assert WHOLE.swap([here("a", 9.0), here("b", 4.0), large], 0) is None
    assert WHOLE.swap([here("a", 9.0), here("b", 6.0), large], 0) == ("a", 0.0)


@pytest.mark.parametrize(
    ("weights", "free_bytes", "swap"),
    [
        ([out("c", 5.0)], 80, ("c", 0.125)),
        ([part("c", 0.875, 5.0), out("d", 6.0)], 80, ("c", 1.0)),
        ([part("c", 0.875, 5.0), out("d", 4.0)], 80, ("d", 0.125)),
        ([here("a", 9.0), out("c", 5.0)], 40, ("c", 0.125)),
        ([here("a", 9.0), part("c", 0.5, 5.0)], 9, ("a", 0.5)),
        ([part("a", 0.25, 9.0), here("b", 7.0), part("c", 0.5, 5.0)], 0, ("a", 0.0)),
        ([part("c", 0.5, 5.0), part("d", 0.5, 5.0)], 0, ("d", 0.0)),
        ([here("a", 9.0)], -11, ("a", 0.75)),
    ],
    ids=[
        *("a-part-comes", "the-last-part", "whoever-is-due-sooner-passes", "into-what-is-free"),
        *("as-many-parts-go-as-make-room", "the-rest-comes-from-another", "one-of-two-halves"),
        "for-a-cache",
    ],
)
def test_weights_come_and_go_by_parts(
    weights: list[Weights], free_bytes: int, swap: tuple[str, float]
) -> None:
    assert Swapping(parts=8).swap(weights, free_bytes) == swap


def test_every_node_has_it_and_knows_that_it_swaps() -> None:
    assert isinstance(rule_named(name_of(SWAPPING)), SwapRule)
    assert not isinstance(HEADROOM, SwapRule)


@pytest.mark.parametrize(
    ("name", "share", "moves"),
    [("a", 0.5, True), ("a", 1.0, False), ("b", 0.5, False), ("a", 1.5, False), ("a", nan, False)],
)
def test_an_answer_of_which_nothing_comes_is_none(name: str, share: float, moves: bool) -> None:
    class Own(Swapping):
        def swap(self, weights: Sequence[Weights], free_bytes: int) -> Swap | None:
            return Swap(InstanceId(name), share)

    assert (wanted(Own(), [here("a")], 0) is not None) == moves


def test_weights_come_in_one_part_at_least() -> None:
    with pytest.raises(InvalidInput, match="1 part or more"):
        rule_named(replace(name_of(SWAPPING), parameters=(("parts", 0.0),)))


def test_an_engine_that_moves_whole_weights_follows_it_by_whole() -> None:
    assert rule_named(name_of(by_whole(SWAPPING))) == WHOLE
    assert by_whole(HEADROOM) is HEADROOM
