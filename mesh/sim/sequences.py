"""The requests of one virtual instance: what each iteration computes for them, and their blocks.

Decodes go first, one token each; then prompts in the order of their submission, as far as the
budget reaches. Several decodes of the same batch are computed at once. KV blocks are counted as an
engine counts them: a block is taken when the first of its tokens is computed, and a request that
finds none starves. Token ids are a function of the request and the index alone. Before: `engine`.
After: nothing.
"""

import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import field
from functools import partial
from itertools import count, islice

from mesh.domain.errors import EngineError
from mesh.domain.ids import RequestId
from mesh.domain.model import Footprint, ModelInfo
from mesh.domain.reasons import FinishReason
from mesh.domain.request import RequestTokens, SamplingParams, TokenLogprobs
from mesh.domain.steps import (
    Decode,
    EngineRequest,
    InstanceMemory,
    KvHeader,
    LoadOrder,
    Prefill,
    PrefillBudget,
    StepResult,
    repeated,
)
from mesh.domain.values import dataclass
from mesh.memory.kv_blocks import KvBlocks
from mesh.memory.prefix_walk import PrefixWalk

Seconds = Callable[[int, int, int, int, int], float]
"""The seconds that iterations take. The arguments are prompt tokens, tokens before them, decodes,
mean context of those, and how many iterations; the context of each is longer by one than that of
the one before.
"""
STRIDE = 7919
"""Between the ids of neighbouring tokens; prime, so that they differ in any vocabulary."""

PAGE_BYTES = 20
"""The bytes that stand for a block's pages when they are sent."""


def answer_of(
    prompt_tokens: tuple[int, ...], sampling: SamplingParams, tokens: int, model: ModelInfo
) -> tuple[int, ...]:
    """The ids of so many output tokens, wherever they are computed. No request ends by accident."""
    vocabulary_tokens = model.vocabulary_tokens
    first = _seed_of(prompt_tokens, sampling) % vocabulary_tokens
    walked = range(first, first + tokens * STRIDE, STRIDE)
    answer = tuple([walk % vocabulary_tokens for walk in walked])
    if any(stop_id in answer for stop_id in model.stop_token_ids):
        return tuple([_beside_stops(token_id, model) for token_id in answer])
    return answer


def _beside_stops(token_id: int, model: ModelInfo) -> int:
    while token_id in model.stop_token_ids:
        token_id = (token_id + 1) % model.vocabulary_tokens
    return token_id


def _seed_of(prompt_tokens: tuple[int, ...], sampling: SamplingParams) -> int:
    """What the tokens of a request follow from: its prompt, and how it samples."""
    drawn = sampling.temperature > 0 and sampling.top_k != 1 and sampling.min_p < 1
    penalties = (sampling.presence_penalty, sampling.frequency_penalty)
    return hash(
        (
            prompt_tokens,
            (sampling.seed or 0) if drawn else -1,
            sampling.temperature if drawn else 0.0,
            sampling.repetition_penalty,
            *(penalty for penalty in penalties if penalty),
        )
    )


@dataclass(slots=True)
class Sequence:
    """A running request: `length` tokens of prompt and output, `computed` of them in the cache."""

    request_id: RequestId
    attempt: int
    answer: tuple[int, ...]
    """All of its output."""
    prompt_tokens: int
    length: int
    length_max: int
    end: FinishReason
    """Once it is as long as that."""
    logprobs: int | None = None
    prompt_told: tuple[TokenLogprobs, ...] = ()
    """The log-probabilities of its prompt's tokens."""
    computed: int = 0
    decoding: bool = False
    paused: bool = False
    """It computes all its tokens but the last."""
    capacity_tokens: int = 0
    """Tokens that its blocks hold."""
    prefix: "Prefix | None" = None
    """The prefix of its blocks, or `None` when its blocks are only counted."""

    @property
    def left(self) -> int:
        """Tokens that it may compute."""
        return self.length - self.paused - self.computed

    def page(self, block: int) -> bytes:
        """What stands for the KV of a block: it tells the request and the block."""
        return f"{block:8} {self.answer[0]:11}".encode()


@dataclass(slots=True)
class Prefix:
    """The prefix of a sequence whose blocks others may share."""

    tokens: tuple[int, ...]
    """Its prompt and all of its answer."""
    walk: PrefixWalk
    table: list[int] = field(default_factory=list)
    """Its blocks."""


class CountedPlaces:
    """Implements `mesh.memory.kv_blocks.Places` without memory: no number comes twice."""

    total = sys.maxsize

    def __init__(self) -> None:
        self._numbers = count()
        self._taken = set[int]()

    def claim(self, count: int) -> list[int]:
        claimed = list(islice(self._numbers, count))
        self._taken.update(claimed)
        return claimed

    def release(self, blocks: Collection[int]) -> None:
        if not self._taken.issuperset(blocks):
            raise ValueError(f"of the KV blocks {blocks} one is given back twice")
        self._taken.difference_update(blocks)

    forget = release


@dataclass(slots=True)
class Instance:
    """A loaded one."""

    order: LoadOrder
    footprint: Footprint
    pool: KvBlocks
    sequences: dict[RequestId, Sequence] = field(default_factory=dict)
    """In the order of their submission."""

    def add(self, request: EngineRequest, tokens: int | None = None) -> int:
        """Its answer ends by itself after so many `tokens`, or with a stop token; else with all
        that it may have. Returns how many of its tokens are in the cache.
        """
        prompt_tokens, sampling = len(request.prompt_tokens), request.sampling
        length_now = prompt_tokens + len(request.output_tokens)
        known = self.sequences.get(request.request_id)
        if known is not None:
            known.length, known.paused = max(known.length, length_now), request.paused
            return known.computed
        most = min(sampling.max_tokens, self.order.context_tokens_max - prompt_tokens)
        length = most if tokens is None else min(tokens, most)
        answer = answer_of(request.prompt_tokens, sampling, length, self.order.model)
        late = answer[sampling.min_tokens :]
        stops = [stop_id for stop_id in request.end_ids if stop_id in late]
        stopped = [sampling.min_tokens + late.index(stop_id) + 1 for stop_id in stops]
        answer = answer[: min(stopped, default=length)]
        self.sequences[request.request_id] = Sequence(
            request_id=request.request_id,
            attempt=request.attempt,
            answer=answer,
            prompt_tokens=prompt_tokens,
            length=length_now,
            paused=request.paused,
            length_max=prompt_tokens + len(answer),
            logprobs=sampling.logprobs,
            prompt_told=()
            if sampling.prompt_logprobs is None
            else _certain(request.prompt_tokens[1:], sampling.prompt_logprobs),
            end=FinishReason.STOP if stopped or length < most else FinishReason.LENGTH,
        )
        if request.cache_salt is None:
            return 0
        prefix = Prefix(
            tokens=(*request.prompt_tokens, *answer),
            walk=PrefixWalk(request.cache_salt, self.footprint.block_tokens),
        )
        sequence = self.sequences[request.request_id]
        sequence.prefix = prefix
        found_tokens = prefix.walk.found_tokens(prefix.tokens[:length_now], self.pool)
        self._adopt(sequence, prefix)
        return found_tokens

    def header(self, first_block: int, blocks: int) -> KvHeader:
        """That of so many blocks, of which each is PAGE_BYTES here."""
        model = self.order.model
        return KvHeader(
            model_id=model.model_id,
            layout="counted",
            context_tokens_max=self.order.context_tokens_max,
            block_tokens=self.footprint.block_tokens,
            layers=model.layers,
            kv_heads=model.kv_heads,
            head_size=model.head_size,
            block_bytes=PAGE_BYTES,
            first_block=first_block,
            blocks=blocks,
        )

    def receive(self, request_id: RequestId, tokens: int, pages: Iterable[bytes]) -> int:
        """A request that was just added has the blocks of its first tokens, as far as there are
        free ones. Raises EngineError where they are another's.
        """
        sequence = self.sequences[request_id]
        if any(page != sequence.page(block) for block, page in enumerate(pages)):
            raise EngineError(f"the KV blocks are not those of request {request_id}")
        if tokens > sequence.computed:
            sequence.computed += self._give(sequence, tokens - sequence.computed)
            self._name(sequence)
        return sequence.computed

    def drop(self, request_id: RequestId) -> None:
        sequence = self.sequences.pop(request_id, None)
        if sequence is None:
            return
        if sequence.prefix is None:
            self.pool.count(-(sequence.capacity_tokens // self.footprint.block_tokens))
        else:
            self.pool.release(sequence.prefix.table)

    @property
    def held_bytes(self) -> int:
        """What its cached blocks take once it is unloaded."""
        return self.pool.cached * self.footprint.kv_block_bytes

    def close(self) -> None:
        self.pool.close()

    def memory(self) -> InstanceMemory:
        pool = self.pool
        return InstanceMemory(
            instance_id=self.order.instance_id,
            weights_bytes=pool.weights_bytes,
            kv_blocks=pool.blocks,
            kv_blocks_used=pool.used,
            kv_block_bytes=self.footprint.kv_block_bytes,
            kv_blocks_cached=pool.cached,
            kv_held_bytes=(pool.blocks + pool.extra) * self.footprint.kv_block_bytes,
        )

    def step(
        self, prefill: Prefill, iterations: int, seconds: Seconds, decode: Decode = None
    ) -> StepResult:
        """Compute so many iterations; see the engine port."""
        count = self._decodes_at_once(iterations) if decode is None else 0
        if count:
            return self._decode(count, seconds)
        return repeated(partial(self._iterate, seconds), prefill, iterations, decode)

    def _decodes_at_once(self, iterations: int) -> int:
        """How many decodes are the same batch's, the last of which may end a request. 0 where that
        takes a look at each: there are prompts or more requests than a batch has, or too few
        blocks for all.
        """
        if len(self.sequences) > self.order.batch_max:
            return 0
        count, missing = iterations, 0
        for sequence in self.sequences.values():
            if not sequence.decoding or sequence.paused:
                return 0
            left = sequence.length_max - sequence.length
            if left < count:
                count = left
            if sequence.computed + iterations > sequence.capacity_tokens:
                missing += self._missing(sequence, iterations)
        return count if self.sequences and missing <= self.pool.free else 0

    def _decode(self, count: int, seconds: Seconds) -> StepResult:
        sequences = list(self.sequences.values())
        batch, context = len(sequences), 0
        for sequence in sequences:
            context += sequence.length
            if sequence.computed + count > sequence.capacity_tokens:
                self._give(sequence, count)
        return StepResult(
            outputs=tuple([self._tokens(sequence, count) for sequence in sequences]),
            prefill_tokens=0,
            prefill_past_tokens=0,
            decode_batch=batch,
            # Each has one token more in each of them.
            context_tokens=(context * count + batch * count * (count - 1) // 2) // count,
            prefill_left=(),
            starved=(),
            kv_blocks_used=self.pool.used,
            elapsed_s=seconds(0, 0, batch, context // batch, count),
            iterations=count,
            prefixes=self.pool.tell(),
        )

    def _iterate(self, seconds: Seconds, asked: Prefill, decode: Decode) -> StepResult:
        decoding, prompts, starved = self._plan(asked, decode)
        context = prefill = past = 0
        for sequence in decoding:
            context += sequence.length
        for sequence, tokens in prompts:
            prefill, past = prefill + tokens, past + tokens * sequence.computed
            sequence.computed += tokens
            self._name(sequence)
        batch = len(decoding)
        past_tokens = round(past / prefill) if prefill else 0
        ended = [sequence for sequence, _ in prompts if not sequence.left and not sequence.paused]
        outputs = tuple([self._tokens(sequence, 1) for sequence in (*decoding, *ended)])
        waiting = [s for s in self.sequences.values() if not s.decoding and s.left]
        return StepResult(
            outputs=outputs,
            prefill_tokens=prefill,
            prefill_past_tokens=past_tokens,
            decode_batch=batch,
            context_tokens=context,
            prefill_left=tuple([(s.request_id, s.left) for s in waiting]),
            starved=tuple(starved),
            kv_blocks_used=self.pool.used,
            elapsed_s=seconds(prefill, past_tokens, batch, context // batch if batch else 0, 1),
            prefixes=self.pool.tell(),
        )

    def _plan(
        self, prefill: Prefill, decode: Decode
    ) -> tuple[list[Sequence], list[tuple[Sequence, int]], list[RequestId]]:
        """Who decodes a token; who computes how much of its prompt; who would, had it blocks."""
        active = list(islice(self.sequences.values(), self.order.batch_max))
        decoding: list[Sequence] = []
        prompts: list[tuple[Sequence, int]] = []
        starved: list[RequestId] = []
        for sequence in active:
            if not sequence.decoding or sequence.paused:
                continue
            if decode is not None and sequence.request_id not in decode:
                continue
            if sequence.computed < sequence.capacity_tokens or self._give(sequence, 1):
                decoding.append(sequence)
            else:
                starved.append(sequence.request_id)
        budget = PrefillBudget(prefill)
        if budget.left > 0 and len(decoding) + len(starved) < len(active):
            for sequence in active:
                most = 0 if sequence.decoding else budget.tokens_of(sequence.request_id)
                if most > 0 and sequence.left:
                    if sequence.prefix is not None:
                        self._adopt(sequence, sequence.prefix)
                    tokens = self._give(sequence, min(most, sequence.left))
                    budget.spend(sequence.request_id, tokens)
                    if tokens:
                        prompts.append((sequence, tokens))
                    else:
                        starved.append(sequence.request_id)
        return decoding, prompts, starved

    def _missing(self, sequence: Sequence, wanted: int) -> int:
        """Blocks that so many more tokens need."""
        return max(
            self.footprint.blocks_for(sequence.computed + wanted - sequence.capacity_tokens), 0
        )

    def _give(self, sequence: Sequence, wanted: int) -> int:
        """Blocks for so many more tokens, or for as many as there are; returns for how many."""
        taken = min(self._missing(sequence, wanted), self.pool.free)
        sequence.capacity_tokens += taken * self.footprint.block_tokens
        if sequence.prefix is None:
            self.pool.count(taken)
        elif taken:
            sequence.prefix.table += self.pool.take(taken)
        return min(wanted, sequence.capacity_tokens - sequence.computed)

    def _adopt(self, sequence: Sequence, prefix: Prefix) -> None:
        """Blocks that hold its next tokens already."""
        if sequence.computed != sequence.capacity_tokens:
            return
        tokens, table = prefix.tokens[: sequence.length], prefix.table
        table += [0] * (self.footprint.blocks_for(sequence.length) - len(table))
        adopted = prefix.walk.adopt(tokens, sequence.computed, table, self.pool)
        sequence.computed += adopted
        sequence.capacity_tokens += adopted
        del table[sequence.capacity_tokens // self.footprint.block_tokens :]

    def _name(self, sequence: Sequence) -> None:
        """Its full blocks are there for others."""
        prefix = sequence.prefix
        if prefix is not None:
            prefix.walk.name(prefix.tokens, sequence.computed, prefix.table, self.pool)

    def _tokens(self, sequence: Sequence, count: int) -> RequestTokens:
        """This many new tokens of the sequence, the last of which may end the request."""
        index = sequence.length - sequence.prompt_tokens
        token_ids = sequence.answer[index : index + count]
        sequence.length = length = sequence.length + count
        first = not sequence.decoding
        # All but the newest, which the next iteration computes.
        sequence.computed, sequence.decoding = length - 1, True
        adopted_tokens = 0
        if sequence.prefix is not None:
            self._name(sequence)
            adopted_tokens = sequence.prefix.walk.adopted_tokens if first else 0
        finish = sequence.end if length >= sequence.length_max else None
        if finish is not None:
            self.drop(sequence.request_id)
        return RequestTokens(
            request_id=sequence.request_id,
            attempt=sequence.attempt,
            first_index=index,
            token_ids=token_ids,
            finish=finish,
            logprobs=() if sequence.logprobs is None else _certain(token_ids, sequence.logprobs),
            cached_tokens=adopted_tokens,
            prompt_logprobs=() if index else sequence.prompt_told,
        )


def _certain(token_ids: tuple[int, ...], top: int) -> tuple[TokenLogprobs, ...]:
    """There was no other token that it could have been."""
    return tuple(
        [
            TokenLogprobs(logprob=0.0, top=((token_id, 0.0),) if top else ())
            for token_id in token_ids
        ]
    )
