"""Which weights the swap rule has on the device."""

from math import inf

import pytest

from mesh.domain.ids import InstanceId
from mesh.policy.rules.headroom import HEADROOM
from mesh.policy.rules.registry import rule_named
from mesh.policy.rules.swapping import SWAPPING, SwapRule, Weights
from mesh.policy.rules.turns import name_of


def here(name: str, due_s: float = inf, *, may_go: bool = True) -> Weights:
    return Weights(
        instance_id=InstanceId(name), weights_bytes=10, resident=True, due_s=due_s, may_go=may_go
    )


def out(name: str, due_s: float = inf) -> Weights:
    return Weights(instance_id=InstanceId(name), weights_bytes=10, resident=False, due_s=due_s)


@pytest.mark.parametrize(
    ("weights", "free_bytes", "goes"),
    [
        ([here("a", 1.0), out("b", 9.0), out("c", 5.0)], 10, "c"),
        ([out("c", 5.0), out("b", 5.0)], 10, "b"),
        ([here("a", 1.0), out("b")], 10, None),
        ([here("a", 9.0), here("b", 7.0), out("c", 5.0)], 0, "a"),
        ([here("a"), here("b", 7.0), out("c", 5.0)], 9, "a"),
        ([here("a", 9.0, may_go=False), here("b", 7.0), out("c", 5.0)], 0, "b"),
        ([here("a", 4.0), here("b", 5.0), out("c", 5.0)], 0, None),
        ([here("a", 1.0), here("b", 2.0)], -1, "b"),
        ([here("a", 1.0, may_go=False)], -1, None),
    ],
    ids=[
        *("due-first-comes", "lesser-id-comes", "idle-stays-out"),
        *("due-last-goes", "idle-goes-first", "who-computes-stays", "nobody-is-due-later"),
        *("room-for-a-cache", "no-room-yet"),
    ],
)
def test_who_changes_sides(weights: list[Weights], free_bytes: int, goes: str | None) -> None:
    found = SWAPPING.swap(weights, free_bytes)
    assert (found and found.instance_id) == goes


def test_several_go_only_where_they_make_room_together() -> None:
    large = Weights(instance_id=InstanceId("c"), weights_bytes=20, resident=False, due_s=5.0)
    assert SWAPPING.swap([here("a", 9.0), here("b", 4.0), large], 0) is None
    found = SWAPPING.swap([here("a", 9.0), here("b", 6.0), large], 0)
    assert found is not None
    assert found.instance_id == "a"


def test_every_node_has_it_and_knows_that_it_swaps() -> None:
    assert isinstance(rule_named(name_of(SWAPPING)), SwapRule)
    assert not isinstance(HEADROOM, SwapRule)
