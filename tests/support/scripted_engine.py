"""An engine without a model: its tokens are a hash, its books and its manners are an engine's.

It keeps to the whole contract of `mesh.runtime.engine` (the contract suite says so), so that the
core, the wire and the node can be tested without weights. A `Script` makes it slow or lets it fail.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from mesh.domain.errors import EngineError, OutOfMemory, TornModel
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.model import Footprint, ModelInfo
from mesh.domain.profile import IterationShape
from mesh.domain.reasons import FinishReason
from mesh.domain.request import RequestTokens, SamplingParams
from mesh.domain.steps import repeated
from mesh.runtime.engine import (
    Ended,
    EngineCapabilities,
    EngineRequest,
    InstanceMemory,
    LoadedInstance,
    LoadOrder,
    Progress,
    ResizedKv,
    StepResult,
)
from mesh.runtime.measurable import check_measurable

BLOCK_TOKENS = 32
KV_BLOCK_BYTES = 64 * 1024
WEIGHTS_BYTES = 4 * 1024 * 1024
MEASURED_TOKEN_S = 1e-6
"""By which a token of a measured shape lengthens the script's step, and 1024 tokens of its past."""


@dataclass(slots=True)
class Script:
    """How the engine misbehaves from now on; a test may change it at any time.

    Counts are of calls still to fail, one less after each.
    """

    load_s: float = 0.0
    step_s: float = 0.0
    resize_s: float = 0.0
    fail_loads: int = 0
    out_of_memory_loads: int = 0
    fail_steps: int = 0
    fail_measures: int = 0


def scripted_token(
    prompt: Sequence[int], sampling: SamplingParams, index: int, vocabulary: Sequence[int]
) -> int:
    """The output token at `index`: a choice from `vocabulary` by a hash of prompt and index, of the
    seed where the request samples, and of the repetition penalty where it has one."""
    samples = sampling.temperature > 0 and sampling.top_k != 1
    choice = (
        tuple(prompt),
        index,
        (sampling.seed, sampling.temperature) if samples else None,
        sampling.repetition_penalty,
    )
    digest = hashlib.blake2b(repr(choice).encode(), digest_size=8).digest()
    return vocabulary[int.from_bytes(digest, "little") % len(vocabulary)]


def measured_s(shape: IterationShape, step_s: float) -> float:
    """What measuring this shape finds: every size counts."""
    prefill = shape.prefill_tokens * (1 + shape.prefill_past_tokens / 1024)
    decode = shape.decode_batch * (1 + shape.decode_context_tokens / 1024)
    return step_s + MEASURED_TOKEN_S * (prefill + decode)


@dataclass(slots=True)
class _Sequence:
    """One running request: `length` tokens of prompt and output, `computed` of them in the KV."""

    request: EngineRequest
    length: int
    computed: int = 0
    decoding: bool = False
    blocks: int = 0

    @property
    def left(self) -> int:
        return self.length - self.computed

    def reserve(self, wanted: int, free_blocks: int) -> int:
        """Take blocks for `wanted` more tokens, or for as many as fit; returns for how many."""
        missing = -(-(self.computed + wanted) // BLOCK_TOKENS) - self.blocks
        self.blocks += min(max(missing, 0), free_blocks)
        return min(wanted, self.blocks * BLOCK_TOKENS - self.computed)


@dataclass(slots=True)
class _Instance:
    order: LoadOrder
    kv_blocks: int
    vocabulary: tuple[int, ...]
    """The model's tokens but for its stop tokens: no request ends by accident."""
    sequences: dict[RequestId, _Sequence] = field(default_factory=dict)

    @property
    def blocks_used(self) -> int:
        return sum(sequence.blocks for sequence in self.sequences.values())

    def memory(self) -> InstanceMemory:
        return InstanceMemory(
            instance_id=self.order.instance_id,
            weights_bytes=WEIGHTS_BYTES,
            kv_blocks=self.kv_blocks,
            kv_blocks_used=self.blocks_used,
            kv_block_bytes=KV_BLOCK_BYTES,
            kv_held_bytes=self.kv_blocks * KV_BLOCK_BYTES,
        )

    def plan(self, prefill_tokens_max: int) -> tuple[list[tuple[_Sequence, int]], list[RequestId]]:
        """Who computes how many tokens, decodes first; and who would, had it blocks."""
        active = list(islice(self.sequences.values(), self.order.batch_max))
        budget, work, starved = prefill_tokens_max, [], []
        for sequence in sorted(active, key=lambda s: not s.decoding):
            wanted = 1 if sequence.decoding else min(budget, sequence.left)
            if wanted <= 0:
                continue
            tokens = sequence.reserve(wanted, self.kv_blocks - self.blocks_used)
            if tokens == 0:
                starved.append(sequence.request.request_id)
                continue
            work.append((sequence, tokens))
            budget -= 0 if sequence.decoding else tokens
        return work, starved

    def yield_token(self, sequence: _Sequence) -> RequestTokens:
        request = sequence.request
        prompt_tokens = len(request.prompt_tokens)
        index = sequence.length - prompt_tokens
        token_id = scripted_token(request.prompt_tokens, request.sampling, index, self.vocabulary)
        sequence.length += 1
        sequence.decoding = True
        finish = None
        if not request.sampling.ignore_eos and token_id in request.stop_token_ids:
            finish = FinishReason.STOP
        elif sequence.length >= min(
            prompt_tokens + request.sampling.max_tokens, self.order.context_tokens_max
        ):
            finish = FinishReason.LENGTH
        if finish is not None:
            del self.sequences[request.request_id]
        return RequestTokens(
            request_id=request.request_id,
            attempt=request.attempt,
            first_index=index,
            token_ids=(token_id,),
            finish=finish,
        )


class ScriptedEngine:
    """See `mesh.runtime.engine.Engine`. `script` may be changed between any two calls."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        memory_bytes: int | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`memory_bytes` bounds what all instances take together; None: nothing does."""
        self.script = script or Script()
        self._memory_bytes = memory_bytes
        self._sleep = sleep
        self._instances: dict[InstanceId, _Instance] = {}
        self._ended: Ended = lambda instance_id, error: None

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(name="scripted", version="1", resize_kv=True)

    def watch(self, ended: Ended) -> None:
        self._ended = ended

    def footprint(self, model: ModelInfo) -> Footprint:
        return Footprint(
            weights_bytes=WEIGHTS_BYTES, kv_block_bytes=KV_BLOCK_BYTES, block_tokens=BLOCK_TOKENS
        )

    def prepare(self, model: ModelInfo, model_path: Path, progress: Progress) -> None:
        progress("nothing to prepare", 1.0)

    def load(self, order: LoadOrder, progress: Progress) -> LoadedInstance:
        progress("pretend", 0.0)
        self._sleep(self.script.load_s)
        if self.script.fail_loads:
            self.script.fail_loads -= 1
            raise EngineError(f"instance {order.instance_id} fails to load: the script wants it so")
        if self.script.out_of_memory_loads:
            self.script.out_of_memory_loads -= 1
            raise OutOfMemory(f"instance {order.instance_id} finds no memory, says the script")
        if order.instance_id in self._instances:
            raise EngineError(f"instance {order.instance_id} is already loaded")
        if not order.model_path.is_dir():
            raise TornModel(f"{order.model_path.name} is no folder of a model")
        footprint = self.footprint(order.model)
        self._claim(footprint.instance_bytes(order.kv_blocks), order.instance_id)
        vocabulary = tuple(
            token_id
            for token_id in range(order.model.vocabulary_tokens)
            if token_id not in order.model.stop_token_ids
        )
        self._instances[order.instance_id] = _Instance(order, order.kv_blocks, vocabulary)
        progress("loaded", 1.0)
        return LoadedInstance(
            footprint=footprint, kv_blocks=order.kv_blocks, elapsed_s=self.script.load_s
        )

    def unload(self, instance_id: InstanceId) -> None:
        self._instances.pop(instance_id, None)

    def lose(self, instance_id: InstanceId) -> None:
        """The instance ends by itself, as one in a process of its own can."""
        self.unload(instance_id)
        self._ended(instance_id, EngineError(f"{instance_id} has ended: the test wants it so"))

    def submit(self, instance_id: InstanceId, request: EngineRequest) -> None:
        instance = self._instance(instance_id)
        given = len(request.prompt_tokens) + len(request.output_tokens)
        if request.request_id in instance.sequences:
            raise EngineError(f"request {request.request_id} is already there")
        if not request.prompt_tokens:
            raise EngineError(f"request {request.request_id} has no prompt tokens")
        if given >= instance.order.context_tokens_max:
            raise EngineError(
                f"request {request.request_id}: {given} tokens leave no room in "
                f"{instance.order.context_tokens_max} of context"
            )
        if len(request.output_tokens) >= request.sampling.max_tokens:
            raise EngineError(f"request {request.request_id} has all of its tokens already")
        instance.sequences[request.request_id] = _Sequence(request, given)

    def abort(self, instance_id: InstanceId, request_id: RequestId) -> None:
        instance = self._instances.get(instance_id)
        if instance is not None:
            instance.sequences.pop(request_id, None)

    def step(
        self, instance_id: InstanceId, prefill_tokens_max: int, iterations: int = 1
    ) -> StepResult:
        instance = self._instance(instance_id)
        return repeated(partial(self._iterate, instance), prefill_tokens_max, iterations)

    def _iterate(self, instance: _Instance, prefill_tokens_max: int) -> StepResult:
        instance_id = instance.order.instance_id
        self._sleep(self.script.step_s)
        if self.script.fail_steps:
            self.script.fail_steps -= 1
            raise EngineError(f"instance {instance_id} fails in a step: the script wants it so")
        work, starved = instance.plan(prefill_tokens_max)
        decodes = [sequence for sequence, _ in work if sequence.decoding]
        context_tokens = sum(sequence.length for sequence in decodes)
        prefills = [(sequence, tokens) for sequence, tokens in work if not sequence.decoding]
        prefill_tokens = sum(tokens for _, tokens in prefills)
        past_tokens = sum(tokens * sequence.computed for sequence, tokens in prefills)
        for sequence, tokens in work:
            sequence.computed += tokens
        return StepResult(
            outputs=tuple(
                instance.yield_token(sequence) for sequence, _ in work if sequence.left == 0
            ),
            prefill_tokens=prefill_tokens,
            prefill_past_tokens=round(past_tokens / max(prefill_tokens, 1)),
            decode_batch=len(decodes),
            context_tokens=context_tokens,
            prefill_left=tuple(
                (request_id, sequence.left)
                for request_id, sequence in instance.sequences.items()
                if not sequence.decoding
            ),
            starved=tuple(starved),
            kv_blocks_used=instance.blocks_used,
            elapsed_s=self.script.step_s,
        )

    def measure(self, instance_id: InstanceId, shape: IterationShape) -> float:
        instance = self._instance(instance_id)
        check_measurable(
            instance_id,
            shape,
            context_tokens_max=instance.order.context_tokens_max,
            batch_max=instance.order.batch_max,
            block_tokens=BLOCK_TOKENS,
            blocks_free=instance.kv_blocks - instance.blocks_used,
        )
        elapsed_s = measured_s(shape, self.script.step_s)
        self._sleep(elapsed_s)
        if self.script.fail_measures:
            self.script.fail_measures -= 1
            raise EngineError(f"instance {instance_id} is not measured: the script wants it so")
        return elapsed_s

    def resize_kv(self, instance_id: InstanceId, kv_blocks: int) -> ResizedKv:
        instance = self._instance(instance_id)
        self._sleep(self.script.resize_s)
        blocks = max(kv_blocks, instance.blocks_used, 1)
        self._claim((blocks - instance.kv_blocks) * KV_BLOCK_BYTES, instance_id)
        instance.kv_blocks = blocks
        return ResizedKv(kv_blocks=blocks, elapsed_s=self.script.resize_s)

    def memory(self) -> tuple[InstanceMemory, ...]:
        instances = sorted(self._instances.items())
        return tuple(instance.memory() for _, instance in instances)

    def close(self) -> None:
        self._instances.clear()

    def _instance(self, instance_id: InstanceId) -> _Instance:
        if instance_id not in self._instances:
            raise EngineError(f"instance {instance_id} is not loaded")
        return self._instances[instance_id]

    def _claim(self, more_bytes: int, instance_id: InstanceId) -> None:
        held_bytes = sum(
            held.weights_bytes + held.kv_blocks * held.kv_block_bytes for held in self.memory()
        )
        if self._memory_bytes is not None and held_bytes + more_bytes > self._memory_bytes:
            raise OutOfMemory(
                f"instance {instance_id} wants {more_bytes} bytes more, "
                f"{self._memory_bytes - held_bytes} of {self._memory_bytes} are free"
            )
