"""Ways to bring a file of weights into memory: mesh's, other libraries', and the disk's own limit.

Each takes the folder that `files` wrote and returns when every tensor can be computed with.
`__main__` times them.
"""

import importlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from mesh_loader.digests import Verifier, Verify, write_index
from mesh_loader.page_cache import read_ahead
from mesh_nodes.engines.openvino.checkpoint import Checkpoint
from mesh_nodes.engines.openvino.mapped_file import MappedFile

Reader = Callable[[Path], object]
PAGE_BYTES = 4096
TENSOR_BYTES = 32 << 20
DIRECT_PIECE_BYTES = 4 << 20
DIRECT_THREADS = (4, 16, 32)
SAFETENSORS, TORCH = "model.safetensors", "model.pt"


def write_files(folder: Path, size_bytes: int, *, torch: bool) -> None:
    """A model of so many bytes in f16, as safetensors and as torch saves it."""
    rng = np.random.default_rng(0)
    tensors = {
        f"t{n:04d}": rng.integers(0, 1 << 14, TENSOR_BYTES // 2, np.uint16).view(np.float16)
        for n in range(max(1, size_bytes // TENSOR_BYTES))
    }
    save_file(tensors, folder / SAFETENSORS)
    write_index(folder)  # of what mesh reads alone
    if torch:
        library = importlib.import_module("torch")
        library.save({k: library.from_numpy(v) for k, v in tensors.items()}, folder / TORCH)


def mesh(folder: Path) -> object:
    """As a load from a blob does: mapped, read ahead, not copied; here every page is touched."""
    with ExitStack() as reading:
        reading.callback(read_ahead(folder / SAFETENSORS))
        return [_touched(file) for file in Checkpoint(folder).maps]


def mesh_checked(folder: Path) -> object:
    """As the first load of a model in a node does."""
    Verifier(Verify.ALWAYS).check(folder)
    return mesh(folder)


def safetensors(folder: Path) -> object:
    with safe_open(folder / SAFETENSORS, framework="numpy") as file:
        return [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118


def torch_load(folder: Path) -> object:
    return importlib.import_module("torch").load(folder / TORCH, weights_only=True)


def runai(folder: Path) -> object:
    streamer = importlib.import_module("runai_model_streamer").SafetensorsStreamer
    with streamer() as stream:
        stream.stream_file(str(folder / SAFETENSORS))
        return [tensor.shape for _, tensor in stream.get_tensors()]


def fast_safetensors(folder: Path) -> object:
    library = importlib.import_module("fastsafetensors")
    loader = library.SafeTensorsFileLoader(library.SingleGroup(), device="cpu", nogds=True)
    try:
        loader.add_filenames({0: [str(folder / SAFETENSORS)]})
        buffer = loader.copy_files_to_device()
        shapes = [buffer.get_tensor(name).shape for name in loader.get_keys()]
        buffer.close()
        return shapes
    finally:
        loader.close()


def direct(path: Path, threads: int) -> int:
    """O_DIRECT past the page cache, each thread into one buffer again and again: no reader that
    keeps the bytes can be quicker. Returns how many there are.
    """
    pieces = iter(range(0, path.stat().st_size, DIRECT_PIECE_BYTES))
    taking = threading.Lock()
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def taken() -> Iterator[int]:
        while True:
            with taking:
                begin = next(pieces, None)
            if begin is None:
                return
            yield begin

    def read(_: int) -> int:
        with mmap.mmap(-1, DIRECT_PIECE_BYTES) as buffer:
            return sum(os.preadv(descriptor, [buffer], begin) for begin in taken())

    try:
        with ThreadPoolExecutor(threads) as pool:
            return sum(pool.map(read, range(threads)))
    finally:
        os.close(descriptor)


def _direct(folder: Path, threads: int) -> int:
    return direct(folder / SAFETENSORS, threads)


READERS: dict[str, Reader] = {
    "mesh": mesh,
    "mesh, digests checked": mesh_checked,
    "safetensors": safetensors,
}
PEERS: dict[str, tuple[str, Reader]] = {
    "torch.load": ("torch", torch_load),
    "runai-model-streamer": ("runai_model_streamer", runai),
    "fastsafetensors": ("fastsafetensors", fast_safetensors),
}
"""With the package that each needs."""
LIMITS: dict[str, Reader] = {
    f"O_DIRECT, {threads} threads": partial(_direct, threads=threads) for threads in DIRECT_THREADS
}


def memcpy_s(size_bytes: int, rounds: int) -> float:
    """The median time of a copy into pages that are there."""
    source, target = np.ones(size_bytes, np.uint8), np.ones(size_bytes, np.uint8)
    seconds = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - start_s)
    return median(seconds)


def _touched(file: MappedFile) -> int:
    pages = file.array(np.dtype(np.uint8), (file.size_bytes,), 0)[::PAGE_BYTES]
    return int(pages.sum())
