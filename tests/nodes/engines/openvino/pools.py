"""KV blocks of an instance without a cache of its own: the lowest free ones, no pages."""

from mesh.memory.cache_budget import CacheBudget
from mesh.memory.kv_blocks import KvBlocks
from mesh_nodes.engines.openvino.blocks import BlockPlaces, Blocks, Pages


class NoPages:
    def claim(self, free: Blocks, count: int) -> Blocks:
        return free[:count]

    def trim(self, kept: Blocks, keep: int) -> None:
        pass


def pool_of(blocks: int, pages: Pages | None = None) -> KvBlocks:
    places = BlockPlaces(pages or NoPages(), blocks=blocks, total=blocks)
    return KvBlocks(blocks, places, CacheBudget())
