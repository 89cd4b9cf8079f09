"""What loads from this node's disk should take, measured before there has been any.

Where a stored model needs no compile, the smallest one is loaded twice and unloaded again, the
second time as an instance that shares its weights (`tried_rates`). Else weights pass from the disk
into memory that was not there before, one after the other, and the engine measures the fixed part
of a load (`measured_rate`): all of it within a second or so, on an idle machine. Before: the
composition root, where `kept_loads` knows nothing. After: the node's hello.
"""

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from mesh.compute.load_times import PRIORS, fitted
from mesh.domain.ids import DeploymentName, InstanceId
from mesh.domain.messages import InstanceLoaded
from mesh.domain.steps import HeldModel, LoadOrder, LoadRate, LoadTier
from mesh.runtime.engine import Engine
from mesh_loader.store import ModelStore, StoredModel

READ_BYTES_MAX = 64 << 20
READ_S_MAX = 0.3
CHUNK_BYTES = 4 << 20
WRITTEN_BYTES = 8 << 20
"""Where the store has no file to read."""
COPIED_BYTES = 32 << 20
FILES_MAX = 64
"""At most so many files of the store are looked at."""
_PIECE_BYTES = 64 << 10
"""Larger buffers on the heap would change what the allocator gives back later."""


def measured_rate(store_path: Path, least_load_s: Callable[[], float]) -> LoadRate:
    """`least_load_s` measures what a load takes without any bytes. Raises OSError where the disk
    cannot be read, and what `least_load_s` does.
    """
    disk, memory = _read_bytes_per_s(store_path), _copy_bytes_per_s()
    return LoadRate(fixed_s=least_load_s(), bytes_per_s=1.0 / (1.0 / disk + 1.0 / memory))


def _read_bytes_per_s(store_path: Path) -> float:
    """The rate of reading the largest file of weights, or one that is written for it, past the page
    cache.
    """
    files = islice(store_path.glob("models/*/*.safetensors"), FILES_MAX)
    found = max(files, key=lambda path: path.stat().st_size, default=None)
    if found is not None and found.stat().st_size >= WRITTEN_BYTES:
        return _direct_bytes_per_s(found)
    with tempfile.NamedTemporaryFile(dir=store_path) as file:
        for _ in range(WRITTEN_BYTES // _PIECE_BYTES):
            file.write(os.urandom(_PIECE_BYTES))
        file.flush()
        os.fsync(file.fileno())
        return _direct_bytes_per_s(Path(file.name))


def _direct_bytes_per_s(path: Path) -> float:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # a filesystem in memory has no such thing
        descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(-1, CHUNK_BYTES) as chunk:
            _touch(chunk)
            done, start_s = 0, time.perf_counter()
            while done < READ_BYTES_MAX and time.perf_counter() - start_s < READ_S_MAX:
                count = os.preadv(descriptor, [chunk], done)
                done += count
                if count < CHUNK_BYTES:
                    break
            return max(done, 1) / max(time.perf_counter() - start_s, 1e-6)
    finally:
        os.close(descriptor)


def _copy_bytes_per_s() -> float:
    """Into fresh pages, which the system has to clear first."""
    with mmap.mmap(-1, COPIED_BYTES) as source, mmap.mmap(-1, COPIED_BYTES) as copy:
        _touch(source)
        with memoryview(source) as read, memoryview(copy) as written:
            start_s = time.perf_counter()
            written[:] = read
            return COPIED_BYTES / max(time.perf_counter() - start_s, 1e-6)


def _touch(pages: mmap.mmap) -> None:
    """Writes to the pages, so that they are in memory."""
    for _ in range(len(pages) // _PIECE_BYTES):
        pages.write(b"\1" * _PIECE_BYTES)


WEIGHTS_BYTES_MAX = 512 << 20
"""Larger models would hold up the node's start."""
COMPILE_RATIO = 5.0
"""A load with its compile over one without: 1.6 to 3.9 s over 0.25 to 0.8 s, of 135M parameters."""
_NAMES = InstanceId("trial-1"), InstanceId("trial-2")


def tried_rates(
    engine: Engine, store: ModelStore, prepared: Sequence[HeldModel], bytes_max: int
) -> dict[LoadTier, LoadRate]:
    """By tier; of loads from the disk it is derived. Nothing where no model is small enough:
    `bytes_max` is what both instances may take. One load comes before them, since the first of a
    process pays for more than itself. Raises EngineError, ModelError or StorageError.
    """
    tried = [
        (loaded.tier, (loaded.footprint.weights_bytes, loaded.elapsed_s))
        for loaded in _tried(engine, store, prepared, bytes_max)
    ]
    rates = {tier: fitted([load], PRIORS[tier]) for tier, load in tried}
    spared = rates.get(LoadTier.PREPARED) or rates.get(LoadTier.CACHED)
    if spared is None:
        return rates
    compiled = LoadRate(
        fixed_s=spared.fixed_s * COMPILE_RATIO, bytes_per_s=spared.bytes_per_s / COMPILE_RATIO
    )
    # It is the second load of these files that was measured.
    return {LoadTier.DISK: compiled, LoadTier.PREPARED: spared, LoadTier.CACHED: spared, **rates}


def _tried(
    engine: Engine, store: ModelStore, prepared: Sequence[HeldModel], bytes_max: int
) -> tuple[InstanceLoaded, ...]:
    whole = {stored.info.model_id: stored for stored in store.models()}
    found = [(whole[held.model_id], held) for held in prepared if held.model_id in whole]
    sizes = [engine.footprint(stored.info).weights_bytes for stored, _ in found]
    if not found or min(sizes) > min(WEIGHTS_BYTES_MAX, bytes_max // 2):
        return ()
    stored, held = found[sizes.index(min(sizes))]
    try:
        engine.load(_order(_NAMES[0], stored, held), _silent)
        engine.unload(_NAMES[0])
        return tuple(engine.load(_order(name, stored, held), _silent) for name in _NAMES)
    finally:
        for name in _NAMES:
            engine.unload(name)


def _order(name: InstanceId, stored: StoredModel, held: HeldModel) -> LoadOrder:
    return LoadOrder(
        instance_id=name,
        deployment=DeploymentName("trial"),
        model=stored.info,
        model_path=stored.path,
        kv_blocks=1,
        context_tokens_max=held.context_tokens_max,
        batch_max=1,
    )


def _silent(phase: str, share: float) -> None:
    """Nobody watches."""
