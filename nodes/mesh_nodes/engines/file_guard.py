"""Keeps a mapped file's content for this process when somebody cuts the file short or writes to it.

A page of a mapped file that is cut off ends the process that reads it (SIGBUS), with all instances.
So each mapped file is held by a read lease: Linux makes whoever opens it for writing or truncates
it wait (`/proc/sys/fs/lease-break-time`, 45 s) or turns him away. A thread looks for such waits,
puts a copy in memory under every place where the file is mapped, and lets go. `mapped_file`,
`shape_blob` and `compilation` make a guard before they map. Where there are no leases (network file
systems, files of another user) the file is mapped all the same, and the log says so.
"""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.2
"""Between two looks: far less than the kernel lets a writer wait."""
LEASE_TRIES = 10
LEASE_RETRY_S = 0.02
"""A process that is being forked holds the files of its parent for a moment."""
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_READ_BYTES_MAX = 1 << 30
"""Linux reads no more than 2 GiB at once."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (ctypes.c_void_p, *[ctypes.c_size_t] * 2, ctypes.c_int, ctypes.c_void_p)
_libc.mremap.restype = ctypes.c_void_p

log = logging.getLogger(__name__)


class FileGuard:
    """Of one file that this process maps, for as long as the object lives."""

    def __init__(self, path: Path) -> None:
        """Make it before the file is mapped. Raises OSError, also for a file that is open for
        writing somewhere."""
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        state = os.fstat(self.descriptor)
        self.identity = state.st_dev, state.st_ino
        self.lock = threading.RLock()
        self.copied = False
        self.holds = _lease(self.descriptor, path)
        if self.holds:
            _watch.add(self)

    @contextmanager
    def mapped(self) -> Iterator[bool]:
        """Whether its pages still are the file's, which does not change within the block: those of
        a copy must not be given back."""
        with self.lock:
            yield not self.copied

    def broken(self) -> bool:
        """Whether somebody waits to write to the file."""
        lease = fcntl.fcntl(self.descriptor, fcntl.F_GETLEASE)
        return self.holds and lease != fcntl.F_RDLCK

    def copy(self) -> None:
        """Replace the file's pages in this process by a copy of them. Raises OSError."""
        for begin, end, offset in _places(self.descriptor):
            _copy_over(self.descriptor, begin, end, offset)

    def let_go(self) -> None:
        """Give the lease back."""
        self.holds = False
        fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)


class _Watch:
    """The guards of this process, and the thread that looks after them while there are any."""

    def __init__(self) -> None:
        self._guards = weakref.WeakSet[FileGuard]()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, guard: FileGuard) -> None:
        with self._lock:
            self._guards.add(guard)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._look, name="mesh-file-guard", daemon=True
                )
                self._thread.start()

    def _look(self) -> None:
        while True:
            time.sleep(POLL_S)
            with self._lock:
                guards = list(self._guards)
                if not guards:
                    self._thread = None
                    return
            for guard in guards:
                if guard.broken():
                    self._rescue([g for g in guards if g.identity == guard.identity])
            # Else the last of them would live until the next look.
            del guards, guard

    def _rescue(self, guards: list[FileGuard]) -> None:
        """All of one file: whoever gives pages back waits until they are a copy's."""
        for guard in guards:
            guard.lock.acquire()
        try:
            guards[0].copy()
            for guard in guards:
                guard.copied = True
            log.warning(
                "somebody writes to %s, which instances use: they go on with a copy in memory, "
                "which is in nobody's books; what is loaded next is checked first",
                guards[0].path,
            )
        except OSError as error:
            log.error("%s is being written to, and could not be copied: %s", guards[0].path, error)
        finally:
            for guard in guards:
                guard.let_go()
                guard.lock.release()


_watch = _Watch()


def _lease(descriptor: int, path: Path) -> bool:
    # The usual signal of a lease would end the process; this one is ignored by default.
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
    for _ in range(LEASE_TRIES):
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            return True
        except OSError as error:
            if error.errno != errno.EAGAIN:
                log.warning("%s is mapped unprotected: %s", path, error.strerror)
                return False
        time.sleep(LEASE_RETRY_S)
    raise OSError(errno.EAGAIN, "it is open for writing in another process", str(path))


def _places(descriptor: int) -> Iterator[tuple[int, int, int]]:
    """Begin and end of each range where the file is mapped, and where in the file it begins."""
    inode, name = os.fstat(descriptor).st_ino, os.readlink(f"/proc/self/fd/{descriptor}")
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, _, offset, _, number, *rest = line.split(maxsplit=5)
        if int(number) == inode and rest == [name]:
            begin, end = (int(address, 16) for address in span.split("-"))
            yield begin, end, int(offset, 16)


def _copy_over(descriptor: int, begin: int, end: int, offset: int) -> None:
    """Put a copy there in one step: no reader meets anything between."""
    size_bytes = end - begin
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    fresh = _libc.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if fresh == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory, done = memoryview((ctypes.c_char * size_bytes).from_address(fresh)).cast("B"), 0
    while count := os.preadv(descriptor, [memory[done : done + _READ_BYTES_MAX]], offset + done):
        done += count
    moved = _libc.mremap(
        fresh, size_bytes, size_bytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, ctypes.c_void_p(begin)
    )
    if moved != begin:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
