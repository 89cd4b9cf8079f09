"""One `mesh up` for one state folder: a lock that its holder's end lets go of, however it ends.

The file says which process holds it. `mesh up` takes it before it starts or renames anything, so
that a second one on the same folder touches neither the logs nor the cell of the first.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mesh.domain.errors import StorageError, Unavailable

FILE_NAME = "up.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def locked_home(home: Path) -> Iterator[None]:
    """Hold the lock for the block. Raises Unavailable, which says who holds it, and StorageError.

    On a file system without locks nobody is kept out.
    """
    path = home / FILE_NAME
    try:
        home.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {(error.strerror or str(error)).lower()}",
            hint="choose a state folder that you may write with --home or MESH_HOME",
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            raise Unavailable(
                f"`mesh up` runs already with the state folder {home}: process {holder or '?'}",
                hint="use that cell, or stop it first; --home DIR starts another one beside it",
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise StorageError(f"cannot lock {path}: {error.strerror}") from error
        with suppress(OSError):  # a full disk keeps the number from being told, not the lock
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
