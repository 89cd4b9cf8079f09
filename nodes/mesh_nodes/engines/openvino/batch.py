"""Plans one iteration and lays out its inputs.

`plan` decides which sequences compute how many tokens now: first one for each that decodes, then
prompt chunks in the order of submission, as far as budget and KV blocks reach. `BatchInputs` turns
that into the tensors of `paged_attention`, padded to few sizes. `instance` runs it.

The CPU plugin builds and keeps kernels for every number of rows that it meets: 10 to 20 ms and 0.7
MB each for a small model. So iterations are padded, and prompt chunks cut, to every size up to 8,
then 8 and later 16 to a power of two: padding adds an eighth at most, and a sixteenth where a row
costs most.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import field

import numpy as np
import numpy.typing as npt
import openvino as ov

from mesh.domain.steps import Decode, Prefill, PrefillBudget
from mesh.domain.values import dataclass
from mesh.memory.kv_blocks import KvBlocks
from mesh_nodes.engines.openvino import paged_attention as names
from mesh_nodes.engines.openvino.footprint import BATCH_MAX
from mesh_nodes.engines.openvino.kv_cache import FIRST_BLOCK
from mesh_nodes.engines.openvino.paged_attention import BLOCK_TOKENS
from mesh_nodes.engines.openvino.sequence import Sequence

_EXACT_MAX = 8
_SIZES_PER_OCTAVE = 8
_FINE_ROWS_MIN = 128
_FINE_SIZES_PER_OCTAVE = 16


def padded(rows: int) -> int:
    """The least allowed size that is not below `rows`."""
    step = _step(rows)
    return -(-rows // step) * step


def cut(rows: int) -> int:
    """The largest allowed size that is not above `rows`."""
    step = _step(rows + 1)
    return rows // step * step


def _step(rows: int) -> int:
    """Distance of the allowed sizes around `rows`, which is in (octave, 2 * octave]."""
    if rows <= _EXACT_MAX:
        return 1
    octave = 1 << ((rows - 1).bit_length() - 1)
    sizes = _FINE_SIZES_PER_OCTAVE if octave >= _FINE_ROWS_MIN else _SIZES_PER_OCTAVE
    return octave // sizes


_CUT_TOKENS_MIN = 128
"""Chunks from here on are cut to fit; padding shorter ones costs a few tokens at most."""
_SCRATCH_TABLE = np.array([-FIRST_BLOCK], np.int32)
"""Block 0 of the memory, counted from the pool's first one."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one sequence computes in this iteration."""

    sequence: Sequence
    tokens: int

    @property
    def yields(self) -> bool:
        """Whether its last token is its newest, so that a further one comes of it."""
        return self.tokens == self.sequence.left

    @property
    def prompt_rows(self) -> int:
        """How many of its tokens, from the first, yield logits that tell of its prompt."""
        return self.sequence.prompt_rows(self.tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    work: list[Work] = field(default_factory=list)
    starved: list[Sequence] = field(default_factory=list)


def plan(
    active: SequenceOf[Sequence], prefill: Prefill, pool: KvBlocks, decode: Decode = None
) -> Plan:
    """Takes the blocks that the iteration writes. `active` is in the order of submission."""
    result = Plan()
    for sequence in active:
        if (
            sequence.decoding
            and not sequence.paused
            and (decode is None or sequence.request_id in decode)
        ):
            _add(result, sequence, 1, pool)
    budget, rows = PrefillBudget(prefill), len(result.work)
    told_left = max(BATCH_MAX - len(active), 1)
    for sequence in active:
        request_id = sequence.request_id
        most = budget.tokens_of(request_id)
        if most <= 0 or sequence.decoding or not sequence.computable:
            continue
        sequence.adopt(pool)
        if sequence.whole:
            # No chunk of it can be computed: one beyond the budget is the iteration's only text.
            beyond = sequence.computable > most
            if beyond and result.work:
                continue
            tokens = _add(result, sequence, sequence.computable, pool)
            if beyond and tokens:
                break
            budget.spend(request_id, tokens)
            rows += tokens
            continue
        if sequence.tells_prompt:
            # So many rows of logits are reckoned with, and each sequence may yield one.
            tokens = min(most, sequence.computable, told_left)
            if tokens:
                tokens = _add(result, sequence, tokens, pool)
            budget.spend(request_id, tokens)
            rows, told_left = rows + tokens, told_left - tokens
            continue
        if sequence.computable > most:
            rows += _add(result, sequence, _chunk(rows, most), pool)
            budget.spend(request_id, most)
            continue
        tokens = _add(result, sequence, sequence.computable, pool)
        budget.spend(request_id, tokens)
        rows += tokens
    return result


def _chunk(rows: int, budget: int) -> int:
    """How much of a prompt that is longer than what is left of the budget: all of that or, where it
    is much, a few tokens less, so that nothing needs padding."""
    fitting = cut(rows + budget) - rows
    return fitting if budget >= _CUT_TOKENS_MIN and fitting > budget // 2 else budget


def _add(result: Plan, sequence: Sequence, wanted: int, pool: KvBlocks) -> int:
    tokens = sequence.reserve(wanted, pool)
    if tokens >= (wanted if sequence.whole else 1):
        result.work.append(Work(sequence, tokens))
    else:
        result.starved.append(sequence)
        tokens = 0
    return tokens


class BatchInputs:
    """Binds the inputs of one infer request."""

    def __init__(self, compiled: ov.CompiledModel, request: ov.InferRequest) -> None:
        self._request = request
        self._ports = {port.any_name: port for port in compiled.inputs}
        self._bound: dict[str, npt.NDArray[np.generic]] = {}
        """The request refers to these arrays and does not own them."""

    def bind(self, work: SequenceOf[Work], *, pools: bool = False) -> None:
        """Logits will come first for the rows of `work` that yield a token, in their order, then
        for those that tell of prompts. Where the model `pools`, hidden states come for the rows
        that each of `work` needs, in their order. Without work there is one token in the scratch
        block, which yields logits, too.
        """
        fill = _fill(sum(item.tokens for item in work)) if work else [1]
        counts = np.array([item.tokens for item in work] + fill, np.int32)
        past = np.array([item.sequence.computed for item in work] + [0] * len(fill), np.int32)
        begins = _begins(counts)
        tables = [item.sequence.table(item.sequence.computed + item.tokens) for item in work]
        tables += [_SCRATCH_TABLE] * len(fill)
        ids = [item.sequence.tokens(item.tokens) for item in work]
        ids.append(np.zeros(sum(fill), np.int64))
        if pools:
            told = [item.sequence.pooled_rows(item.tokens) for item in work]
            sampled = []
        else:
            told = [range(item.prompt_rows) for item in work]
            sampled = [end - 1 for item, end in zip(work, begins[1:], strict=False) if item.yields]
        sampled += [begin + row for rows, begin in zip(told, begins, strict=False) for row in rows]
        sampled += [0] * ((padded(len(sampled)) if work else 1) - len(sampled))
        # Position of each token: its place in the batch, less its sequence's start there, plus
        # what that sequence has in the cache.
        shift = np.repeat(past - begins[:-1], counts)
        self._set(names.INPUT_IDS, np.concatenate(ids))
        self._set(names.POSITION_IDS, np.arange(begins[-1], dtype=np.int64) + shift)
        if names.TOKEN_TYPES in self._ports:
            types = [item.sequence.token_types for item in work]
            self._set(names.TOKEN_TYPES, np.concatenate([*types, np.zeros(sum(fill), np.int64)]))
        self._set(names.PAST_LENS, past)
        self._set(names.SUBSEQUENCE_BEGINS, begins)
        self._set(names.BLOCK_INDICES, np.concatenate(tables) + FIRST_BLOCK)
        self._set(names.BLOCK_INDICES_BEGINS, _begins(np.array([t.size for t in tables], np.int32)))
        self._set(names.MAX_CONTEXT_LEN, np.array((past + counts).max(), np.int32))
        self._set(names.SAMPLED_INDICES, np.array(sampled, np.int64))

    def _set(self, name: str, values: npt.NDArray[np.generic]) -> None:
        self._request.set_tensor(self._ports[name], ov.Tensor(values, shared_memory=True))
        self._bound[name] = values


def _fill(rows: int) -> list[int]:
    """Lengths of the sequences that pad an iteration. They compute token 0 over and over into the
    scratch block, which all of them share, since nobody reads it."""
    missing = padded(rows) - rows
    whole, rest = divmod(missing, BLOCK_TOKENS)
    return [BLOCK_TOKENS] * whole + [rest] * (rest > 0)


def _begins(counts: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Running totals from 0, [counts + 1]."""
    begins = np.zeros(counts.size + 1, np.int32)
    np.cumsum(counts, out=begins[1:])
    return begins
