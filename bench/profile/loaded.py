"""The demo model in an engine of this process, primed and driven as a node does it."""

import random
from collections.abc import Sequence

from bench import driving
from bench.demo_model import stored_model
from bench.profile.workloads import BATCH_MAX
from mesh.core.node.priming import to_prime
from mesh.domain.ids import RequestId
from mesh.domain.limits import PREFILL_TOKENS_MAX, NodeLimits
from mesh.domain.profile import IterationShape
from mesh.domain.steps import StepResult
from mesh_nodes.engines.openvino.engine import OpenVinoEngine

CONTEXT_TOKENS = 2048
KV_TOKENS = 49_152
"""Enough for the largest batch of the longest mean context."""


class PrimedModel:
    """Owns the engine; `close` it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._model = driving.LoadedModel(
            OpenVinoEngine(),
            stored_model(),
            kv_tokens=KV_TOKENS,
            context_tokens_max=CONTEXT_TOKENS,
            batch_max=BATCH_MAX,
        )
        self.info, self.footprint = self._model.stored.info, self._model.footprint
        self.close = self._model.close
        for shape in to_prime(
            batch_max=BATCH_MAX,
            context_tokens_max=CONTEXT_TOKENS,
            tokens_max=NodeLimits().primed_tokens_max,
        ):
            self.measure(shape)
        self.running: list[RequestId] = []

    def measure(self, shape: IterationShape) -> float:
        return self._model.engine.measure(driving.INSTANCE, shape)

    def submit(self, prompt_tokens: int, max_tokens: int = CONTEXT_TOKENS) -> None:
        """A request of random tokens; it goes on until `max_tokens`, or until it is dropped."""
        vocabulary = self.info.vocabulary_tokens
        tokens = (
            self._random.randrange(vocabulary // 100, vocabulary) for _ in range(prompt_tokens)
        )
        self.running.append(self._model.submit(tokens, max_tokens))

    def step(self) -> StepResult:
        result = self._model.step(PREFILL_TOKENS_MAX)
        for output in result.outputs:
            if output.finish is not None:
                self.running.remove(output.request_id)
        return result

    def shrink(self, batch: int) -> None:
        """Drop requests at random until so many are left."""
        while len(self.running) > batch:
            dropped = self.running.pop(self._random.randrange(len(self.running)))
            self._model.engine.abort(driving.INSTANCE, dropped)

    def grow(self, contexts: Sequence[int]) -> None:
        """Submit prompts of these lengths; see `step`."""
        for tokens in contexts:
            self.submit(tokens)
