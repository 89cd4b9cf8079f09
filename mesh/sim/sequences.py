"""The requests of one virtual instance: what each iteration computes for them, and their blocks.

Decodes go first, one token each; then prompts in the order of their submission, as far as the
budget reaches. KV blocks are counted as an engine counts them: a block is taken when the first of
its tokens is computed, and a request that finds none starves. Token ids are a function of the
request and the index alone. Before: `engine`. After: nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from mesh.domain.ids import RequestId
from mesh.domain.model import Footprint, ModelInfo
from mesh.domain.reasons import FinishReason
from mesh.domain.request import SamplingParams
from mesh.domain.steps import EngineRequest, InstanceMemory, LoadOrder, StepResult, TokenOutput

Seconds = Callable[[int, int, int, int], float]
"""Of an iteration: prompt tokens, tokens before them, decodes, mean context of those."""
STRIDE = 7919
"""Between the ids of neighbouring tokens; prime, so that they differ in any vocabulary."""


def seed_of(prompt_tokens: tuple[int, ...], sampling: SamplingParams) -> int:
    """What the tokens of a request follow from: its prompt, and how it samples."""
    drawn = _samples(sampling)
    return hash(
        (
            prompt_tokens,
            (sampling.seed or 0) if drawn else -1,
            sampling.temperature if drawn else 0.0,
            sampling.repetition_penalty,
        )
    )


def token_at(seed: int, index: int, model: ModelInfo) -> int:
    """The id of an output token, wherever it is computed. No request ends by accident."""
    token_id = (seed + index * STRIDE) % model.vocabulary_tokens
    while token_id in model.stop_token_ids:
        token_id = (token_id + 1) % model.vocabulary_tokens
    return token_id


def _samples(sampling: SamplingParams) -> bool:
    return sampling.temperature > 0 and sampling.top_k != 1


@dataclass(slots=True)
class Sequence:
    """A running request: `length` tokens of prompt and output, `computed` of them in the cache."""

    request_id: RequestId
    seed: int
    prompt_tokens: int
    length: int
    length_max: int
    stop_token_ids: tuple[int, ...]
    """That end it."""
    computed: int = 0
    decoding: bool = False
    blocks: int = 0

    @property
    def left(self) -> int:
        return self.length - self.computed


@dataclass(slots=True)
class Instance:
    """A loaded one."""

    order: LoadOrder
    footprint: Footprint
    kv_blocks: int
    blocks_used: int = 0
    sequences: dict[RequestId, Sequence] = field(default_factory=dict)
    """In the order of their submission."""

    def add(self, request: EngineRequest) -> None:
        prompt_tokens, sampling = len(request.prompt_tokens), request.sampling
        self.sequences[request.request_id] = Sequence(
            request_id=request.request_id,
            seed=seed_of(request.prompt_tokens, sampling),
            prompt_tokens=prompt_tokens,
            length=prompt_tokens + len(request.output_tokens),
            length_max=min(prompt_tokens + sampling.max_tokens, self.order.context_tokens_max),
            stop_token_ids=() if sampling.ignore_eos else request.stop_token_ids,
        )

    def drop(self, request_id: RequestId) -> None:
        sequence = self.sequences.pop(request_id, None)
        if sequence is not None:
            self.blocks_used -= sequence.blocks

    def memory(self) -> InstanceMemory:
        return InstanceMemory(
            instance_id=self.order.instance_id,
            weights_bytes=self.footprint.weights_bytes,
            kv_blocks=self.kv_blocks,
            kv_blocks_used=self.blocks_used,
            kv_block_bytes=self.footprint.kv_block_bytes,
            kv_held_bytes=self.kv_blocks * self.footprint.kv_block_bytes,
        )

    def iterate(self, prefill_tokens_max: int, seconds: Seconds) -> StepResult:
        """Compute one iteration, which takes as long as `seconds` says."""
        decoding, prompts, starved = self._plan(prefill_tokens_max)
        context = prefill = past = 0
        for sequence in decoding:
            context += sequence.length
            sequence.computed += 1
        for sequence, tokens in prompts:
            prefill, past = prefill + tokens, past + tokens * sequence.computed
            sequence.computed += tokens
        batch = len(decoding)
        past_tokens = round(past / prefill) if prefill else 0
        ended = [sequence for sequence, _ in prompts if not sequence.left]
        tokens_out = tuple(map(self._token, (*decoding, *ended)))
        waiting = [s for s in self.sequences.values() if not s.decoding]
        return StepResult(
            tokens=tokens_out,
            prefill_tokens=prefill,
            prefill_past_tokens=past_tokens,
            decode_batch=batch,
            context_tokens=context,
            prefill_left=tuple([(s.request_id, s.left) for s in waiting]),
            starved=tuple(starved),
            kv_blocks_used=self.blocks_used,
            elapsed_s=seconds(prefill, past_tokens, batch, context // batch if batch else 0),
        )

    def _plan(
        self, prefill_tokens_max: int
    ) -> tuple[list[Sequence], list[tuple[Sequence, int]], list[RequestId]]:
        """Who decodes a token; who computes how much of its prompt; who would, had it blocks."""
        active = list(islice(self.sequences.values(), self.order.batch_max))
        block_tokens = self.footprint.block_tokens
        decoding: list[Sequence] = []
        prompts: list[tuple[Sequence, int]] = []
        starved: list[RequestId] = []
        for sequence in active:
            if not sequence.decoding:
                continue
            if sequence.computed < sequence.blocks * block_tokens or self._give(sequence, 1):
                decoding.append(sequence)
            else:
                starved.append(sequence.request_id)
        budget = prefill_tokens_max
        if budget > 0 and len(decoding) + len(starved) < len(active):
            for sequence in active:
                if budget > 0 and not sequence.decoding:
                    tokens = self._give(sequence, min(budget, sequence.left))
                    budget -= tokens
                    if tokens:
                        prompts.append((sequence, tokens))
                    else:
                        starved.append(sequence.request_id)
        return decoding, prompts, starved

    def _give(self, sequence: Sequence, wanted: int) -> int:
        """Blocks for so many more tokens, or for as many as there are; returns for how many."""
        missing = self.footprint.blocks_for(sequence.computed + wanted) - sequence.blocks
        taken = min(max(missing, 0), self.kv_blocks - self.blocks_used)
        sequence.blocks += taken
        self.blocks_used += taken
        return min(wanted, sequence.blocks * self.footprint.block_tokens - sequence.computed)

    def _token(self, sequence: Sequence) -> TokenOutput:
        request_id, index = sequence.request_id, sequence.length - sequence.prompt_tokens
        token_id = token_at(sequence.seed, index, self.order.model)
        sequence.length += 1
        sequence.decoding = True
        finish = None
        if sequence.length >= sequence.length_max:
            finish = FinishReason.LENGTH
        if token_id in sequence.stop_token_ids:
            finish = FinishReason.STOP
        if finish is not None:
            self.drop(request_id)
        return TokenOutput(request_id=request_id, index=index, token_id=token_id, finish=finish)
