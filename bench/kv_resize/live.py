"""An instance of the demo model whose KV cache can be filled without computing what is in it.

4 GB of KV would take ten minutes of prefill. So its requests are made up: they hold blocks, and the
blocks are written to, but not with keys and values. A resize treats them like any others.
"""

import random
from itertools import count

import numpy as np

from bench.demo_model import stored_model
from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.request import SamplingParams
from mesh.domain.steps import EngineRequest, LoadOrder
from mesh_nodes.engines.openvino.compilation import Compiler, KvPrecision
from mesh_nodes.engines.openvino.footprint import estimate
from mesh_nodes.engines.openvino.instance import Instance
from mesh_nodes.engines.openvino.kv_cache import KvResize
from mesh_nodes.engines.openvino.paged_attention import BLOCK_TOKENS
from mesh_nodes.engines.openvino.sequence import Sequence
from mesh_nodes.engines.openvino.weights import WeightPrecision

CONTEXT_TOKENS = 2048
REQUEST_BLOCKS = 32
"""So many hold the blocks in turns, each one every REQUEST_BLOCKS-th: one that ends leaves holes of
one block each, the most there can be."""


class LiveInstance:
    """Owns its model; reaches into the instance to fill it."""

    def __init__(self, how: KvResize, blocks_max: int, threads: int) -> None:
        self.how = how
        stored = stored_model()
        precision, kv = WeightPrecision.I8, KvPrecision.F16
        compiler = Compiler(threads=threads, weights=precision, kv=kv)
        compiler.prepare(stored.info, stored.path, _no_progress)
        self._instance = Instance(
            LoadOrder(
                instance_id=InstanceId(how.value),
                deployment=DeploymentName("bench"),
                model=stored.info,
                model_path=stored.path,
                kv_blocks=1,
                context_tokens_max=CONTEXT_TOKENS,
                batch_max=-(-blocks_max * BLOCK_TOKENS // CONTEXT_TOKENS),
            ),
            compiler.compile(stored.info, stored.path, CONTEXT_TOKENS, _no_progress),
            weights_bytes=estimate(stored.info, weights=precision, kv=kv).weights_bytes,
            kv_resize=how,
        )
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

    def drop_to(self, blocks: int, draw: random.Random) -> None:
        """End requests at random until no more than so many blocks are held."""
        running = sorted(self._instance._sequences)
        draw.shuffle(running)
        while self.used_blocks > blocks:
            self._instance.abort(running.pop())

    def close(self) -> None:
        self._instance.close()

    def _sequence(self) -> Sequence:
        request = EngineRequest(
            request_id=RequestId(f"live-{next(self._numbers)}"),
            prompt_tokens=(0,) * (CONTEXT_TOKENS - 2),
            output_tokens=(),
            sampling=SamplingParams(max_tokens=1),
            stop_token_ids=(),
        )
        return Sequence(
            request,
            context_tokens_max=CONTEXT_TOKENS,
            vocabulary_tokens=self._vocabulary_tokens,
        )


def _no_progress(phase: str, share: float) -> None:
    pass
