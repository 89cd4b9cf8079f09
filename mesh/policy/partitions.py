"""Partitions of nodes: what an instance gets where a policy cuts nodes instead of sharing them.

The baselines give an instance an equal part of a node with all of its memory, and let it take as
many requests as that partition can serve at most: full contexts in its memory, and a decode of all
of them within the TPOT SLO (the "tailored" concurrency limits of LLM-Mesh §8.1). Weights that it
shares count in full: once the one that it shares them with has gone they are in its part alone.
"""

from math import inf

from mesh.compute.times import Times
from mesh.domain.values import dataclass
from mesh.policy.interface import KvDemand, KvSize, StartDemand
from mesh.policy.room import by_demand


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """What an instance gets on a node that is cut into parts, for one model."""

    kv_blocks: int
    batch_max: int
    """Requests that it serves at a time."""


def kv_of_part(demand: KvDemand, parts: int, *, counts: bool = False) -> KvSize:
    """The KV cache of an instance that has one of at most so many parts of its node, from its load
    to its end. `counts`: it takes no more requests than that part serves in time.
    """
    if demand.start is None:
        size = by_demand(demand)
        size.kept_blocks_max = inf
        return size
    part = partition_for(demand.start, parts)
    batch_max = part.batch_max if counts else None
    return KvSize(required_blocks=part.kv_blocks, wanted_blocks=part.kv_blocks, batch_max=batch_max)


def partition_for(demand: StartDemand, partitions_max: int) -> Partition:
    """The smallest partition, `1 / partitions_max` of the node or more, that can serve a request.
    Where none can in time, the whole node; where that has no memory for it, more than the node has.
    A partition computes as if it had its share of the node's time.
    """
    node, footprint, context = demand.node, demand.footprint, demand.context_tokens
    times = Times(demand.profile())
    context_blocks = footprint.blocks_for(context)
    for partitions in range(partitions_max, 0, -1):
        kv_bytes = node.capacity_bytes // partitions - footprint.instance_bytes(0)
        kv_blocks = kv_bytes // footprint.kv_block_bytes
        contexts = kv_blocks // context_blocks
        batch = min(contexts, _batch_in_time(times, context, demand.tpot_s / partitions, contexts))
        if batch >= 1:
            return Partition(kv_blocks=kv_blocks, batch_max=batch)
    return Partition(kv_blocks=max(kv_blocks, context_blocks), batch_max=1)


def _batch_in_time(times: Times, context_tokens: int, limit_s: float, most: int) -> int:
    """The largest batch, up to `most`, of which a decode takes no longer than the limit."""
    low, high = 0, max(most, 0)
    while low < high:
        middle = (low + high + 1) // 2
        if times.decode_s(middle, context_tokens) <= limit_s:
            low = middle
        else:
            high = middle - 1
    return low
