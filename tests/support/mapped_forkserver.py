"""A forkserver whose engine processes have virtual memory for KV caches and weights, on a CPU.

`python -m tests.support.mapped_forkserver FD` is the forkserver except for that: where processes
would find CUDA's driver they find one that stands in for it, with 64 KiB a chunk. It refuses access
while more chunks are mapped than `STAND_IN_CHUNKS_ALLOWED` says.
"""

import os
import sys

from mesh_nodes.engines.cuda_driver import CudaDriver
from mesh_nodes.engines.vllm import device, footprint, forkserver
from tests.support.cuda_driver import StandInDriver

DEVICE_CHUNKS = 1 << 15
CHUNK_BYTES = 1 << 16


def _virtual_memory() -> CudaDriver:
    allowed = int(os.environ.get("STAND_IN_CHUNKS_ALLOWED", DEVICE_CHUNKS))
    driver = StandInDriver(DEVICE_CHUNKS, CHUNK_BYTES)
    driver.fails = lambda asked: asked == "cuMemSetAccess" and len(driver.mapped) > allowed
    return CudaDriver(driver, 0)


if __name__ == "__main__":
    # Before the forkserver imports what takes it from there.
    device.virtual_memory = _virtual_memory
    # The models of tests would fit into one piece of the usual size.
    footprint.WEIGHTS_PIECE_CHUNKS = 1
    forkserver.main(int(sys.argv[1]))
