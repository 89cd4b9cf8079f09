"""Files of weights of 0.1 to 2 GB into memory, cold and warm: mesh's way beside other readers.

Cold, the page cache has been told to forget the file; warm, it was read just before. All readers
take turns, in another order each round. The disk's limit is the best of several O_DIRECT loops that
keep nothing. The last line is one JSON object: `ssd_ratio_to_fio` (mesh's cold rate over that
limit), `ratio_to_torch` (over torch.load's, cold), `memory_ratio_to_memcpy` (mesh's warm rate over
a copy of as many bytes into memory that is there), `digest_cost_share` (by how much longer a cold
load with digests takes), at the largest size.
"""

import gc
import importlib
import importlib.util
import mmap
import os
import random
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from bench.harness import Report, Table, rounded, show_status, timed
from mesh.cli import output
from mesh_loader.digests import Verifier, Verify, write_index
from mesh_loader.disk import require_free
from mesh_loader.page_cache import forget, read_ahead
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
    return median(timed(lambda: np.copyto(target, source))[0] for _ in range(rounds))


def _touched(file: MappedFile) -> int:
    pages = file.array(np.dtype(np.uint8), (file.size_bytes,), 0)[::PAGE_BYTES]
    return int(pages.sum())


SIZES_GB = (0.1, 0.5, 2.0)
COLD, WARM = "cold", "warm"

Seconds = dict[tuple[str, str], list[float]]
"""By reader, and cold or warm."""


def _peers(wanted: bool) -> dict[str, Reader]:
    """Those that can be had; of the others it is said that they are missing."""
    found = {}
    for name, (package, reader) in PEERS.items():
        if wanted and importlib.util.find_spec(package) is not None:
            found[name] = reader
        else:
            reason = f"{package} is not installed" if wanted else "--no-peers"
            output.message(f"without {name}: {reason}")
    return found


def _measure(folder: Path, readers: dict[str, Reader], rounds: int) -> Seconds:
    seconds: Seconds = defaultdict(list)
    order, rng = list({**readers, **LIMITS}.items()), random.Random(0)
    for number in range(rounds):
        # What a disk gives depends on what it was asked for just before.
        rng.shuffle(order)
        for name, reader in order:
            show_status(f"round {number + 1} of {rounds}: {name}")
            gc.collect()
            for path in folder.iterdir():
                forget(path)
            seconds[name, COLD].append(timed(partial(reader, folder))[0])
            if name not in LIMITS:
                reader(folder)
                seconds[name, WARM].append(timed(partial(reader, folder))[0])
    show_status("")
    return seconds


def run(
    *,
    sizes: Annotated[tuple[float, ...], "GB of the files"] = SIZES_GB,
    rounds: int = 5,
    quick: Annotated[bool, "two rounds of the smaller sizes"] = False,
    peers: bool = True,
    folder: Annotated[Path, "a folder on the disk that is measured"] = Path(),
) -> Report:
    sizes, rounds = (SIZES_GB[:-1], 2) if quick else (sizes, rounds)
    readers = READERS | _peers(peers)
    found: Seconds = {}
    tables = []
    for size_gb in sorted(sizes):
        size_bytes = int(size_gb * 1e9)
        require_free(folder, 2 * size_bytes, "the files that are read")
        with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-load-") as name:
            show_status(f"writing {size_gb:g} GB")
            write_files(Path(name), size_bytes, torch="torch.load" in readers)
            found = _measure(Path(name), readers, rounds)
            read_bytes = (Path(name) / "model.safetensors").stat().st_size
        tables.append(_table(size_gb, read_bytes, found, readers))
    copy_s, mesh_s = memcpy_s(read_bytes, rounds), median(found["mesh", WARM])
    limit_s = min(median(found[name, COLD]) for name in LIMITS)
    torch_s = found.get(("torch.load", COLD))
    cold_s = median(found["mesh", COLD])
    digest_share = median(found["mesh, digests checked", COLD]) / cold_s - 1.0
    return Report(
        figures={
            "size_gb": rounded(read_bytes / 1e9),
            "limit": "own O_DIRECT loops, the best of them",
            "ssd_ratio_to_fio": rounded(limit_s / cold_s),
            "ratio_to_torch": rounded(median(torch_s) / cold_s if torch_s else None),
            "memory_ratio_to_memcpy": rounded(copy_s / mesh_s),
            "digest_cost_share": rounded(digest_share),
        },
        shown=tables,
    )


def _table(size_gb: float, size_bytes: int, seconds: Seconds, readers: dict[str, Reader]) -> Table:
    def rate(name: str, cache: str) -> str:
        taken = seconds.get((name, cache))
        return f"{size_bytes / 1e9 / median(taken):.2f}" if taken else "-"

    rows = [[name, rate(name, COLD), rate(name, WARM)] for name in (*readers, *LIMITS)]
    headings = ["READER", "COLD_GB_PER_S", "WARM_GB_PER_S"]
    return Table(headings=headings, rows=rows, title=f"{size_gb:g} GB")
