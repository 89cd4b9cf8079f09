"""A running request: its tokens, how many of them the KV cache holds, and its block table.

`batch` reads what the next iteration needs of it, `instance` advances it, `sampling` draws its next
token. It decides when the request is finished.
"""

from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from mesh.domain.ids import RequestId
from mesh.domain.profile import IterationShape
from mesh.domain.reasons import FinishReason
from mesh.domain.request import SamplingParams, TokenLogprobs
from mesh.memory.kv_blocks import KvBlocks
from mesh.memory.prefix_walk import PrefixWalk
from mesh.runtime.engine import EngineRequest
from mesh.runtime.measurable import made_up_tokens
from mesh_nodes.engines.grammars import Constraint
from mesh_nodes.engines.openvino.paged_attention import BLOCK_TOKENS
from mesh_nodes.engines.pooling import Pool
from mesh_nodes.engines.sampling import Draw, Floats, logprobs_of, past_of, seed_of


class Sequence:
    """Invariant between steps: all tokens but the newest are computed once it decodes."""

    def __init__(
        self,
        request: EngineRequest,
        *,
        context_tokens_max: int,
        vocabulary_tokens: int,
        constraint: Constraint | None = None,
        pool: Pool | None = None,
    ) -> None:
        """`pool`: how its vector is made where it ends with one in place of text."""
        self.request_id = request.request_id
        self.attempt = request.attempt
        self._sampling = request.sampling
        self._end_ids = request.end_ids
        self._prompt_tokens = len(request.prompt_tokens)
        given = [*request.prompt_tokens, *request.output_tokens]
        self._tokens_max = min(
            self._prompt_tokens + request.sampling.max_tokens, context_tokens_max
        )
        self._tokens = np.zeros(max(self._tokens_max, len(given)), np.int64)
        self._tokens[: len(given)] = given
        self.length = len(given)
        """Prompt and output tokens so far."""
        self.computed = 0
        """Tokens whose keys and values are in the cache."""
        self.decoding = False
        """Past its prefill: one token an iteration."""
        self._table = np.zeros(-(-self._tokens.size // BLOCK_TOKENS), np.int32)
        self._blocks = 0
        salt = request.cache_salt
        self._walk = None if salt is None else PrefixWalk(salt, BLOCK_TOKENS)
        self._seed = seed_of(request)
        self.paused = request.paused
        """It computes all its tokens but the newest, and yields none, nor any more."""
        self._past = past_of(request, vocabulary_tokens)
        self._constraint = constraint
        told = request.sampling.prompt_logprobs
        self._prompt_top = None if request.output_tokens else told
        """So many likeliest tokens are told with each of the prompt; `None` tells of none."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Those of the prompt's tokens so far, but the first."""
        self._pool = pool
        self._states: Floats | None = None
        """The sum of the hidden states that its vector is made of."""

    @property
    def whole(self) -> bool:
        """Its tokens are computed in one iteration."""
        return self._pool is not None and self._pool.whole

    @property
    def token_types(self) -> npt.NDArray[np.int64]:
        """The types of the tokens of a query and a document, int64 [length]. The last token is the
        separator: tokens after its first occurrence have type 1, all others have type 0. A query
        does not contain it, which `TextCodec.encode_pair` checks.
        """
        ends = self._so_far == self._so_far[-1]
        return np.asarray(np.cumsum(ends) > ends, np.int64)

    @property
    def tells_prompt(self) -> bool:
        """Each token of its prompt that it computes takes a row of logits."""
        return self._prompt_top is not None and not self.decoding

    @property
    def left(self) -> int:
        """Tokens still to compute."""
        return self.length - self.computed

    @property
    def computable(self) -> int:
        """How many of the tokens that are left the sequence may compute now."""
        return 0 if self.whole and self.paused else self.left - self.paused

    @property
    def adopted_tokens(self) -> int:
        """How many tokens of the prompt other requests have computed."""
        return 0 if self._walk is None else self._walk.adopted_tokens

    @property
    def _so_far(self) -> npt.NDArray[np.int64]:
        return self._tokens[: self.length]

    def go_on(self, request: EngineRequest) -> None:
        """It has the tokens of the request, if those are more, and goes on unless it is paused."""
        more = request.output_tokens[self.length - self._prompt_tokens :]
        self._tokens[self.length : self.length + len(more)] = more
        if self._past is not None:
            self._past.add(more)
        if self._constraint is not None:
            self._constraint.add(more)
        self.length, self.paused = self.length + len(more), request.paused

    def tokens(self, count: int) -> npt.NDArray[np.int64]:
        """The next `count` tokens to compute."""
        return self._tokens[self.computed : self.computed + count]

    def table(self, context_tokens: int) -> npt.NDArray[np.int32]:
        """The blocks that hold the first `context_tokens` tokens."""
        return self._table[: -(-context_tokens // BLOCK_TOKENS)]

    def prompt_rows(self, count: int) -> int:
        """How many of the next `count` tokens, from the first, have logits that tell of a token of
        the prompt.
        """
        if not self.tells_prompt:
            return 0
        return max(min(self.computed + count, self._prompt_tokens - 1) - self.computed, 0)

    def tell_prompt(self, logits: Floats) -> None:
        """Logits [rows, vocabulary] of the tokens that it is about to have computed."""
        tokens = self._tokens[self.computed + 1 :]
        for row, token in zip(logits, tokens.tolist(), strict=False):
            self.prompt_logprobs.append(logprobs_of(row, token, self._prompt_top or 0))

    def pooled_rows(self, count: int) -> SequenceOf[int]:
        """Which of the next `count` tokens have hidden states that its vector needs."""
        assert self._pool is not None
        return self._pool.rows(self.computed, count, self.length)

    def add_states(self, states: Floats) -> None:
        """Those [rows, width] of the tokens that it is about to have computed."""
        added = states.sum(axis=0, dtype=np.float32)
        self._states = added if self._states is None else self._states + added

    def vector(self) -> tuple[float, ...]:
        """Once all of its tokens are computed."""
        assert self._pool is not None
        assert self._states is not None
        return self._pool.vector(self._states, self.length)

    def found_tokens(self, pool: KvBlocks) -> int:
        """Tokens that it would not have to compute if it began now."""
        return 0 if self._walk is None else self._walk.found_tokens(self._so_far, pool)

    def adopt(self, pool: KvBlocks) -> None:
        """Before it computes: take the blocks that hold its next tokens already."""
        if self._walk is None or self.computed != self._blocks * BLOCK_TOKENS:
            return
        adopted = self._walk.adopt(self._so_far, self.computed, self._table, pool)
        self._blocks += adopted // BLOCK_TOKENS
        self.computed += adopted

    def advance(self, count: int, pool: KvBlocks) -> None:
        """It has computed so many more tokens; others may have the blocks that are full."""
        self.computed += count
        if self._walk is not None:
            self._walk.name(self._so_far, self.computed, self._table, pool)

    def reserve(self, count: int, pool: KvBlocks) -> int:
        """Take blocks for the next `count` tokens, or for as many as there are blocks for; returns
        for how many.
        """
        missing = -(-(self.computed + count) // BLOCK_TOKENS) - self._blocks
        if missing > 0:
            taken = pool.take(min(missing, pool.free))
            self._table[self._blocks : self._blocks + len(taken)] = taken
            self._blocks += len(taken)
        return min(count, self._blocks * BLOCK_TOKENS - self.computed)

    def blocks(self) -> list[int]:
        """All blocks that it holds."""
        return [int(block) for block in self._table[: self._blocks]]

    def block_at(self, position: int) -> int:
        """The block at a position of its table."""
        return int(self._table[position])

    def release(self, pool: KvBlocks) -> None:
        """Let all blocks go."""
        pool.release(self.blocks())
        self._blocks = 0

    def move(self, renumbered: npt.NDArray[np.int32]) -> None:
        """Renumber the table: entry b becomes renumbered[b]."""
        self._table[: self._blocks] = renumbered[self._table[: self._blocks]]

    def draw(self) -> Draw:
        """How the next token is to be chosen."""
        index = self.length - self._prompt_tokens
        ends = self._end_ids
        return Draw(self._sampling, self._seed, index, self._past, self._constraint, ends)

    def append(self, token_id: int) -> tuple[int, FinishReason | None]:
        """Take a new token; returns its output index and whether it is the last."""
        index = self.length - self._prompt_tokens
        self._tokens[self.length] = token_id
        self.length += 1
        if self._past is not None:
            self._past.add((token_id,))
        if self._constraint is not None:
            self._constraint.add((token_id,))
            if self._constraint.failed:
                return index, FinishReason.FAILED
        if token_id in self._end_ids:
            return index, FinishReason.STOP
        return index, FinishReason.LENGTH if self.length >= self._tokens_max else None


def sequences_of(shape: IterationShape, vocabulary_tokens: int) -> list[Sequence]:
    """One for each decode and, after them, one whose prompt ends with the chunk: the last chunk of
    a prompt takes the longest, since a token comes of it. None holds a block yet.
    """
    made = [
        _sequence(number, shape.decode_context_tokens, 1, vocabulary_tokens)
        for number in range(shape.decode_batch)
    ]
    for sequence in made:
        sequence.decoding = True
    if shape.prefill_tokens:
        length = shape.prefill_past_tokens + shape.prefill_tokens
        made.append(_sequence(len(made), length, shape.prefill_tokens, vocabulary_tokens))
    return made


def _sequence(number: int, length: int, left: int, vocabulary_tokens: int) -> Sequence:
    """See `made_up_tokens`. It does not end with its next token."""
    request = EngineRequest(
        request_id=RequestId("measured"),
        prompt_tokens=made_up_tokens(number, length, left, vocabulary_tokens),
        sampling=SamplingParams(max_tokens=2),
    )
    sequence = Sequence(
        request,
        context_tokens_max=length + 2,
        vocabulary_tokens=vocabulary_tokens,
    )
    sequence.computed = length - left
    return sequence
