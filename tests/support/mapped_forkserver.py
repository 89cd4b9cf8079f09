"""A forkserver whose engine processes have their KV caches in virtual memory, on a CPU.

`python -m tests.support.mapped_forkserver FD` is the forkserver except for that: where processes
would find CUDA's driver they find one that stands in for it, with 64 KiB a chunk. It refuses access
while more chunks are mapped than `STAND_IN_CHUNKS_ALLOWED` says.
"""

import os
import sys
from collections.abc import Callable

import torch

from mesh_nodes.engines.cuda_driver import CudaDriver
from mesh_nodes.engines.vllm import forkserver, kv_mapped
from mesh_nodes.engines.vllm.kv_memory import KvMemory
from tests.support.cuda_driver import StandInDriver

DEVICE_CHUNKS = 1 << 15
CHUNK_BYTES = 1 << 16


def _mapped(
    elastic: bool,
    block_bytes: int,
    blocks: int,
    device: torch.device,
    free_bytes: Callable[[], int],
) -> KvMemory:
    allowed = int(os.environ.get("STAND_IN_CHUNKS_ALLOWED", DEVICE_CHUNKS))
    driver = StandInDriver(DEVICE_CHUNKS, CHUNK_BYTES)
    driver.fails = lambda asked: asked == "cuMemSetAccess" and len(driver.mapped) > allowed
    return kv_mapped.MappedKv(
        CudaDriver(driver, 0), block_bytes, blocks, device, lambda: driver.free_bytes
    )


if __name__ == "__main__":
    # Before the forkserver imports what takes it from there.
    kv_mapped.kv_memory = _mapped
    forkserver.main(int(sys.argv[1]))
