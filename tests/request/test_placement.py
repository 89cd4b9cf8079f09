"""Where a request and a new instance go."""

from dataclasses import dataclass

from mesh.domain.deployment import Deployment
from mesh.domain.ids import InstanceId, NodeId
from mesh.domain.model import Footprint
from mesh.domain.reasons import DeviceKind
from mesh.policy.registry import policy
from mesh.request.placement import NoRoom, Reclaim, Start, Wait, first_with_room, place_instance
from tests.core.cells import FOOTPRINT, MIB, deployment

PACK = policy("llm-mesh")


@dataclass(frozen=True, kw_only=True)
class Instance:
    instance_id: InstanceId
    device: DeviceKind = DeviceKind.CPU
    batch: int = 0
    room: int = 100

    def has_room_for(self, tokens: int) -> bool:
        return tokens <= self.room


@dataclass(frozen=True, kw_only=True)
class Node:
    node_id: NodeId
    free_bytes: int
    device: DeviceKind = DeviceKind.CPU
    capacity_bytes: int = 1000 * MIB
    leaving_bytes: int = 0
    idle: tuple[tuple[InstanceId, int], ...] = ()

    def footprint_of(self, deployment: Deployment) -> Footprint:
        return FOOTPRINT

    def reclaimable(self) -> tuple[tuple[InstanceId, int], ...]:
        return self.idle


def place(*nodes: Node) -> Start | Wait | Reclaim | NoRoom:
    return place_instance(deployment(), nodes, kv_tokens_wanted=1024, policy=PACK)


def test_a_request_goes_to_the_largest_batch_with_room_and_to_a_cpu_first() -> None:
    small = Instance(instance_id=InstanceId("a"), batch=1)
    large = Instance(instance_id=InstanceId("b"), batch=5)
    full = Instance(instance_id=InstanceId("c"), batch=9, room=0)
    gpu = Instance(instance_id=InstanceId("d"), batch=8, device=DeviceKind.GPU)
    assert first_with_room([gpu, small, large, full], 10, PACK) is large
    assert first_with_room([gpu, full], 10, PACK) is gpu
    assert first_with_room([full], 10, PACK) is None


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
    assert placed == Reclaim(instance_ids=(InstanceId("x"), InstanceId("y")))


def test_without_enough_idle_memory_nothing_is_unloaded_in_vain() -> None:
    idle = ((InstanceId("x"), 50 * MIB),)
    placed = place(Node(node_id=NodeId("a"), free_bytes=20 * MIB, idle=idle, capacity_bytes=5))
    assert placed == NoRoom(needed_bytes=116 * MIB, largest_bytes=5)


def test_no_node_at_all_is_no_room() -> None:
    assert place() == NoRoom(needed_bytes=0, largest_bytes=0)


def test_room_that_is_about_to_appear_is_waited_for_before_another_is_unloaded() -> None:
    idle = ((InstanceId("x"), 150 * MIB),)
    first = Node(node_id=NodeId("a"), free_bytes=0, idle=idle)
    leaving = Node(node_id=NodeId("b"), free_bytes=16 * MIB, leaving_bytes=100 * MIB)
    assert place(first, leaving) == Wait()
    too_little = Node(node_id=NodeId("b"), free_bytes=15 * MIB, leaving_bytes=100 * MIB)
    assert place(first, too_little) == Reclaim(instance_ids=(InstanceId("x"),))


def test_no_room_is_in_vain_when_even_the_nearest_node_is_too_small() -> None:
    full = Node(node_id=NodeId("a"), free_bytes=0)
    small = Node(node_id=NodeId("b"), free_bytes=0, capacity_bytes=115 * MIB)
    assert place(full, small) == NoRoom(needed_bytes=116 * MIB, largest_bytes=1000 * MIB)
    alone = place(small)
    assert isinstance(alone, NoRoom)
    assert alone.in_vain
