"""An instance of the demo model whose KV cache can be filled without computing what is in it.

4 GB of KV would take ten minutes of prefill. So its requests are made up: they hold blocks, and the
blocks are written to, but not with keys and values. A resize treats them like any others.
"""

import random
from itertools import count

import numpy as np

from bench.demo_model import stored_model
from bench.driving import no_progress, order, request
from bench.kv_resize.serving import CONTEXT_TOKENS
from mesh.domain.model import KvPrecision, WeightPrecision
from mesh.memory.cache_room import CacheRoom
from mesh_nodes.engines.openvino.compilation import Compiler
from mesh_nodes.engines.openvino.footprint import estimate
from mesh_nodes.engines.openvino.instance import Instance
from mesh_nodes.engines.openvino.kv_cache import KvResize
from mesh_nodes.engines.openvino.paged_attention import BLOCK_TOKENS
from mesh_nodes.engines.openvino.precisions import Precisions
from mesh_nodes.engines.openvino.sequence import Sequence

REQUEST_BLOCKS = 32
"""So many hold the blocks in turns, each one every REQUEST_BLOCKS-th: one that ends leaves holes of
one block each, the most there can be."""


class DemoGraph:
    """The demo model compiled once, for several instances of it."""

    def __init__(self, threads: int) -> None:
        self.stored = stored_model()
        weights, kv = WeightPrecision.I8, KvPrecision.F16
        compiler = Compiler(threads=threads, weights=weights, precisions=Precisions(kv=kv))
        compiler.prepare(self.stored.info, self.stored.path, no_progress)
        self._graph = compiler.compile(
            self.stored.info, self.stored.path, CONTEXT_TOKENS, no_progress
        )
        self._footprint = estimate(self.stored.info, weights=weights, kv=kv)

    def instance(self, how: KvResize, *, kv_blocks: int, batch_max: int) -> Instance:
        return Instance(
            order(
                self.stored,
                kv_blocks=kv_blocks,
                context_tokens_max=CONTEXT_TOKENS,
                batch_max=batch_max,
            ),
            self._graph,
            footprint=self._footprint,
            room=CacheRoom(),
            kv_resize=how,
        )


class LiveInstance:
    """Reaches into its instance to fill it."""

    def __init__(self, graph: DemoGraph, how: KvResize, blocks_max: int) -> None:
        self.how = how
        batch_max = -(-blocks_max * BLOCK_TOKENS // CONTEXT_TOKENS)
        self._instance = graph.instance(how, kv_blocks=1, batch_max=batch_max)
        stored = graph.stored
        self._vocabulary_tokens = stored.info.vocabulary_tokens
        self._numbers = count(1)
        self.block_bytes = self._instance.footprint.kv_block_bytes

    def blocks(self, gigabytes: float) -> int:
        return max(1, round(gigabytes * 1e9 / self.block_bytes))

    @property
    def held_bytes(self) -> int:
        return self._instance.memory().kv_held_bytes

    @property
    def used_blocks(self) -> int:
        return self._instance.memory().kv_blocks_used

    def resize(self, blocks: int) -> int:
        return self._instance.resize_kv(blocks)

    def fill(self, blocks: int) -> None:
        """Further requests, which hold so many more blocks, written to."""
        pool, cache = self._instance._pool, self._instance._cache
        made = [self._sequence() for _ in range(-(-blocks // REQUEST_BLOCKS))]
        for number in range(blocks):
            sequence = made[number % len(made)]
            sequence.computed = number // len(made) * BLOCK_TOKENS
            sequence.reserve(BLOCK_TOKENS, pool)
        for sequence in made:
            cache.back(np.array(sequence.blocks(), np.int64))
            self._instance._sequences[sequence.request_id] = sequence
        self._instance._books = self._instance._count()

    def keep(self) -> None:
        """What is held now is cached once it is let go."""
        for sequence in self._instance._sequences.values():
            for block in sequence.blocks():
                self._instance._pool.name(block, f"kept-{next(self._numbers)}".encode())

    def drop_to(self, blocks: int, draw: random.Random) -> None:
        """End requests at random until no more than so many blocks are held."""
        running = sorted(self._instance._sequences)
        draw.shuffle(running)
        while self.used_blocks > blocks:
            self._instance.abort(running.pop())

    def close(self) -> None:
        self._instance.close()

    def _sequence(self) -> Sequence:
        prompt = (0,) * (CONTEXT_TOKENS - 2)
        return Sequence(
            request(f"live-{next(self._numbers)}", prompt, 1),
            context_tokens_max=CONTEXT_TOKENS,
            vocabulary_tokens=self._vocabulary_tokens,
        )
