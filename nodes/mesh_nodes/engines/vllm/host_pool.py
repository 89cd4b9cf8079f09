"""The node's memory for weights as vLLM has them after loading: one memfd for its engine processes.

Owns the memfd and the table of its ranges: which model's parameters stand where, which processes
map them. A process fills a range once, and marks it when all of it is there, before which nobody
finds it; whoever maps a range keeps it, and of those that nobody maps the one used the longest ago
goes first. What a range is still to be filled with counts as taken of the host. Addresses in the
file are never used twice: only memory is scarce, and a range that goes is punched out. Before:
`sleeping`, `engine`. After: `pooled`, in the processes.
"""

import logging
import mmap
import os
import threading
from collections.abc import Callable, Collection
from dataclasses import field
from pathlib import Path
from typing import Protocol

from mesh.domain.model import ModelInfo
from mesh.domain.values import dataclass, replace
from mesh_nodes.engines.vllm.messages import WHOLE, Layout, Range

CHUNK_BYTES = 2 * 2**20
"""Ranges begin and end at multiples of it, as pages of any size like it."""
REFUSED_MAX = 1000
"""Models whose weights are known to be no use to another load."""
_BLOCK_BYTES = 512
"""The unit of `st_blocks`, whatever the file system."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsKey:
    """What loads have in common whose parameters are the same bytes. The device, the release of
    vLLM and the rank are one engine's, and so is the pool.
    """

    model: ModelInfo
    model_path: Path
    dtype: str


def range_bytes(layout: Layout) -> int:
    """The size of the range that holds parameters of this layout: whole chunks."""
    return -(-(sum(layout.sizes_bytes) + len(WHOLE)) // CHUNK_BYTES) * CHUNK_BYTES


class Holder(Protocol):
    """A process: it holds what it maps until it is gone, whether or not anybody can call it."""

    @property
    def gone(self) -> bool: ...


@dataclass(slots=True, kw_only=True)
class _Entry:
    range: Range
    holders: dict[int, tuple[Holder, int]] = field(default_factory=dict)
    """With the bytes that each has beside it for itself."""

    def held_bytes(self, but: Collection[int]) -> int:
        """What of it stays when these end."""
        beside = [size for known, (_, size) in self.holders.items() if known not in but]
        return self.range.size_bytes + sum(beside) if beside else 0

    @property
    def size_bytes(self) -> int:
        return self.range.size_bytes + sum(size for _, size in self.holders.values())


class HostPool:
    """May be called from any thread."""

    def __init__(self, *, bytes_max: int, available_bytes: Callable[[], int]) -> None:
        """`available_bytes`: of the host, asked before a range is taken, which has to fit in there,
        too, beside what other ranges have yet to be filled with. Raises OSError when the system
        makes no such file.
        """
        self.bytes_max = bytes_max
        self._host_bytes = available_bytes
        self.descriptor = os.memfd_create("mesh-weights", os.MFD_CLOEXEC)
        self._lock = threading.Lock()
        self._entries: dict[WeightsKey, _Entry] = {}
        """The one used the longest ago first."""
        self._refused: dict[WeightsKey, None] = {}
        self._end = 0
        self._closed = False

    @property
    def used_bytes(self) -> int:
        """Each range once, however many map it, and what they have beside it."""
        with self._lock:
            self._settle()
            return self._used_bytes()

    def listed(self) -> tuple[WeightsKey, ...]:
        """The weights of which a load would find all here; the one used the longest ago comes
        first.
        """
        with self._lock:
            self._settle()
            return tuple(
                key
                for key, entry in self._entries.items()
                if entry.range.whole and key not in self._refused
            )

    def held_bytes(self, but: Collection[Holder] = ()) -> int:
        """What cannot be taken from anybody unless these end, and then nothing of theirs."""
        with self._lock:
            self._settle()
            ids = {id(holder) for holder in but}
            return sum(entry.held_bytes(ids) for entry in self._entries.values())

    def hold(self, key: WeightsKey, holder: Holder, beside_bytes: int = 0) -> Range | None:
        """What stands there, for this process from now on, and what it has `beside` it."""
        with self._lock:
            self._settle()
            entry = self._entries.get(key)
            if entry is None or not entry.range.whole:
                return None
            entry.holders[id(holder)] = holder, beside_bytes
            self._entries[key] = self._entries.pop(key)
            return entry.range

    def take(
        self, key: WeightsKey, holder: Holder, layout: Layout, beside_bytes: int = 0
    ) -> Range | None:
        """What stands there, else a range for this process to fill. None where that fits in the
        place of nothing that nobody holds, or another process fills one.
        """
        stood = self.hold(key, holder, beside_bytes)
        if stood is not None:
            return stood
        size_bytes = range_bytes(layout)
        with self._lock:
            if self._closed or key in self._entries:
                return None
            if not self._make_room(size_bytes + beside_bytes):
                return None
            where = Range(offset=self._end, size_bytes=size_bytes, layout=layout, whole=False)
            try:
                os.ftruncate(self.descriptor, self._end + size_bytes)
            except OSError:
                return None
            self._end += size_bytes
            entry = _Entry(range=where)
            entry.holders[id(holder)] = holder, beside_bytes
            self._entries[key] = entry
            return where

    def touch(self, key: WeightsKey) -> None:
        """It has been used."""
        with self._lock:
            if key in self._entries:
                self._entries[key] = self._entries.pop(key)

    def refuse(self, key: WeightsKey) -> None:
        """No load is to find such weights any more: who maps them may sleep there, no more."""
        with self._lock:
            self._refused[key] = None
            while len(self._refused) > REFUSED_MAX:
                del self._refused[next(iter(self._refused))]

    def fits(
        self, key: WeightsKey, layout: Layout, beside_bytes: int, but: Collection[Holder]
    ) -> bool:
        """Whether a range could be had if these ended."""
        with self._lock:
            self._settle()
            if entry := self._entries.get(key):
                # What another fills is nothing to wait for.
                return entry.range.whole
        wanted_bytes = range_bytes(layout) + beside_bytes
        held_bytes = self.held_bytes(but)
        let_go_bytes = self.used_bytes - held_bytes
        with self._lock:
            available_bytes = self._available_bytes()
        return (
            wanted_bytes <= self.bytes_max - held_bytes
            and wanted_bytes <= available_bytes + let_go_bytes
        )

    def close(self) -> None:
        """After the end of all who map any of it."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._entries.clear()
                os.close(self.descriptor)

    def _used_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self._entries.values())

    def _available_bytes(self) -> int:
        """The host's available memory, less what is promised: a range has no memory before it is
        filled.
        """
        ranges = [entry.range for entry in self._entries.values()]
        given_bytes = sum(where.size_bytes for where in ranges if not where.whole)
        if not given_bytes:
            return self._host_bytes()
        whole_bytes = sum(where.size_bytes for where in ranges if where.whole)
        # Before the host is asked: what is filled meanwhile counts twice, not never.
        has_bytes = _BLOCK_BYTES * os.fstat(self.descriptor).st_blocks
        filled_bytes = min(max(has_bytes - whole_bytes, 0), given_bytes)
        return self._host_bytes() - (given_bytes - filled_bytes)

    def _make_room(self, wanted_bytes: int) -> bool:
        """Nothing goes where all that may go would not do."""
        loose = [key for key, entry in self._entries.items() if not entry.holders]
        loose_bytes = sum(self._entries[key].size_bytes for key in loose)
        if wanted_bytes > self.bytes_max - self._used_bytes() + loose_bytes:
            return False
        if wanted_bytes > self._available_bytes() + loose_bytes:
            return False
        for key in loose:
            if self._has_room(wanted_bytes):
                break
            self._free(key)
        return self._has_room(wanted_bytes)

    def _has_room(self, wanted_bytes: int) -> bool:
        left_bytes = self.bytes_max - self._used_bytes()
        return wanted_bytes <= left_bytes and wanted_bytes <= self._available_bytes()

    def _settle(self) -> None:
        """What processes have said, and which have ended: half a range is nothing."""
        for key, entry in list(self._entries.items()):
            if not entry.range.whole and self._is_marked(entry.range):
                entry.range = replace(entry.range, whole=True)
            entry.holders = {i: held for i, held in entry.holders.items() if not held[0].gone}
            if not entry.holders and (key in self._refused or not entry.range.whole):
                self._free(key)

    def _is_marked(self, where: Range) -> bool:
        end = where.offset + where.size_bytes - len(WHOLE)
        return not self._closed and os.pread(self.descriptor, len(WHOLE), end) == WHOLE

    def _free(self, key: WeightsKey) -> None:
        where = self._entries.pop(key).range
        if self._closed:
            return
        try:
            with mmap.mmap(self.descriptor, where.size_bytes, offset=where.offset) as pages:
                pages.madvise(mmap.MADV_REMOVE)
        except OSError:
            log.exception("%d bytes of weights are not given back", where.size_bytes)


def open_pool(bytes_max: int, available_bytes: Callable[[], int]) -> HostPool | None:
    """See `HostPool`. None, and a line in the log, where the system has none to give."""
    try:
        return HostPool(bytes_max=bytes_max, available_bytes=available_bytes)
    except OSError as error:
        log.warning("nothing sleeps, and all loads are from disk: %s", error)
        return None
