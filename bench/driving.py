"""Drives an engine of this process as a node would, for benchmarks that measure the engine alone.

Requests are greedy, unless they say otherwise, and as long as they are told to be: nobody stops at
an end-of-sequence token.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import count

from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.model import Footprint, ModelInfo
from mesh.domain.profile import Grid, Profile
from mesh.domain.reasons import DeviceKind
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


def profile_of(info: ModelInfo, footprint: Footprint, prefill: Grid, decode: Grid) -> Profile:
    """The profile of a model that was measured here."""
    return Profile(
        model_id=info.model_id,
        device=DeviceKind.CPU,
        fingerprint="here",
        hardware="here",
        cores=0,
        parameters=info.parameters,
        mixture=info.mixture,
        weights_bytes=footprint.weights_bytes,
        kv_bytes_per_token=footprint.kv_block_bytes // footprint.block_tokens,
        prefill=prefill,
        decode=decode,
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
