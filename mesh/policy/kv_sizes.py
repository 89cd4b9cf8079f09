"""How large a KV cache is to be by what its requests need, and a watermark against ping-pong
(LLM-Mesh §6.2): early and by more than is needed it grows, late it shrinks.
"""

from mesh.memory.watermark import recommended
from mesh.policy.interface import KvDemand, KvSize


def by_demand(
    demand: KvDemand, tokens_least: int | None = None, watermark_share: float | None = None
) -> KvSize:
    """M_require and M_recommend; None: as the cell is set."""
    tokens = demand.tokens_least if tokens_least is None else tokens_least
    share = demand.watermark_share if watermark_share is None else watermark_share
    least = -(-min(tokens, demand.context_tokens) // demand.block_tokens)
    required = max(demand.required_blocks, least)
    wanted = recommended(required, share)
    kept_max = wanted * (1.0 + share)
    return KvSize(required_blocks=required, wanted_blocks=wanted, kept_blocks_max=kept_max)
