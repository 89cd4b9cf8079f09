"""Draws tokens in vLLM the way mesh draws them everywhere: from (seed, output index) alone.

vLLM's own sampler keeps a generator's state per request, which a request that moves to another node
would lose. This logits processor takes its place through the interface that vLLM offers for it: a
row that is sampled, biased, penalised or asked about is drawn here by `mesh_nodes.engines.sampling`
and left with one token to choose; greedy rows are not touched. Drawn rows are copied to the host.
"""

from dataclasses import field
from pathlib import Path
from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from mesh.domain.request import TokenLogprobs
from mesh.domain.steps import EngineRequest
from mesh.domain.values import dataclass
from mesh_nodes.engines.grammars import constraint_of
from mesh_nodes.engines.sampling import (
    Draw,
    choose_telling,
    is_biased,
    is_penalised,
    past_of,
    seed_of,
)

EXTRA = "mesh"
"""The key under which a request's own words travel in vLLM's parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """The request whose tokens are drawn."""

    request: EngineRequest
    told: list[TokenLogprobs] = field(default_factory=list)
    """The log-probabilities of the token that was drawn last, where they were asked for. Whoever
    takes that token takes them, too.
    """


def sample_order(request: EngineRequest) -> SampleOrder | None:
    """Nothing for a request that vLLM's argmax serves as it is."""
    sampling = request.sampling
    greedy = sampling.temperature <= 0.0 and sampling.grammar is None
    shifted = is_penalised(sampling) or is_biased(sampling)
    if greedy and sampling.logprobs is None and not shifted:
        return None
    return SampleOrder(request=request)


class _Row:
    """One row of the batch. `outputs` is vLLM's own list, which grows with every token."""

    def __init__(
        self, order: SampleOrder, outputs: list[int], vocabulary_tokens: int, model_path: Path
    ) -> None:
        self.order = order
        self._outputs = outputs
        self._seed = seed_of(order.request)
        self._counted = 0
        self._past = past_of(order.request, vocabulary_tokens)
        self._constraint = constraint_of(order.request, model_path, vocabulary_tokens)

    def draw(self) -> Draw:
        request, drawn = self.order.request, len(self._outputs)
        for follows in (self._past, self._constraint):
            if follows is not None:
                follows.add(self._outputs[self._counted :])
        self._counted = drawn
        index = len(request.output_tokens) + drawn
        ends = request.end_ids
        return Draw(request.sampling, self._seed, index, self._past, self._constraint, ends)


class MeshSampler(LogitsProcessor):  # type: ignore[misc]
    """See vLLM's `LogitsProcessor` for when it calls what."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._vocabulary_tokens = int(vllm_config.model_config.get_vocab_size())
        self._model_path = Path(vllm_config.model_config.model)
        self._rows: dict[int, _Row] = {}
        """By their place in the batch; greedy rows have none."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, outputs in batch_update.added:
            self._rows.pop(index, None)
            order = (params.extra_args or {}).get(EXTRA)
            if order is not None:
                self._rows[index] = _Row(order, outputs, self._vocabulary_tokens, self._model_path)
        for left, right, direction in batch_update.moved:
            moving, replaced = self._rows.pop(left, None), self._rows.pop(right, None)
            if moving is not None:
                self._rows[right] = moving
            if direction == MoveDirectionality.SWAP and replaced is not None:
                self._rows[left] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary], as f32."""
        rows = sorted(self._rows)
        if rows:
            drawn = logits[rows, : self._vocabulary_tokens].float().cpu().numpy()
            chosen = choose_telling(drawn, [self._rows[row].draw() for row in rows])
            for row, (_, logprobs) in zip(rows, chosen, strict=True):
                self._rows[row].order.told[:] = logprobs
            logits[rows] = float("-inf")
            logits[rows, [token_id for token_id, _ in chosen]] = 0.0
        return logits
