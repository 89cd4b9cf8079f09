"""Plans one iteration and lays out its inputs.

`plan` decides which sequences compute how many tokens now: first one for each that decodes, then
prompt chunks in the order of submission, as far as budget and KV blocks reach. `BatchInputs` turns
that into the tensors of `paged_attention`. `instance` runs the result.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import openvino as ov

from mesh_nodes.engines.openvino import paged_attention as names
from mesh_nodes.engines.openvino.blocks import BlockPool
from mesh_nodes.engines.openvino.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """What one sequence computes in this iteration."""

    sequence: Sequence
    tokens: int

    @property
    def yields(self) -> bool:
        """Whether its last token is its newest, so that a further one comes of it."""
        return self.tokens == self.sequence.left


@dataclass(frozen=True, slots=True)
class Plan:
    work: list[Work] = field(default_factory=list)
    starved: list[Sequence] = field(default_factory=list)


def plan(active: SequenceOf[Sequence], prefill_tokens_max: int, pool: BlockPool) -> Plan:
    """Takes the blocks that the iteration writes. `active` is in the order of submission."""
    result = Plan()
    for sequence in active:
        if sequence.decoding:
            _add(result, sequence, 1, pool)
    budget = prefill_tokens_max
    for sequence in active:
        if budget <= 0:
            break
        if not sequence.decoding:
            budget -= _add(result, sequence, min(budget, sequence.left), pool)
    return result


def _add(result: Plan, sequence: Sequence, wanted: int, pool: BlockPool) -> int:
    tokens = sequence.reserve(wanted, pool)
    if tokens > 0:
        result.work.append(Work(sequence, tokens))
    else:
        result.starved.append(sequence)
    return tokens


class BatchInputs:
    """Binds the inputs of one infer request."""

    def __init__(self, compiled: ov.CompiledModel, request: ov.InferRequest) -> None:
        self._request = request
        self._ports = {port.any_name: port for port in compiled.inputs}
        self._bound: dict[str, npt.NDArray[np.generic]] = {}
        """The request refers to these arrays and does not own them."""

    def bind(self, work: SequenceOf[Work]) -> None:
        """Logits will come for the rows of `work` that yield a token, in their order."""
        counts = np.array([item.tokens for item in work], np.int32)
        past = np.array([item.sequence.computed for item in work], np.int32)
        begins = _begins(counts)
        tables = [item.sequence.table(item.sequence.computed + item.tokens) for item in work]
        yields = np.array([item.yields for item in work], np.bool_)
        # Position of each token: its place in the batch, less its sequence's start there, plus
        # what that sequence has in the cache.
        shift = np.repeat(past - begins[:-1], counts)
        self._set(names.INPUT_IDS, np.concatenate([i.sequence.tokens(i.tokens) for i in work]))
        self._set(names.POSITION_IDS, np.arange(begins[-1], dtype=np.int64) + shift)
        self._set(names.PAST_LENS, past)
        self._set(names.SUBSEQUENCE_BEGINS, begins)
        self._set(names.BLOCK_INDICES, np.concatenate(tables))
        self._set(names.BLOCK_INDICES_BEGINS, _begins(np.array([t.size for t in tables], np.int32)))
        self._set(names.MAX_CONTEXT_LEN, np.array((past + counts).max(), np.int32))
        self._set(names.SAMPLED_INDICES, (begins[1:][yields] - 1).astype(np.int64))

    def _set(self, name: str, values: npt.NDArray[np.generic]) -> None:
        self._request.set_tensor(self._ports[name], ov.Tensor(values, shared_memory=True))
        self._bound[name] = values


def _begins(counts: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Running totals from 0, [counts + 1]."""
    begins = np.zeros(counts.size + 1, np.int32)
    np.cumsum(counts, out=begins[1:])
    return begins
