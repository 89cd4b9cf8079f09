"""Where a new instance goes."""

from dataclasses import dataclass

from mesh.domain.deployment import Deployment
from mesh.domain.ids import InstanceId, NodeId
from mesh.domain.model import Footprint
from mesh.domain.reasons import DeviceKind
from mesh.domain.steps import LoadTier
from mesh.policy.registry import policy
from mesh.request.placement import NoRoom, NoTime, Start, StartNode, place_instance
from tests.core.cells import FOOTPRINT, MIB, deployment

LLM_MESH = policy("llm-mesh")


@dataclass(frozen=True, kw_only=True)
class Node:
    node_id: NodeId
    free_bytes: int
    device: DeviceKind = DeviceKind.CPU
    capacity_bytes: int = 1000 * MIB
    idle: tuple[tuple[InstanceId, int], ...] = ()
    tier: LoadTier = LoadTier.DISK

    def footprint_of(self, deployment: Deployment) -> Footprint:
        return FOOTPRINT

    def tier_of(self, deployment: Deployment) -> LoadTier:
        return self.tier

    def reclaimable(self, sparing: Deployment | None = None) -> tuple[tuple[InstanceId, int], ...]:
        return self.idle


def kv_blocks(node: StartNode, footprint: Footprint) -> tuple[int, int]:
    """512 tokens at least, 1024 are wanted."""
    return footprint.blocks_for(512), footprint.blocks_for(1024)


def place(*nodes: Node, busy: str = "") -> Start | NoRoom | NoTime:
    """`busy` nodes, one letter each, have no time."""

    def has_time(node: StartNode) -> bool:
        return node.node_id not in busy

    return place_instance(
        deployment(),
        nodes,
        kv_blocks=kv_blocks,
        policy=LLM_MESH,
        has_time=has_time,
        looks_max=len(nodes),
    )


def test_an_instance_starts_on_the_tightest_node_with_room() -> None:
    roomy = Node(node_id=NodeId("a"), free_bytes=900 * MIB)
    tight = Node(node_id=NodeId("b"), free_bytes=120 * MIB)
    full = Node(node_id=NodeId("c"), free_bytes=100 * MIB)
    placed = place(roomy, tight, full)
    assert isinstance(placed, Start)
    assert (placed.node.node_id, placed.kv_blocks) == ("b", 20)


def test_idle_instances_make_room_oldest_first_and_no_more_than_needed() -> None:
    idle = ((InstanceId("x"), 50 * MIB), (InstanceId("y"), 50 * MIB), (InstanceId("z"), 50 * MIB))
    placed = place(Node(node_id=NodeId("a"), free_bytes=20 * MIB, idle=idle))
    assert isinstance(placed, Start)
    assert placed.reclaim == (InstanceId("x"), InstanceId("y"))
    assert placed.kv_blocks == 16, "no more is taken from others than is needed"


def test_without_enough_idle_memory_nothing_is_unloaded_in_vain() -> None:
    idle = ((InstanceId("x"), 50 * MIB),)
    placed = place(Node(node_id=NodeId("a"), free_bytes=20 * MIB, idle=idle, capacity_bytes=5))
    assert placed == NoRoom(needed_bytes=116 * MIB, largest_bytes=5)


def test_no_node_at_all_is_no_room() -> None:
    assert place() == NoRoom(needed_bytes=0, largest_bytes=0)


def test_nothing_is_unloaded_where_a_later_node_has_room() -> None:
    idle = ((InstanceId("x"), 150 * MIB),)
    first = Node(node_id=NodeId("a"), free_bytes=0, idle=idle)
    second = Node(node_id=NodeId("b"), free_bytes=116 * MIB)
    placed = place(first, second)
    assert isinstance(placed, Start)
    assert (placed.node.node_id, placed.reclaim) == ("b", ())


def test_no_room_is_in_vain_when_even_the_nearest_node_is_too_small() -> None:
    full = Node(node_id=NodeId("a"), free_bytes=0)
    small = Node(node_id=NodeId("b"), free_bytes=0, capacity_bytes=115 * MIB)
    assert place(full, small) == NoRoom(needed_bytes=116 * MIB, largest_bytes=1000 * MIB)
    alone = place(small)
    assert isinstance(alone, NoRoom)
    assert alone.in_vain


def test_a_node_without_time_is_passed_over_for_the_next_with_room() -> None:
    tight = Node(node_id=NodeId("a"), free_bytes=120 * MIB)
    roomy = Node(node_id=NodeId("b"), free_bytes=900 * MIB)
    placed = place(tight, roomy, busy="a")
    assert isinstance(placed, Start)
    assert placed.node.node_id == "b"


def test_when_no_node_with_room_has_time_that_is_what_is_missing() -> None:
    nodes = [Node(node_id=NodeId(name), free_bytes=120 * MIB) for name in "ab"]
    assert place(*nodes, busy="ab") == NoTime()
    full = Node(node_id=NodeId("c"), free_bytes=0)
    assert place(*nodes, full, busy="ab") == NoTime(), "more memory would not help either"


def test_idle_instances_go_on_another_node_when_the_one_with_room_has_no_time() -> None:
    busy = Node(node_id=NodeId("a"), free_bytes=120 * MIB, idle=((InstanceId("x"), 50 * MIB),))
    full = Node(node_id=NodeId("b"), free_bytes=0, idle=((InstanceId("y"), 150 * MIB),))
    placed = place(busy, full, busy="a")
    assert isinstance(placed, Start)
    assert (placed.node.node_id, placed.reclaim) == ("b", ("y",))


def test_of_nodes_that_rank_alike_the_one_with_the_model_nearest_comes_first() -> None:
    tiers = (LoadTier.REMOTE, LoadTier.DISK, LoadTier.PREPARED, LoadTier.HOST)
    nodes = [
        Node(node_id=NodeId(name), free_bytes=900 * MIB, tier=tier)
        for name, tier in zip("abcd", tiers, strict=True)
    ]
    for there, chosen in ((nodes, "d"), (nodes[:3], "c"), (nodes[:2], "b"), (nodes[:1], "a")):
        placed = place(*there)
        assert isinstance(placed, Start)
        assert placed.node.node_id == chosen


def test_where_the_model_sleeps_comes_first_of_nodes_that_rank_alike() -> None:
    awake = [Node(node_id=NodeId(name), free_bytes=900 * MIB) for name in "ab"]
    asleep = Node(node_id=NodeId("c"), free_bytes=900 * MIB, tier=LoadTier.HOST)
    tight = Node(node_id=NodeId("d"), free_bytes=120 * MIB)
    for nodes, chosen in (((*awake, asleep), "c"), (awake, "a"), ((*awake, asleep, tight), "d")):
        placed = place(*nodes)
        assert isinstance(placed, Start)
        assert placed.node.node_id == chosen


def test_time_is_asked_for_only_where_there_is_room() -> None:
    asked = []

    def has_time(node: StartNode) -> bool:
        asked.append(node.node_id)
        return True

    nodes = [
        Node(node_id=NodeId("a"), free_bytes=0),
        Node(node_id=NodeId("b"), free_bytes=120 * MIB),
    ]
    place_instance(
        deployment(),
        nodes,
        kv_blocks=kv_blocks,
        policy=LLM_MESH,
        has_time=has_time,
        looks_max=len(nodes),
    )
    assert asked == ["b"]


def looked_at(looks_max: int) -> tuple[str, Start | NoRoom | NoTime]:
    """Of nodes a to i, the fullest first, all of which are busy."""
    nodes = [Node(node_id=NodeId(n), free_bytes=(500 + k) * MIB) for k, n in enumerate("abcdefghi")]
    asked: list[str] = []

    def has_time(node: StartNode) -> bool | None:
        if len(asked) == looks_max:
            return None
        asked.append(node.node_id)
        return False

    placed = place_instance(
        deployment(),
        nodes,
        kv_blocks=kv_blocks,
        policy=LLM_MESH,
        has_time=has_time,
        looks_max=looks_max,
    )
    return "".join(asked), placed


def test_where_not_all_can_be_looked_at_the_fullest_and_the_emptiest_are() -> None:
    assert looked_at(5) == ("abcih", NoTime())
    assert looked_at(4) == ("abih", NoTime())
    assert looked_at(1) == ("a", NoTime())
    assert looked_at(0) == ("", NoTime())
    assert looked_at(9) == ("abcdefghi", NoTime())
