"""Drives an engine of this process as a node would, for benchmarks that measure the engine alone.

Requests are greedy, unless they say otherwise, and as long as they are told to be: nobody stops at
an end-of-sequence token.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import count

from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.request import SamplingParams
from mesh.domain.steps import EngineRequest, LoadOrder, StepResult
from mesh.runtime.engine import Engine
from mesh_loader.store import StoredModel

INSTANCE = InstanceId("bench")
GREEDY = SamplingParams()


def no_progress(phase: str, share: float) -> None:
    pass


def order(
    stored: StoredModel,
    *,
    kv_blocks: int,
    context_tokens_max: int,
    batch_max: int,
    instance_id: InstanceId = INSTANCE,
) -> LoadOrder:
    return LoadOrder(
        instance_id=instance_id,
        deployment=DeploymentName("bench"),
        model=stored.info,
        model_path=stored.path,
        kv_blocks=kv_blocks,
        context_tokens_max=context_tokens_max,
        batch_max=batch_max,
    )


def request(
    name: str, prompt: Iterable[int], max_tokens: int, sampling: SamplingParams = GREEDY
) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name),
        prompt_tokens=tuple(prompt),
        sampling=replace(sampling, max_tokens=max_tokens, ignore_eos=True, seed=1),
    )


class LoadedModel:
    """One instance in an engine that is its own."""

    def __init__(
        self,
        engine: Engine,
        stored: StoredModel,
        *,
        kv_tokens: int,
        context_tokens_max: int,
        batch_max: int,
    ) -> None:
        self.engine = engine
        self.stored = stored
        self._numbers = count(1)
        engine.prepare(stored.info, stored.path, no_progress)
        self.footprint = engine.footprint(stored.info)
        wanted = order(
            stored,
            kv_blocks=self.footprint.blocks_for(kv_tokens),
            context_tokens_max=context_tokens_max,
            batch_max=batch_max,
        )
        engine.load(wanted, no_progress)

    def submit(
        self, prompt: Iterable[int], max_tokens: int, sampling: SamplingParams = GREEDY
    ) -> RequestId:
        made = request(f"r{next(self._numbers)}", prompt, max_tokens, sampling)
        self.engine.submit(INSTANCE, made)
        return made.request_id

    def step(self, prefill_tokens_max: int, iterations: int = 1) -> StepResult:
        return self.engine.step(INSTANCE, prefill_tokens_max, iterations)

    def close(self) -> None:
        self.engine.close()
