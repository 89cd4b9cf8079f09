"""Whom an instance may preempt, who gives way, and which nodes have room."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.ids import InstanceId, NodeId
from mesh.policy.room import enough, freed_bytes, roomy_first, victims


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    instance_id: InstanceId
    batch: int
    promised_bytes: int
    shared_bytes: int = 0
    """With all others that share."""

    def freed_bytes(self, after: Sequence["Neighbour"] = ()) -> int:
        """Two of a kind share what they do: the second that goes frees it."""
        if self.shared_bytes and not any(other.shared_bytes for other in after):
            return self.promised_bytes - self.shared_bytes
        return self.promised_bytes


def neighbour(name: str, batch: int, promised_bytes: int = 10) -> Any:
    return Neighbour(instance_id=InstanceId(name), batch=batch, promised_bytes=promised_bytes)


def taken(*neighbours: Any, batch: int = 4, missing_bytes: int = 10) -> str:
    found = victims(neighbours, neighbour("z", batch), missing_bytes)
    return "".join(each.instance_id for each in found)


def test_the_smallest_batch_goes_first_and_ties_go_by_id() -> None:
    assert taken(neighbour("a", 3), neighbour("c", 1), neighbour("b", 1)) == "b"
    assert taken(neighbour("a", 3), neighbour("c", 1), neighbour("b", 1), missing_bytes=20) == "bc"


def test_equals_and_larger_ones_never_go() -> None:
    assert taken(neighbour("a", 4), neighbour("b", 5)) == ""
    assert taken(neighbour("a", 3), neighbour("b", 4), missing_bytes=11) == ""


def test_nobody_goes_in_vain() -> None:
    assert taken(neighbour("a", 1, 5), neighbour("b", 2, 10)) == "b"
    assert taken(neighbour("a", 1), missing_bytes=0) == ""


NEIGHBOURS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 20)), max_size=6).map(
    lambda each: [neighbour(f"i{n}", batch, size) for n, (batch, size) in enumerate(each)]
)


@given(NEIGHBOURS, st.integers(1, 6), st.integers(1, 60))
def test_what_goes_is_enough_and_none_of_it_is_needless(
    neighbours: list[Any], batch: int, missing_bytes: int
) -> None:
    found = victims(neighbours, neighbour("z", batch), missing_bytes)
    freed = sum(each.promised_bytes for each in found)
    smaller = [each for each in neighbours if each.batch < batch]
    assert all(each in smaller for each in found)
    if not found:
        assert sum(each.promised_bytes for each in smaller) < missing_bytes
    else:
        assert freed >= missing_bytes
        assert all(freed - each.promised_bytes < missing_bytes for each in found)


@dataclass(frozen=True, kw_only=True)
class Node:
    node_id: NodeId
    free_bytes: int


class Cell:
    """Nodes for an instance of 10 bytes."""

    def __init__(self, free: str, looks_max: int = 9, shares: str = "") -> None:
        self.looks_max = looks_max
        self._free, self._shares = free, shares

    def starts(self) -> list[Node]:
        return [
            Node(node_id=NodeId(name), free_bytes=10 if name.islower() else 9)
            for name in self._free
        ]

    def lacks_bytes(self, node: Node) -> int:
        return 10 - node.free_bytes

    def shares_bytes(self, node: Node) -> int:
        return 5 * (node.node_id in self._shares)


def tried(free: str, looks_max: int = 9, shares: str = "") -> str:
    """Capitals are full."""
    cell: Any = Cell(free, looks_max, shares)
    return "".join(node.node_id for node in roomy_first(cell))


def test_nodes_with_room_come_before_those_that_idle_instances_can_make_room_on() -> None:
    assert tried("aBcD") == "acBD"
    assert tried("") == ""


def test_where_not_all_can_be_looked_at_the_fullest_and_the_emptiest_are() -> None:
    """And one more, at which it shows that there were others."""
    assert tried("abcdefghi", 5) == "abcihd"
    assert tried("abcdefghi", 4) == "abihc"
    assert tried("abcdefghi", 0) == "a"
    assert tried("abcdefghi", 9) == "abcdefghi"


def test_of_nodes_with_room_those_that_have_the_weights_come_first() -> None:
    assert tried("aBcDe", shares="cD") == "caeBD"
    assert tried("abcdefghi", 5, shares="e") == "eabihc"


def test_weights_that_two_share_are_freed_with_the_second() -> None:
    idle: list[Any] = [
        Neighbour(instance_id=InstanceId(name), batch=0, promised_bytes=50, shared_bytes=shared)
        for name, shared in (("x", 40), ("y", 40), ("z", 0))
    ]
    assert [each.instance_id for each in enough(idle, 11)] == ["x", "y"]
    assert [each.instance_id for each in enough(idle, 61)] == ["x", "y", "z"]
    assert freed_bytes(idle) == 110
    assert not enough(idle[:1], 11)
    found = victims(idle, neighbour("w", 1), 50)
    assert [each.instance_id for each in found] == ["x", "y"], "both, or nobody's weights go"


def test_idle_instances_make_room_in_order_and_no_more_of_them_than_needed() -> None:
    idle = [neighbour(name, 0, 50) for name in "xyz"]
    assert [each.instance_id for each in enough(idle, 96)] == ["x", "y"]
    assert not enough(idle[:1], 96), "nothing is unloaded in vain"
