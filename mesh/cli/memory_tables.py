"""What the read verbs show of memory: the books of nodes and the KV caches of instances.

Pure: views in, text out. `tables` has what is not memory, `output` aligns and prints.
"""

from math import isfinite

from mesh.cli.output import Column, number, word
from mesh.cli.tables import mebibytes
from mesh.domain.model import Footprint
from mesh.domain.views import InstanceSnapshot, MemoryOperationView, NodeSnapshot
from mesh.report.memory_parts import free_bytes

NODE_MEMORY: tuple[Column[NodeSnapshot], ...] = (
    word("NODE", lambda n: n.node_id),
    number("LIMIT_MIB", lambda n: mebibytes(n.memory_bytes)),
    number("BASE_MIB", lambda n: mebibytes(n.base_bytes)),
    number("PROMISED_MIB", lambda n: mebibytes(n.promised_bytes)),
    number("TRACKED_MIB", lambda n: mebibytes(n.tracked_bytes)),
    number("FREE_MIB", lambda n: mebibytes(free_bytes(n))),
    number("RSS_MIB", lambda n: mebibytes(n.rss_bytes)),
    number("UNACCOUNTED_MIB", lambda n: mebibytes(n.unaccounted_bytes)),
    number("WAITING", lambda n: sum(not operation.running for operation in n.operations)),
)
KV_CACHES: tuple[Column[InstanceSnapshot], ...] = (
    word("INSTANCE", lambda i: i.instance_id),
    number("USED", lambda i: i.kv_blocks_used),
    number("CACHED", lambda i: i.kv_blocks_cached),
    number("KV_BLOCKS", lambda i: i.kv_blocks),
    number("WEIGHTS_MIB", lambda i: mebibytes(i.weights_bytes)),
    number("KV_USED_MIB", lambda i: mebibytes(i.kv_used_bytes)),
    number("KV_HELD_MIB", lambda i: mebibytes(i.kv_bytes)),
    number("REQUIRED_MIB", lambda i: mebibytes(i.kv_required_bytes)),
)
FOOTPRINTS: tuple[Column[tuple[str, Footprint]], ...] = (
    word("SHAPE", lambda f: f[0]),
    number("INSTANCE_MIB", lambda f: mebibytes(f[1].weights_bytes)),
    number("SHARED_MIB", lambda f: mebibytes(f[1].shared_bytes)),
    number("KV_BLOCK_KIB", lambda f: f[1].kv_block_bytes // 1024),
)
OPERATIONS: tuple[Column[MemoryOperationView], ...] = (
    word("OPERATION", lambda o: o.kind),
    word("INSTANCE", lambda o: o.instance_id),
    number("SIZE_MIB", lambda o: mebibytes(o.size_bytes)),
    word("STATE", lambda o: "running" if o.running else "waiting"),
    number("NEEDED_IN_S", lambda o: f"{o.needed_in_s:.2f}" if isfinite(o.needed_in_s) else None),
)
