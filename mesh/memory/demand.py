"""How much memory an instance needs: its weights, and a KV cache that is worth having."""

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


def least_instance_bytes(footprint: Footprint, context_tokens_max: int) -> int:
    """The smallest instance that serves one request of full length."""
    return footprint.instance_bytes(footprint.blocks_for(context_tokens_max))


def kv_blocks_within(
    footprint: Footprint, *, context_tokens_max: int, kv_tokens_wanted: int, free_bytes: int
) -> int | None:
    """KV blocks for a new instance: the wanted tokens, or as many as fit beside the weights, but
    never less than one full context (L_min of LLM-Mesh §6.1); None when that does not fit.
    """
    fitting = (free_bytes - footprint.weights_bytes) // footprint.kv_block_bytes
    least = footprint.blocks_for(context_tokens_max)
    if fitting < least:
        return None
    return min(fitting, max(least, footprint.blocks_for(kv_tokens_wanted)))
