"""What the read verbs show of memory: the books of nodes and the KV caches of instances.

Pure: views in, rows of text out. `tables` has what is not memory, `output` aligns and prints.
"""

from collections.abc import Sequence
from math import isfinite

from mesh.cli.output import Column
from mesh.cli.tables import Row, mebibytes
from mesh.domain.views import InstanceSnapshot, MemoryOperationView, NodeSnapshot

NODE_MEMORY = (
    Column("NODE"),
    Column("LIMIT_MIB", right=True),
    Column("BASE_MIB", right=True),
    Column("PROMISED_MIB", right=True),
    Column("TRACKED_MIB", right=True),
    Column("FREE_MIB", right=True),
    Column("RSS_MIB", right=True),
    Column("UNACCOUNTED_MIB", right=True),
    Column("WAITING", right=True),
)
KV_CACHES = (
    Column("INSTANCE"),
    Column("KV_BLOCKS_USED", right=True),
    Column("KV_BLOCKS", right=True),
    Column("WEIGHTS_MIB", right=True),
    Column("KV_USED_MIB", right=True),
    Column("KV_HELD_MIB", right=True),
    Column("KV_REQUIRED_MIB", right=True),
)
OPERATIONS = (
    Column("OPERATION"),
    Column("INSTANCE"),
    Column("SIZE_MIB", right=True),
    Column("STATE"),
    Column("NEEDED_IN_S", right=True),
)


def node_memory_rows(nodes: Sequence[NodeSnapshot]) -> list[Row]:
    return [
        (
            node.node_id,
            mebibytes(node.memory_bytes),
            mebibytes(node.base_bytes),
            mebibytes(node.promised_bytes),
            mebibytes(node.tracked_bytes),
            mebibytes(free_bytes(node)),
            mebibytes(node.rss_bytes),
            mebibytes(node.unaccounted_bytes),
            str(sum(not operation.running for operation in node.operations)),
        )
        for node in nodes
    ]


def free_bytes(node: NodeSnapshot) -> int:
    """What can still be promised; negative on a node that holds more than its limit."""
    return node.memory_bytes - node.base_bytes - node.promised_bytes


def kv_rows(instances: Sequence[InstanceSnapshot]) -> list[Row]:
    return [
        (
            instance.instance_id,
            str(instance.kv_blocks_used),
            str(instance.kv_blocks),
            mebibytes(instance.weights_bytes),
            mebibytes(instance.kv_used_bytes),
            mebibytes(instance.kv_bytes),
            mebibytes(instance.kv_required_bytes),
        )
        for instance in instances
    ]


def operation_rows(operations: Sequence[MemoryOperationView]) -> list[Row]:
    return [
        (
            operation.kind,
            operation.instance_id,
            mebibytes(operation.size_bytes),
            "running" if operation.running else "waiting",
            f"{operation.needed_in_s:.2f}" if isfinite(operation.needed_in_s) else "",
        )
        for operation in operations
    ]
