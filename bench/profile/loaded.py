"""The demo model in an engine of this process, primed and driven as a node does it."""

import random
from collections.abc import Sequence
from itertools import count

from bench.demo_model import stored_model
from bench.profile.workloads import BATCH_MAX
from mesh.core.node.priming import to_prime
from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.limits import PREFILL_TOKENS_MAX, NodeLimits
from mesh.domain.profile import IterationShape
from mesh.domain.request import SamplingParams
from mesh.domain.steps import EngineRequest, LoadOrder, StepResult
from mesh_nodes.engines.openvino import OpenVinoEngine

INSTANCE = InstanceId("profiled")
CONTEXT_TOKENS = 2048
KV_TOKENS = 49_152
"""Enough for the largest batch of the longest mean context."""


class LoadedModel:
    """Owns the engine; `close` it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._numbers = count(1)
        self._engine = OpenVinoEngine()
        self.stored = stored_model()
        self._engine.prepare(self.stored.info, self.stored.path, _no_progress)
        self.footprint = self._engine.footprint(self.stored.info)
        order = LoadOrder(
            instance_id=INSTANCE,
            deployment=DeploymentName("profiled"),
            model=self.stored.info,
            model_path=self.stored.path,
            kv_blocks=self.footprint.blocks_for(KV_TOKENS),
            context_tokens_max=CONTEXT_TOKENS,
            batch_max=BATCH_MAX,
        )
        self._engine.load(order, _no_progress)
        limits = NodeLimits()
        for shape in to_prime(
            batch_max=BATCH_MAX,
            context_tokens_max=CONTEXT_TOKENS,
            tokens_max=limits.primed_tokens_max,
        ):
            self._engine.measure(INSTANCE, shape)
        self.running: list[RequestId] = []

    def close(self) -> None:
        self._engine.close()

    def measure(self, shape: IterationShape) -> float:
        return self._engine.measure(INSTANCE, shape)

    def submit(self, prompt_tokens: int, max_tokens: int = CONTEXT_TOKENS) -> None:
        """A request of random tokens; it goes on until `max_tokens`, or until it is dropped."""
        request_id = RequestId(f"r{next(self._numbers)}")
        vocabulary = self.stored.info.vocabulary_tokens
        tokens = (
            self._random.randrange(vocabulary // 100, vocabulary) for _ in range(prompt_tokens)
        )
        request = EngineRequest(
            request_id=request_id,
            prompt_tokens=tuple(tokens),
            output_tokens=(),
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1),
            stop_token_ids=(),
        )
        self._engine.submit(INSTANCE, request)
        self.running.append(request_id)

    def step(self) -> StepResult:
        result = self._engine.step(INSTANCE, PREFILL_TOKENS_MAX)
        for output in result.outputs:
            if output.finish is not None:
                self.running.remove(output.request_id)
        return result

    def shrink(self, batch: int) -> None:
        """Drop requests at random until so many are left."""
        while len(self.running) > batch:
            dropped = self.running.pop(self._random.randrange(len(self.running)))
            self._engine.abort(INSTANCE, dropped)

    def grow(self, contexts: Sequence[int]) -> None:
        """Submit prompts of these lengths; see `step`."""
        for tokens in contexts:
            self.submit(tokens)


def _no_progress(phase: str, share: float) -> None:
    pass
