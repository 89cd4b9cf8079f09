"""Drives an engine in tests: load, submit, step until all is done."""

from collections.abc import Callable, Iterable
from pathlib import Path

from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.messages import InstanceLoaded
from mesh.domain.model import ModelInfo
from mesh.domain.reasons import FinishReason
from mesh.domain.request import SamplingParams
from mesh.runtime.engine import Engine, EngineRequest, LoadOrder, Progress, StepResult

INSTANCE = InstanceId("i-1")
STEPS_MAX = 2000


def load(
    engine: Engine,
    info: ModelInfo,
    path: Path,
    *,
    instance_id: InstanceId = INSTANCE,
    kv_blocks: int = 64,
    context_tokens_max: int = 256,
    batch_max: int = 8,
    progress: Progress = lambda *_: None,
) -> InstanceLoaded:
    order = LoadOrder(
        instance_id=instance_id,
        deployment=DeploymentName("d"),
        model=info,
        model_path=path,
        kv_blocks=kv_blocks,
        context_tokens_max=context_tokens_max,
        batch_max=batch_max,
    )
    return engine.load(order, progress)


def request(
    name: str,
    prompt: Iterable[int],
    sampling: SamplingParams | None = None,
    *,
    output: Iterable[int] = (),
    stops: tuple[int, ...] = (),
) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name),
        prompt_tokens=tuple(prompt),
        output_tokens=tuple(output),
        sampling=sampling or SamplingParams(max_tokens=16),
        stop_token_ids=stops,
    )


class Outputs:
    """What requests have been given, checked for gaps: indices come one after the other."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self._first: dict[str, int] = {}

    def take(self, result: StepResult) -> None:
        for output in result.outputs:
            assert output.request_id not in self.finished
            got = self.tokens.setdefault(output.request_id, [])
            first = self._first.setdefault(output.request_id, output.first_index)
            assert output.first_index == first + len(got)
            got += output.token_ids
            if output.finish is not None:
                self.finished[output.request_id] = output.finish


def run(
    engine: Engine,
    *requests: EngineRequest,
    prefill_tokens_max: int = 64,
    between: Callable[[], object] | None = None,
) -> Outputs:
    """Submit all, then step until all are finished."""
    outputs = Outputs()
    for item in requests:
        engine.submit(INSTANCE, item)
    for _ in range(STEPS_MAX):
        if len(outputs.finished) == len(requests):
            return outputs
        outputs.take(engine.step(INSTANCE, prefill_tokens_max))
        if between is not None:
            between()
    raise AssertionError(f"not finished after {STEPS_MAX} steps")
