"""Adds up the hidden states that a text's vector is made of, in the place of vLLM's own pooler.

vLLM's takes means of whole texts alone; this one takes chunks of them, and any pooling that a
folder states. What a head scores is left to vLLM. Before: `internals`, which puts it into a loaded
model. After: vLLM's model runner, which calls it with each iteration.
"""

from collections.abc import Set
from typing import Any

import torch
from vllm.model_executor.layers.pooler import Pooler

from mesh_nodes.engines.pooling import Pool

EMBEDS, SCORES = "embed", "classify"
"""vLLM's names of what requests ask a pooler for."""


class SummingPooler(Pooler):  # type: ignore[misc]
    """See vLLM's `Pooler` for who calls what."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self._pool = pool

    def get_supported_tasks(self) -> Set[str]:
        return {EMBEDS}

    def forward(
        self, hidden_states: torch.Tensor, pooling_metadata: Any
    ) -> list[torch.Tensor | None]:
        """The sums [width], in f32, of the texts that `hidden_states` [tokens, width] complete."""
        cursor = pooling_metadata.get_pooling_cursor()
        sums: list[torch.Tensor | None] = []
        begin = 0
        for states, count, reached, length in zip(
            pooling_metadata.pooling_states,
            cursor.num_scheduled_tokens_cpu.tolist(),
            cursor.seq_lens_cpu.tolist(),
            cursor.prompt_lens_cpu.tolist(),
            strict=True,
        ):
            so_far = states.hidden_states_cache
            if rows := self._pool.rows(reached - count, count, length):
                added = hidden_states[begin + rows[0] : begin + rows[-1] + 1].float().sum(0)
                so_far[:] = [so_far[0] + added if so_far else added]
            sums.append(so_far[0] if so_far and reached == length else None)
            begin += count
        return sums
