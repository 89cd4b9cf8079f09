"""Keeps a mapped file's content for this process when somebody cuts the file short or writes to it.

A page of a mapped file that is cut off ends the process that reads it (SIGBUS), with all instances.
So each mapped file is held by a read lease: Linux makes whoever opens it for writing or truncates
it wait (`/proc/sys/fs/lease-break-time`, 45 s) or turns him away. A thread looks for such waits,
puts a copy without a name, on the same disk, under every place where the file is mapped, and lets
go. `mapped_file`, `shape_blob` and `compilation` make a guard before they map, and settle it when
they have read. Where there are no leases (network file systems, files of another user) the file is
mapped all the same, and the log says so.
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
from contextlib import suppress
from pathlib import Path

from mesh_nodes.engines import host_memory

POLL_S = 0.2
"""Between two looks: far less than the kernel lets a writer wait."""
LEASE_TRIES = 10
LEASE_RETRY_S = 0.02
"""A process that is being forked holds the files of its parent for a moment."""
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_COPY_BYTES_MAX = 1 << 30
"""Linux copies no more than 2 GiB at once."""
_FICLONE = 0x40049409
"""ioctl of Linux: share the source's blocks with the target, copied on write."""
MEMORY_SHARE_MAX = 0.5
"""A copy that cannot lie on the disk may take this share of the free memory, because no book counts
it.
"""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (ctypes.c_void_p, *[ctypes.c_size_t] * 2, ctypes.c_int, ctypes.c_void_p)
_libc.mremap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

_Place = tuple[int, int, int]
"""Begin and end of a range of addresses, and where in the file it begins."""

log = logging.getLogger(__name__)


class FileGuard:
    """Guards one file that this process maps, for as long as the object lives."""

    def __init__(self, path: Path) -> None:
        """Make it before the file is mapped. Raises OSError, also for a file that is open for
        writing somewhere."""
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        state = os.fstat(self.descriptor)
        self.identity = state.st_dev, state.st_ino
        self.lost = False
        """Somebody may have written to what is mapped."""
        self.holds = _lease(self.descriptor, path)
        if self.holds:
            _watch.add(self)

    def settle(self) -> None:
        """Raises BlockingIOError where what was read so far may be somebody else's: the kernel has
        taken the lease from a process that was stopped for too long.
        """
        if self.broken():
            _watch.rescue(self.identity)
        if self.lost:
            raise _being_written(self.path)

    def broken(self) -> bool:
        """Whether somebody waits to write to the file."""
        lease = fcntl.fcntl(self.descriptor, fcntl.F_GETLEASE)
        return self.holds and lease != fcntl.F_RDLCK

    def copy(self) -> None:
        """Replace the file's pages in this process by those of a copy. Raises OSError."""
        places = _places(self.descriptor)
        if not places:
            return
        copy = _copied(self.descriptor, self.path.parent)
        try:
            for place in places:
                _map_over(copy, self.descriptor, place)
        finally:
            os.close(copy)

    def release(self) -> None:
        """Give the lease back."""
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:  # it is gone, and so nobody has waited for the copy
            self.lost = True
        self.holds = False  # after `lost`: who settles meanwhile asks for this one first


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
                    self.rescue(guard.identity)
            # Else the last of them would live until the next look.
            del guards, guard

    def rescue(self, identity: tuple[int, int]) -> None:
        """All that is mapped of one file. Who would map it now waits."""
        with self._lock:
            guards = [g for g in self._guards if g.holds and g.identity == identity]
            if guards:
                _copy_for(guards)


def _copy_for(guards: list[FileGuard]) -> None:
    path = guards[0].path
    try:
        guards[0].copy()
        log.warning(
            "somebody writes to %s, which instances use: they go on with a copy of their own; what "
            "is loaded next is checked first",
            path,
        )
    except OSError as error:
        log.error("%s is being written to, and could not be copied: %s", path, error)
        for guard in guards:
            guard.lost = True
    for guard in guards:
        guard.release()
    if any(guard.lost for guard in guards):
        log.error(
            "%s was written to while this process did not answer: what its instances compute may "
            "be wrong from now on; end them",
            path,
        )


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
    raise _being_written(path)


def _being_written(path: Path) -> OSError:
    """A BlockingIOError, by its number."""
    return OSError(errno.EAGAIN, "it is open for writing in another process", str(path))


def _copied(descriptor: int, folder: Path) -> int:
    """A descriptor of a copy that nobody else can reach. It lies on the file's disk, so that its
    pages are the page cache's and not this process's; in memory only where that has room for it.
    """
    size_bytes = os.fstat(descriptor).st_size
    try:
        return _filled(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), descriptor)
    except OSError:  # a full disk, or a file system without files that have no name
        if size_bytes > MEMORY_SHARE_MAX * host_memory.available_bytes():
            raise
    return _filled(os.memfd_create("mesh-file-copy"), descriptor)


def _filled(copy: int, descriptor: int) -> int:
    """The copy, closed where it fails."""
    try:
        with suppress(OSError):  # few file systems share blocks
            fcntl.ioctl(copy, _FICLONE, descriptor)
            return copy
        done, size_bytes = 0, os.fstat(descriptor).st_size
        while done < size_bytes:
            count = os.sendfile(copy, descriptor, done, min(_COPY_BYTES_MAX, size_bytes - done))
            if not count:
                raise OSError(errno.EIO, "it has become shorter")
            done += count
        return copy
    except OSError:
        os.close(copy)
        raise


def _places(descriptor: int) -> list[_Place]:
    """All ranges where the file is mapped."""
    inode = os.fstat(descriptor).st_ino
    name = os.fsencode(os.readlink(f"/proc/self/fd/{descriptor}"))
    found = []
    # Bytes: other files that are mapped may have any name.
    for line in Path("/proc/self/maps").read_bytes().split(b"\n")[:-1]:
        span, _, offset, _, number, *rest = line.split(maxsplit=5)
        if int(number) == inode and rest == [name]:
            begin, end = (int(address, 16) for address in span.split(b"-"))
            found.append((begin, end, int(offset, 16)))
    return found


def _map_over(copy: int, descriptor: int, place: _Place) -> None:
    """Put the copy there in one step: no reader meets anything between."""
    begin, end, offset = place
    size_bytes = end - begin
    access = mmap.PROT_READ | mmap.PROT_WRITE
    fresh = _libc.mmap(None, size_bytes, access, mmap.MAP_PRIVATE, copy, offset)
    if fresh == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    # Copying takes its time: an unload meanwhile leaves the addresses to others.
    if not any(
        b <= begin and end <= e and o - b == offset - begin for b, e, o in _places(descriptor)
    ):
        _libc.munmap(fresh, size_bytes)
        return
    moved = _libc.mremap(
        *(fresh, size_bytes, size_bytes),
        *(_MREMAP_MAYMOVE | _MREMAP_FIXED, ctypes.c_void_p(begin)),
    )
    if moved != begin:
        number = ctypes.get_errno()
        _libc.munmap(fresh, size_bytes)
        raise OSError(number, os.strerror(number))
