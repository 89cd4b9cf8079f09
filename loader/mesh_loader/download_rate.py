"""One bound on the bytes a second that all downloads into a store take together.

Each import is a process of its own, so the bound lies in a file: the time at which the next byte
may come, moved on under a lock by everyone who takes some. Before: `--download-rate` of `mesh node`
and `mesh pull`.
"""

import fcntl
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

from mesh.domain.errors import InvalidInput
from mesh.domain.units import format_bytes, parse_bytes

BYTES_MIN = 64 << 10
"""A second: less would take days."""
WAIT_PIECE_S = 0.2
"""A cancellation is noticed within this time."""
WAIT_S_MAX = 60.0
"""A time further off than this was not written by anyone who keeps to the bound: another boot."""

_TIME = struct.Struct("<d")


class DownloadRate:
    """See the module's text. Without a rate nothing waits; no file is touched."""

    def __init__(self, path: Path | None = None, bytes_per_s: float | None = None) -> None:
        """`path` is of the file, in a folder that exists by the first `wait`."""
        self._path = path
        self._bytes_per_s = bytes_per_s

    @property
    def bounded(self) -> bool:
        return self._bytes_per_s is not None

    def wait(self, size_bytes: int, on_wait: Callable[[], None]) -> None:
        """Returns when `size_bytes` that have just come are within the bound; what `on_wait`,
        called every WAIT_PIECE_S, raises ends the wait. Raises OSError.
        """
        if self._path is None or self._bytes_per_s is None:
            return
        until_s = _booked(self._path, size_bytes / self._bytes_per_s)
        while (left_s := until_s - time.monotonic()) > 0:
            on_wait()
            time.sleep(min(left_s, WAIT_PIECE_S))


UNBOUND = DownloadRate()


def parse_rate(text: str) -> int:
    """Bytes a second, of a size such as `50MiB`. Raises InvalidInput."""
    size_bytes = parse_bytes(text)
    if size_bytes < BYTES_MIN:
        raise InvalidInput(
            f"--download-rate {text} is {format_bytes(size_bytes)} a second; at least "
            f"{format_bytes(BYTES_MIN)} are allowed",
            hint="leave it out for no bound",
        )
    return size_bytes


def _booked(path: Path, seconds: float) -> float:
    """The monotonic time, which all processes of a machine share, until which to wait."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # held for one small read and write
        written = os.pread(descriptor, _TIME.size, 0)
        now_s = time.monotonic()
        free_s = _TIME.unpack(written)[0] if len(written) == _TIME.size else now_s
        if not now_s <= free_s <= now_s + WAIT_S_MAX:
            free_s = now_s
        os.pwrite(descriptor, _TIME.pack(free_s + seconds), 0)
        return float(free_s + seconds)
    finally:
        os.close(descriptor)
