"""What holds of an engine's KV blocks: each is free, used or cached, held by who has it in a table,
and its key says what it holds.

Before: whoever watches a virtual engine. After: nothing; a rule that is broken raises.
"""

from collections import Counter

from mesh.memory.block_keys import next_key
from mesh.sim.invariants.rule import hold
from mesh.sim.sequences import Instance, Sequence
from mesh.sim.virtual_engine import VirtualEngine


def check_blocks(engine: VirtualEngine) -> None:
    for name, instance in engine.instances():
        pool, sequences = instance.pool, instance.sequences.values()
        size = instance.footprint.block_tokens
        tables = [s.prefix.table for s in sequences if s.prefix is not None]
        holders = Counter(block for table in tables for block in table)
        counted = sum(s.capacity_tokens // size for s in sequences if s.prefix is None)
        used = counted + len(holders)
        hold(pool.used == used, "{} has {} KV blocks used, not {}", name, pool.used, used)
        named = dict(pool.named())
        cached = sum(block not in holders for block in named.values())
        hold(pool.cached == cached, "{} has {} KV blocks cached, not {}", name, pool.cached, cached)
        for block in named.values():
            have, told = holders.get(block, 0), pool.holders(block)
            hold(have == told, "{} have block {} of {}, not {}", have, block, name, told)
        for sequence in sequences:
            if sequence.prefix is not None:
                _check_keys(instance, sequence, named)
                break  # one of them at a time is enough


def _check_keys(instance: Instance, sequence: Sequence, named: dict[bytes, int]) -> None:
    """Its blocks have the keys of its tokens, worked out anew."""
    prefix, size = sequence.prefix, instance.footprint.block_tokens
    assert prefix is not None
    key = prefix.walk.root
    for n in range(sequence.computed // size):
        key = next_key(key, prefix.tokens[n * size : (n + 1) * size])
        found, has = named.get(key), prefix.table[n]
        hold(found == has, "block {} of {} has another key", has, sequence.request_id)
