"""A range of a GPU's addresses, and memory under those chunks of it that somebody wants.

The addresses are had once and stay, so that whatever has kept one, a CUDA graph too, may go on
using it; memory comes under them and goes without a copy. Owns the handles of that memory: those
that lie under a chunk, and some spare ones, since taking memory of the driver is by far the slowest
of its calls. What the driver refuses to take back stays in the books, and is tried again the next
time. Before: `kv_mapped`, `weights_memory`. After: `cuda_driver`.
"""

import logging
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, Protocol

from mesh.domain.errors import EngineError

log = logging.getLogger(__name__)


class Driver(Protocol):
    """See `cuda_driver.CudaDriver`."""

    chunk_bytes: int

    def reserve(self, size_bytes: int) -> int: ...
    def free(self, address: int, size_bytes: int) -> None: ...
    def create(self, size_bytes: int) -> Any: ...
    def release(self, handle: Any) -> None: ...
    def map(self, address: int, size_bytes: int, handle: Any) -> None: ...
    def allow(self, address: int, size_bytes: int) -> None: ...
    def unmap(self, address: int, size_bytes: int) -> None: ...


class DeviceRange:
    """Chunks are numbered from 0."""

    def __init__(self, driver: Driver, size_bytes: int, chunk_bytes: int | None = None) -> None:
        """`chunk_bytes`: of a chunk of this range, a multiple of the driver's, which is taken else.

        Raises EngineError when the addresses cannot be had.
        """
        self.chunk_bytes = chunk_bytes or driver.chunk_bytes
        self._driver = driver
        self._size_bytes = -(-size_bytes // self.chunk_bytes) * self.chunk_bytes
        self.address = driver.reserve(self._size_bytes)
        self._wanted: frozenset[int] = frozenset()
        self._mapped: dict[int, Any] = {}
        """The handle under each chunk that is wanted, or could not be unmapped."""
        self._spare: list[Any] = []

    @property
    def held_bytes(self) -> int:
        """The device memory that the range takes: its mapped chunks and its spare ones."""
        return (len(self._mapped) + len(self._spare)) * self.chunk_bytes

    def lacks_bytes(self, chunks: Iterable[int]) -> int:
        """What has to be taken of the device before there is memory under all of these."""
        missing = sum(chunk not in self._mapped for chunk in chunks)
        return max(missing - len(self._spare), 0) * self.chunk_bytes

    def hold(self, chunks: Iterable[int], spare_max: int = 0) -> list[tuple[int, int]]:
        """Have memory under these chunks and no others; so many more handles may be kept. Which
        chunks have come, as runs (first, last + 1): of their content nothing is known. No kernel
        may be using those that go.

        Raises OutOfMemory, EngineError: then those that had memory before have it.
        """
        wanted = frozenset(chunks)
        fresh = sorted(wanted - self._wanted)
        try:
            self._back(fresh)
        except EngineError:
            self._unmap_unwanted(spare_max)
            raise
        self._wanted = wanted
        self._unmap_unwanted(spare_max)
        return list(runs(fresh))

    def close(self) -> None:
        """Give all back. Raises EngineError when the driver keeps some of it."""
        self.hold(())
        if self._mapped or self._spare:
            raise EngineError(f"the CUDA driver took {self.held_bytes} bytes not back")
        self._driver.free(self.address, self._size_bytes)

    def _back(self, fresh: list[int]) -> None:
        missing = [chunk for chunk in fresh if chunk not in self._mapped]
        while len(self._spare) < len(missing):
            self._spare.append(self._driver.create(self.chunk_bytes))
        for chunk in missing:
            self._driver.map(self._at(chunk), self.chunk_bytes, self._spare[-1])
            self._mapped[chunk] = self._spare.pop()
        for first, end in runs(fresh):
            self._driver.allow(self._at(first), (end - first) * self.chunk_bytes)

    def _unmap_unwanted(self, spare_max: int) -> None:
        for chunk in sorted(self._mapped.keys() - self._wanted):
            try:
                self._driver.unmap(self._at(chunk), self.chunk_bytes)
            except EngineError as error:
                log.warning("chunk %d keeps its memory: %s", chunk, error.message)
            else:
                self._spare.append(self._mapped.pop(chunk))
        while len(self._spare) > spare_max:
            try:
                self._driver.release(self._spare[-1])
            except EngineError as error:
                log.warning("memory is not given back: %s", error.message)
                return
            self._spare.pop()

    def _at(self, chunk: int) -> int:
        return self.address + chunk * self.chunk_bytes


def runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Neighbours as one: (first, last + 1) of each run of ascending numbers."""
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        yield found[0], found[-1] + 1
