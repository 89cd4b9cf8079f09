"""Draws tokens in vLLM the way mesh draws them everywhere: from (seed, output index) alone.

vLLM's own sampler keeps a generator's state per request, which a request that moves to another node
would lose. This logits processor takes its place through the interface that vLLM offers for it: a
row that is sampled, penalised or asked about is drawn here by `mesh_nodes.engines.sampling` and
left with one token to choose; greedy rows are not touched. Drawn rows are copied to the host.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.sample.logits_processor import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)

from mesh.domain.request import SamplingParams, TokenLogprobs
from mesh.domain.steps import EngineRequest
from mesh_nodes.engines.sampling import Draw, Past, choose_telling, is_penalised, seed_of

EXTRA = "mesh"
"""The key under which a request's own words travel in vLLM's parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawOrder:
    """How the tokens of one request are drawn. `output` are those before the first of
    them."""

    sampling: SamplingParams
    seed: int
    first_index: int
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    told: list[TokenLogprobs] = field(default_factory=list)
    """Of the token drawn last, where it was asked for: for whoever takes that token."""


def draw_order(request: EngineRequest) -> DrawOrder | None:
    """Nothing for a request that vLLM's argmax serves as it is."""
    sampling = request.sampling
    if sampling.temperature <= 0.0 and sampling.logprobs is None and not is_penalised(sampling):
        return None
    return DrawOrder(
        sampling=sampling,
        seed=seed_of(request),
        first_index=len(request.output_tokens),
        prompt=request.prompt_tokens,
        output=request.output_tokens,
    )


class _Row:
    """One row of the batch. `outputs` is vLLM's own list, which grows with every token."""

    def __init__(self, order: DrawOrder, outputs: list[int], vocabulary_tokens: int) -> None:
        self.order = order
        self._outputs = outputs
        self._counted = 0
        self._past: Past | None = None
        if is_penalised(order.sampling):
            self._past = Past(order.prompt, order.output, vocabulary_tokens)

    def draw(self) -> Draw:
        order, drawn = self.order, len(self._outputs)
        if self._past is not None and drawn > self._counted:
            self._past.add(self._outputs[self._counted :])
            self._counted = drawn
        return Draw(order.sampling, order.seed, order.first_index + drawn, self._past)


class MeshDraw(LogitsProcessor):  # type: ignore[misc]
    """See vLLM's `LogitsProcessor` for when it calls what."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._vocabulary_tokens = int(vllm_config.model_config.get_vocab_size())
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
                self._rows[index] = _Row(order, outputs, self._vocabulary_tokens)
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
