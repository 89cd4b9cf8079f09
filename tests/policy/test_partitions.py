"""What an instance gets where nodes are cut into equal partitions."""

from dataclasses import dataclass

from mesh.domain.ids import NodeId
from mesh.domain.model import Footprint
from mesh.domain.profile import Grid
from mesh.domain.reasons import DeviceKind
from mesh.policy.interface import StartDemand
from mesh.policy.partitions import Partition, partition_for
from tests.support.profiles import profile

FOOTPRINT = Footprint(weights_bytes=100, kv_block_bytes=1, block_tokens=10)
ONE_MORE = profile(decode=Grid(rows=(1, 101), columns=(0,), seconds=((0.01,), (1.01,))))
"""A decode takes 10 ms for each request."""


NODE = NodeId("n")


@dataclass(frozen=True, kw_only=True)
class Node:
    capacity_bytes: int
    free_bytes: int
    node_id: NodeId = NODE
    device: DeviceKind = DeviceKind.CPU
    prefetch_bytes: int = 0
    running: int = 0
    swaps: bool = False
    moves_kv: bool = False
    iteration_started_s: float | None = None


def partition(
    *, partitions_max: int, capacity_bytes: int = 1000, tpot_s: float = 0.25
) -> Partition:
    demand = StartDemand(
        node=Node(capacity_bytes=capacity_bytes, free_bytes=capacity_bytes),
        footprint=FOOTPRINT,
        profile=lambda: ONE_MORE,
        context_tokens=100,
        tpot_s=tpot_s,
    )
    return partition_for(demand, partitions_max)


def test_a_whole_node_serves_what_its_time_allows() -> None:
    assert partition(partitions_max=1) == Partition(kv_blocks=900, batch_max=25)


def test_or_what_its_memory_holds_in_full_contexts() -> None:
    assert partition(partitions_max=1, capacity_bytes=180) == Partition(kv_blocks=80, batch_max=8)


def test_half_a_node_has_half_its_memory_and_half_its_time() -> None:
    assert partition(partitions_max=2) == Partition(kv_blocks=400, batch_max=12)


def test_a_model_that_half_a_node_cannot_serve_gets_the_whole() -> None:
    assert partition(partitions_max=2, tpot_s=0.015) == Partition(kv_blocks=900, batch_max=1)
    assert partition(partitions_max=2, capacity_bytes=210) == Partition(kv_blocks=110, batch_max=11)


def test_a_model_that_no_node_can_serve_in_time_gets_one_request_at_a_time() -> None:
    assert partition(partitions_max=2, tpot_s=0.001) == Partition(kv_blocks=900, batch_max=1)


def test_no_part_holds_less_than_a_full_context() -> None:
    for capacity_bytes in (90, 100, 109):
        too_much = partition(partitions_max=2, capacity_bytes=capacity_bytes)
        assert too_much == Partition(kv_blocks=10, batch_max=1)
        assert FOOTPRINT.instance_bytes(too_much.kv_blocks) > capacity_bytes
