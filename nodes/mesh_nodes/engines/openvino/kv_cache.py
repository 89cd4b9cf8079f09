"""The memory of one instance's KV cache, and the two ways of resizing it behind one interface.

`instance` calls it between two steps; block numbers come from `blocks`. ELASTIC is the way: pages
come as blocks are written and go without a copy. COPYING allocates anew and copies what is in use:
it serves where the addresses for ELASTIC cannot be had, and to measure against.
"""

import logging
from enum import StrEnum
from typing import Protocol

import openvino as ov

from mesh.domain.errors import OutOfMemory
from mesh_nodes.engines.openvino.blocks import Blocks
from mesh_nodes.engines.openvino.kv_copying import CopyingKvCache
from mesh_nodes.engines.openvino.kv_elastic import ElasticKvCache

log = logging.getLogger(__name__)


class KvResize(StrEnum):
    """How a KV cache grows and shrinks."""

    ELASTIC = "elastic"
    COPYING = "copying"


class KvCache(Protocol):
    """Key and value caches of all layers, bound to one infer request."""

    block_bytes: int
    dense: bool
    """Whether a shrink to n blocks needs those in use to be below n."""

    @property
    def held_bytes(self) -> int:
        """What it takes of the system's memory. May be read from any thread."""
        ...

    def claim(self, free: Blocks, count: int) -> Blocks:
        """Choose so many of these free blocks, which are in ascending order, to be written."""
        ...

    def back(self, blocks: Blocks) -> None:
        """Put memory under blocks that no request holds. Fresh ones all read from the system's one
        page of zeros, far quicker than a cache with tokens in it.
        """
        ...

    def resize(self, blocks: int, in_use: Blocks, places: Blocks) -> None:
        """Grow or shrink to `blocks`; tokens of block in_use[i] are in block places[i] afterwards.

        Where `places` differs from `in_use`, the place is free. Raises OutOfMemory, and then
        nothing has changed.
        """
        ...

    def trim(self, kept: Blocks, keep: int) -> None:
        """No more blocks than `keep` are to take memory, but for those to be `kept`. May be called
        from any thread.
        """
        ...

    def rest(self, kept: Blocks) -> None:
        """No request is left: memory is wanted for none of the other blocks, for now."""
        ...

    def close(self) -> None:
        """Give every page back at once, whoever still holds the tensors."""
        ...


def bind_kv_cache(
    how: KvResize,
    compiled: ov.CompiledModel,
    request: ov.InferRequest,
    *,
    blocks: int,
    range_blocks: int,
) -> KvCache:
    """A cache of `blocks` that can grow to `range_blocks`; one that copies where the system has no
    addresses for a range. Raises OutOfMemory when there are none for the blocks, either.
    """
    if how is KvResize.ELASTIC:
        try:
            return ElasticKvCache(compiled, request, range_blocks=range_blocks)
        except OutOfMemory as error:
            log.warning("resizing this KV cache will copy it: %s", error.message)
    return CopyingKvCache(compiled, request, blocks=blocks)
