"""Made-up models in torch alone: a Llama's matrices and attention, without its embedding or words.

What an iteration takes is in the bytes of its weights and caches and in its multiplications, and
those are here as in a model of that shape; positions are not turned, which is cheap. Caches are
dense, one row of addresses for a request. Before: `operators`, which times them.
"""

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from mesh.sim.operators.tables import Shape


class Stack:
    """Random weights of a shape, and a cache for so many tokens."""

    def __init__(
        self, shape: Shape, kv_tokens: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        def matrix(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, device=device, dtype=dtype).mul_(columns**-0.5)

        self.shape = shape
        width = shape.heads * shape.head_size
        kv_width = shape.kv_heads * shape.head_size
        self._layers = [
            (
                matrix(width + 2 * kv_width, shape.hidden),
                matrix(shape.hidden, width),
                matrix(2 * shape.inner, shape.hidden),
                matrix(shape.hidden, shape.inner),
            )
            for _ in range(shape.layers)
        ]
        self._head = matrix(shape.vocabulary, shape.hidden)
        self._split = (width, kv_width, kv_width)
        self._cache = torch.zeros(
            shape.layers, 2, kv_tokens, shape.kv_heads, shape.head_size, device=device, dtype=dtype
        )

    def hidden(self, batch: int, tokens: int) -> torch.Tensor:
        """What stands for the embeddings of so many tokens of each request."""
        return torch.randn(
            batch, tokens, self.shape.hidden, device=self._head.device, dtype=self._head.dtype
        )

    def iterate(self, hidden: torch.Tensor, past: int) -> torch.Tensor:
        """Logits [batch, vocabulary] of the last tokens; `past` tokens are in the cache already."""
        batch, tokens, width = hidden.shape
        for layer, (qkv, out, up, down) in enumerate(self._layers):
            parts = linear(rms_norm(hidden, (width,)), qkv).split(self._split, dim=-1)
            attended = self._attend(layer, parts, past)
            hidden = hidden + linear(attended.reshape(batch, tokens, -1), out)
            gate, value = linear(rms_norm(hidden, (width,)), up).chunk(2, dim=-1)
            hidden = hidden + linear(silu(gate) * value, down)
        return linear(hidden[:, -1], self._head)

    def _attend(self, layer: int, parts: tuple[torch.Tensor, ...], past: int) -> torch.Tensor:
        """[batch, tokens, heads, head_size]; keys and values go into the cache."""
        shape = self.shape
        batch, tokens, _ = parts[0].shape
        query = parts[0].view(batch, tokens, shape.heads, shape.head_size).transpose(1, 2)
        reach = past + tokens
        held = []
        for cache, new in zip(self._cache[layer], parts[1:], strict=True):
            rows = cache[: batch * reach].view(batch, reach, shape.kv_heads, shape.head_size)
            rows[:, past:] = new.view(batch, tokens, shape.kv_heads, shape.head_size)
            held.append(rows.transpose(1, 2))
        # A chunk's own tokens see all of it where there is a past: a little more work, and no mask.
        attended = scaled_dot_product_attention(
            query, *held, is_causal=tokens > 1 and not past, enable_gqa=True
        )
        return attended.transpose(1, 2)
