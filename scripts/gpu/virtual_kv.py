"""KV caches in CUDA's virtual memory: what a resize costs, beside kernels, under graphs, forked.

The way is the engine's own, `kv_mapped.MappedKv`, over the driver itself. First a forked process
does it all in small, as an engine process of the forkserver would; then each call of the driver is
timed, caches of 1, 10 and 40 GB grow by a quarter and shrink again, one grows while kernels read
it, and a CUDA graph that was captured before a remap is replayed after it.

    python -m scripts.gpu.virtual_kv [--dry]
"""

from scripts.gpu.sitting import CACHES_GB, LAYERS, Sitting, main  # isort: skip  before all of mesh

import multiprocessing
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from mesh_nodes.engines.device_range import Driver
from mesh_nodes.engines.vllm.kv_mapped import MappedKv

PIECES = (1, 8, 16, 32, 128, 512)
"""The sizes of memory of which single calls are timed, in the driver's chunks."""
CALLS_GB = 4
BESIDE_GB, PASSES = 4, 100
"""Kernels that have work for longer than it takes to grow by a quarter."""
FORKED_S_MAX = 60.0


class Cache:
    """A cache of so many bytes, with addresses for twice as many."""

    def __init__(self, sitting: Sitting, driver: Driver, size_bytes: int) -> None:
        block_bytes = LAYERS * sitting.layer_block_bytes
        self.blocks = size_bytes // block_bytes
        self.larger = self.blocks + self.blocks // 4
        self.grown_gb = (self.larger - self.blocks) * block_bytes / sitting.gb
        self.kv = MappedKv(driver, block_bytes, self.blocks, sitting.device, sitting.free_bytes)
        reserved = 2 * self.blocks + 1
        buffer = self.kv.allocate(reserved * block_bytes).view(torch.bfloat16)
        self.layers = self.kv.bind(
            list(buffer.view(LAYERS, reserved, sitting.layer_block_bytes // 2))
        )

    def resize(self, blocks: int) -> None:
        self.kv.check_room(blocks)
        self.kv.resize(blocks, range(1, min(blocks, self.blocks) + 1), [], _nothing)

    def passed(self) -> torch.Tensor:
        """What a kernel makes of all that is in use."""
        return sum(layer[1 : self.blocks + 1].sum(dtype=torch.float32) for layer in self.layers)


def _nothing(old: torch.Tensor, new: torch.Tensor) -> None:
    raise AssertionError("tensors stay")


class Timed:
    """A driver whose calls are timed: seconds of each, by its name."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.taken_s: dict[str, list[float]] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._driver, name)
        if not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            start_s = time.perf_counter()
            answer = found(*arguments)
            self.taken_s.setdefault(name, []).append(time.perf_counter() - start_s)
            return answer

        return call


def _small(end: Connection, dry: bool) -> None:
    """In a process of its own: whether tokens survive a grow and a shrink."""
    try:
        sitting = Sitting("forked", dry=dry)
        cache = Cache(sitting, sitting.driver(), sitting.gb)
        cache.layers[-1][cache.blocks] = 1.5
        cache.resize(cache.larger)
        cache.layers[0][cache.larger] = 2.5
        kept = bool((cache.layers[-1][cache.blocks] == 1.5).all())
        cache.resize(cache.blocks)
        end.send("ok" if kept else "tokens are lost")
    except Exception as error:
        end.send(f"{type(error).__name__}: {error}")


def forked(sitting: Sitting) -> None:
    """By a process that has torch imported and has never asked NVML or CUDA anything: this one
    has, and what is forked from here dies when it first uses CUDA.
    """
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    process = context.Process(target=_small, args=(theirs, sitting.dry), daemon=True)
    start_s = time.perf_counter()
    process.start()
    theirs.close()
    answer = "it ended" if not ours.poll(FORKED_S_MAX) else ours.recv()
    sitting.note("forked", answer)
    sitting.note("forked_s", time.perf_counter() - start_s, "s, context and all")
    process.kill()
    process.join()


def calls(sitting: Sitting, chunks: int) -> None:
    """Memory in pieces of so many chunks, access for each and for all at once."""
    timed = Timed(sitting.driver())
    size = chunks * timed.chunk_bytes
    pieces = max(CALLS_GB * sitting.gb // size, 1)
    begin = timed.reserve(pieces * size)
    places = range(begin, begin + pieces * size, size)
    for allow_all in (False, True):
        timed.taken_s.clear()
        handles = [timed.create(size) for _ in places]
        for place, handle in zip(places, handles, strict=True):
            timed.map(place, size, handle)
            if not allow_all:
                timed.allow(place, size)
        if allow_all:
            timed.allow(begin, pieces * size)
        for place, handle in zip(places, handles, strict=True):
            timed.unmap(place, size)
            timed.release(handle)
        told = f"ms/GB, {pieces} pieces of {size / 2**20:g} MiB"
        for name in ("allow",) if allow_all else ("create", "map", "allow", "unmap", "release"):
            taken_ms = 1e3 * sum(timed.taken_s[name]) * sitting.gb / (pieces * size)
            key = f"{name}{'_run' * allow_all}_{chunks}"
            sitting.note(f"{key}_ms_per_gb", taken_ms, told + ", all at once" * allow_all)
    timed.free(begin, pieces * size)


def one_size(sitting: Sitting, size_gb: int) -> None:
    key, size_bytes = f"map_{size_gb}gb", size_gb * sitting.gb
    if not sitting.fits(f"{key}_grow_ms", size_bytes * 3 // 2):
        return
    free = sitting.free_bytes()
    cache = Cache(sitting, sitting.driver(), size_bytes)
    cache.layers[0][1] = 1.5
    grow_s = sitting.timed_s(lambda: cache.resize(cache.larger))
    off = free - sitting.free_bytes() - cache.kv.device_bytes
    shrink_s = sitting.timed_s(lambda: cache.resize(cache.blocks))
    kept = bool((cache.layers[0][1] == 1.5).all())
    for way, seconds in (("grow", grow_s), ("shrink", shrink_s)):
        sitting.note(f"{key}_{way}_ms", 1e3 * seconds, f"ms, {cache.grown_gb:.2f} GB")
        sitting.note(f"{key}_{way}_ms_per_gb", 1e3 * seconds / cache.grown_gb, "ms/GB")
    sitting.note(f"{key}_off_books_mib", off / 2**20, "MiB more by the driver than in the books")
    sitting.note(f"{key}_kept", kept)
    cache.resize(0)
    sitting.note(f"{key}_left_mib", (free - sitting.free_bytes()) / 2**20, "MiB after its end")


def beside_kernels(sitting: Sitting) -> None:
    cache = Cache(sitting, sitting.driver(), BESIDE_GB * sitting.gb)
    for number, layer in enumerate(cache.layers):
        layer[1 : cache.blocks + 1] = number
    told = float(cache.passed())
    results: list[torch.Tensor] = []

    def passes() -> None:
        results[:] = [cache.passed() for _ in range(PASSES)]

    alone_s = sitting.timed_s(passes, 3)
    grown_s: list[float] = []

    def passes_and_grow() -> None:
        passes()
        start_s = time.perf_counter()
        cache.resize(cache.larger)
        grown_s.append(time.perf_counter() - start_s)

    beside_s = sitting.timed_s(passes_and_grow)
    same = all(float(result) == told for result in results)
    sitting.note("beside_grow_ms", 1e3 * grown_s[0], f"ms, {cache.grown_gb:.2f} GB, kernels run")
    sitting.note("beside_kernels_ratio", beside_s / alone_s, "time of the kernels, over that alone")
    sitting.note("beside_same", same)
    cache.resize(0)


def replay_after_remap(sitting: Sitting) -> None:
    cache = Cache(sitting, sitting.driver(), sitting.gb)
    last, out = cache.blocks, torch.zeros_like(cache.layers[0][1])

    def work() -> None:
        out.copy_(cache.layers[0][1] + cache.layers[-1][last])

    replay = sitting.captured(work)
    right = []
    for value in (1.0, 2.0, 3.0):
        cache.layers[0][1] = 0.5
        cache.layers[-1][last] = value
        replay()
        sitting.wait()
        right.append(bool((out == value + 0.5).all()))
        # Whatever lies under that block next time, it is other memory.
        cache.resize(max(last // 2, 1))
        cache.resize(cache.larger)
    sitting.note("graph_replays_right", all(right))
    sitting.note("graph_replay_us", 1e6 * sitting.timed_s(replay, 20), "us")
    cache.resize(0)


def measure(sitting: Sitting) -> None:
    sitting.part("forked", forked)
    torch.ones(1, device=sitting.device)
    for chunks in PIECES:
        sitting.part(f"calls_{chunks}", partial(calls, chunks=chunks))
    for size_gb in CACHES_GB:
        sitting.part(f"map_{size_gb}gb", partial(one_size, size_gb=size_gb))
    if sitting.fits("beside_grow_ms", 2 * BESIDE_GB * sitting.gb):
        sitting.part("beside", beside_kernels)
        sitting.part("graph", replay_after_remap)


if __name__ == "__main__":
    main("virtual_kv", measure)
