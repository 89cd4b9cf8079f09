"""How much memory an instance needs: its weights, and a KV cache for its requests.

A request's term of eq. 2 of LLM-Mesh (§6.1) with one refinement: none is expected to write more
than it may. A cache grows early and by more than is needed, and shrinks late (§6.2).
The controller core adds the terms up in KV blocks, of which each request begins its own.
"""

from math import ceil

from mesh.domain.model import Footprint, ModelInfo

BLOCK_TOKENS = 32
"""KV block size assumed of an engine that has not stated its own."""
WEIGHTS_MARGIN = 1.1
"""Over the bytes on disk: buffers and alignment, until an engine states what it takes."""


def estimate_footprint(model: ModelInfo) -> Footprint:
    """What an instance will take on an engine that has not stated it yet: bytes on disk and a
    margin, 16-bit KV.
    """
    return Footprint(
        weights_bytes=int(model.disk_bytes * WEIGHTS_MARGIN),
        kv_block_bytes=BLOCK_TOKENS * model.kv_bytes_per_token(),
        block_tokens=BLOCK_TOKENS,
    )


def kv_blocks_within(
    footprint: Footprint, *, least: int, wanted: int, free_bytes: int
) -> int | None:
    """KV blocks for a new instance: as many as are wanted, or as fit beside the weights, but never
    fewer than it needs at least; None when those do not fit.
    """
    fitting = (free_bytes - footprint.instance_bytes(0)) // footprint.kv_block_bytes
    return min(fitting, max(least, wanted)) if fitting >= least else None


def recommended(required: int, share: float = 0.25) -> int:
    """Blocks to grow to, or to shrink to, where so many are required: w of §6.2 more."""
    return ceil(required * (1.0 + share))


def expected_tokens(
    prompt_tokens: int, output_tokens: int, *, output_tokens_max: int, output_tokens_mean: float
) -> int:
    """I + max(O, mean O) of one request, of eq. 2; `output_tokens` are those so far."""
    expected = max(output_tokens, ceil(output_tokens_mean))
    return prompt_tokens + min(expected, output_tokens_max)
