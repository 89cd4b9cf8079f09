"""An engine without a model: its tokens are a function of the prompt and the index.

It holds the node to what it may ask for: what a real engine would bear or refuse fails the test.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from mesh.domain.errors import EngineError, OutOfMemory
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.model import Footprint, ModelInfo
from mesh.domain.profile import IterationShape
from mesh.domain.reasons import FinishReason
from mesh.domain.request import RequestTokens
from mesh.domain.steps import (
    EngineCapabilities,
    EngineRequest,
    InstanceMemory,
    LoadedInstance,
    LoadOrder,
    ResizedKv,
    StepResult,
    repeated,
)
from mesh.runtime.engine import Ended, Progress
from tests.core.cells import FOOTPRINT, MODEL

STEP_S = 0.01
"""Of every iteration, whatever its shape."""
RESIZE_S = 0.002
MEASURED_S = 0.12
"""Of every shape that is measured: three times are enough, and two such instances on a node are too
many for a TPOT of 0.25 s.
"""


def token_at(prompt: Sequence[int], index: int) -> int:
    return (sum(prompt) * 31 + index * 7) % 997


def answer_tokens(prompt: Sequence[int], max_tokens: int) -> int:
    """How long an answer is: at the end of the context, it ends."""
    return min(max_tokens, MODEL.context_tokens_max - len(prompt))


class WorldEngine:
    """Keeps to its memory, and fails when told to by one of its `fail_…`."""

    capabilities = EngineCapabilities(name="scripted", version="1", resize_kv=True)

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.fail_loads = 0
        self.fail_steps = 0
        self.fail_measures = 0
        self.fail_resizes = 0
        self.steps = 0
        self._orders: dict[InstanceId, LoadOrder] = {}
        self._running: dict[InstanceId, dict[RequestId, list[int]]] = {}
        self._asked: dict[RequestId, EngineRequest] = {}
        self._blocks: dict[RequestId, int] = {}
        """KV blocks that requests hold."""
        self._lost: set[InstanceId] = set()
        self._ended: Ended = lambda instance_id, error: None
        self._stuck: set[InstanceId] = set()
        """Out of blocks for all of their requests, and nothing has changed since."""

    def watch(self, ended: Ended) -> None:
        self._ended = ended

    def footprint(self, model: ModelInfo) -> Footprint:
        return FOOTPRINT

    def prepare(self, model: ModelInfo, model_path: Path, progress: Progress) -> None:
        pass

    def load(self, order: LoadOrder, progress: Progress) -> LoadedInstance:
        if self.fail_loads:
            self.fail_loads -= 1
            raise OutOfMemory("as told")
        assert order.instance_id not in self._orders
        self._take(order)
        self._running[order.instance_id] = {}
        return LoadedInstance(footprint=FOOTPRINT, kv_blocks=order.kv_blocks, elapsed_s=0.1)

    def unload(self, instance_id: InstanceId) -> None:
        self._stuck.discard(instance_id)
        self._orders.pop(instance_id, None)
        for request_id in self._running.pop(instance_id, {}):
            self._asked.pop(request_id, None)
            self._blocks.pop(request_id, None)

    def lose(self, instance_id: InstanceId) -> None:
        """The instance ends by itself, with all that it held."""
        self.unload(instance_id)
        self._lost.add(instance_id)
        self._ended(instance_id, EngineError("as told"))

    def submit(self, instance_id: InstanceId, request: EngineRequest) -> None:
        if instance_id not in self._orders:
            raise EngineError(f"{instance_id} is not loaded")
        assert request.request_id not in self._asked, "a request is on the node twice"
        self._asked[request.request_id] = request
        self._running[instance_id][request.request_id] = list(request.output_tokens)
        self._stuck.discard(instance_id)
        order = self._orders[instance_id]
        assert len(self._running[instance_id]) <= order.batch_max

    def abort(self, instance_id: InstanceId, request_id: RequestId) -> None:
        if request_id in self._running.get(instance_id, {}):
            del self._running[instance_id][request_id], self._asked[request_id]
            self._blocks.pop(request_id, None)
            self._stuck.discard(instance_id)

    def step(
        self, instance_id: InstanceId, prefill_tokens_max: int, iterations: int = 1
    ) -> StepResult:
        return repeated(partial(self._iterate, instance_id), prefill_tokens_max, iterations)

    def _iterate(self, instance_id: InstanceId, prefill_tokens_max: int) -> StepResult:
        if instance_id in self._lost:
            raise EngineError(f"{instance_id} has ended")
        assert self._running.get(instance_id), "a step of an instance without work"
        if self.fail_steps:
            self.fail_steps -= 1
            raise EngineError("as told")
        self.steps += 1
        outputs, starved = [], []
        for request_id, so_far in list(self._running[instance_id].items()):
            asked = self._asked[request_id]
            if not self._reserve(instance_id, asked, len(so_far)):
                starved.append(request_id)
                continue
            so_far.append(token_at(asked.prompt_tokens, len(so_far)))
            ended = len(so_far) >= answer_tokens(asked.prompt_tokens, asked.sampling.max_tokens)
            outputs.append(
                RequestTokens(
                    request_id=request_id,
                    attempt=asked.attempt,
                    first_index=len(so_far) - 1,
                    token_ids=(so_far[-1],),
                    finish=FinishReason.LENGTH if ended else None,
                )
            )
            if ended:
                self.abort(instance_id, request_id)
        if not outputs:
            self._stuck.add(instance_id)
        return StepResult(
            outputs=tuple(outputs),
            prefill_tokens=0,
            prefill_past_tokens=0,
            decode_batch=len(outputs),
            context_tokens=0,
            prefill_left=(),
            starved=tuple(starved),
            kv_blocks_used=self._used(instance_id),
            elapsed_s=STEP_S,
        )

    def measure(self, instance_id: InstanceId, shape: IterationShape) -> float:
        able = [i for i, running in self._running.items() if running and i not in self._stuck]
        assert not able, "a measurement goes before a request"
        if instance_id not in self._orders:
            raise EngineError(f"{instance_id} is not loaded")
        if self.fail_measures:
            self.fail_measures -= 1
            raise EngineError("as told")
        return MEASURED_S

    def resize_kv(self, instance_id: InstanceId, kv_blocks: int) -> ResizedKv:
        if instance_id not in self._orders:
            raise EngineError(f"{instance_id} is not loaded")
        self._stuck.discard(instance_id)
        if self.fail_resizes:
            self.fail_resizes -= 1
            raise OutOfMemory("as told")
        blocks = max(kv_blocks, self._used(instance_id), 1)
        self._take(replace(self._orders[instance_id], kv_blocks=blocks))
        return ResizedKv(kv_blocks=blocks, elapsed_s=RESIZE_S)

    def memory(self) -> tuple[InstanceMemory, ...]:
        return tuple(
            InstanceMemory(
                instance_id=instance_id,
                weights_bytes=FOOTPRINT.weights_bytes,
                kv_blocks=self._orders[instance_id].kv_blocks,
                kv_blocks_used=self._used(instance_id),
                kv_block_bytes=FOOTPRINT.kv_block_bytes,
                kv_held_bytes=self._orders[instance_id].kv_blocks * FOOTPRINT.kv_block_bytes,
            )
            for instance_id in self._running
        )

    def close(self) -> None:
        self._orders.clear()

    def _take(self, order: LoadOrder) -> None:
        """An instance of this size, in the place of itself if it is there."""
        self._orders[order.instance_id] = order
        used = sum(FOOTPRINT.instance_bytes(o.kv_blocks) for o in self._orders.values())
        assert used <= self.memory_bytes, "the controller promised a byte twice"

    def _reserve(self, instance_id: InstanceId, asked: EngineRequest, output_tokens: int) -> bool:
        """Have blocks for all of a request's tokens, or leave it with those that it has."""
        blocks = FOOTPRINT.blocks_for(len(asked.prompt_tokens) + output_tokens)
        more = blocks - self._blocks.get(asked.request_id, 0)
        if self._used(instance_id) + more > self._orders[instance_id].kv_blocks:
            return False
        self._blocks[asked.request_id] = blocks
        return True

    def _used(self, instance_id: InstanceId) -> int:
        return sum(self._blocks.get(request_id, 0) for request_id in self._running[instance_id])

    def held(self) -> dict[InstanceId, int]:
        """Requests by loaded instance."""
        return {instance: len(running) for instance, running in self._running.items()}
