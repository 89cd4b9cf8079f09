"""How large a KV cache is to be by what its requests need, and a watermark against ping-pong
(LLM-Mesh §6.2): early and by more than is needed it grows, late it shrinks.
"""

from mesh.memory.watermark import recommended
from mesh.policy.interface import KvDemand, KvSize


def by_demand(demand: KvDemand) -> KvSize:
    """M_require and M_recommend."""
    required = max(demand.required_blocks, demand.least_blocks)
    wanted = recommended(required, demand.watermark_share)
    kept_max = wanted * (1.0 + demand.watermark_share)
    return KvSize(required_blocks=required, wanted_blocks=wanted, kept_blocks_max=kept_max)
