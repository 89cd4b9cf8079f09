"""The disk under the store: free space, its failures as errors with numbers, and files put there.

Asks for free space before a long write, and turns a full disk or a folder that cannot be written
into StorageError. Every importer writes inside `writing`.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mesh.domain.errors import StorageError, TornModel
from mesh.domain.units import format_bytes
from mesh.runtime.engine import Progress
from mesh_loader.model_files import opened

FREE_BYTES_MIN = 64 << 20
"""Left alone on the store's disk, so that an import never takes the last byte from the system."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write on the folder's disk."""
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def tree_bytes(folder: Path) -> int:
    """The size of all files in the folder; a file that disappears meanwhile counts nothing."""
    total_bytes = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            state = path.stat()
            total_bytes += state.st_size if stat.S_ISREG(state.st_mode) else 0
    return total_bytes


def require_free(folder: Path, needed_bytes: int, what: str) -> None:
    """Raises StorageError, with both numbers, unless `needed_bytes` fit on the folder's disk."""
    free = free_bytes(folder)
    if needed_bytes + FREE_BYTES_MIN > free:
        raise StorageError(
            f"{what} needs {format_bytes(needed_bytes)} in the store ({needed_bytes} bytes and "
            f"{FREE_BYTES_MIN} to spare), the disk has {format_bytes(free)} free ({free} bytes)",
            hint=f"make room on the disk of {folder}, or put the store on another one",
        )


@contextmanager
def writing(folder: Path, what: str) -> Iterator[None]:
    """Turns what the operating system refuses inside the block into StorageError."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, folder, what) from error


def storage_error(error: OSError, folder: Path, what: str) -> StorageError:
    """The StorageError for a refusal of the operating system while `what` was written."""
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        try:
            free = free_bytes(folder)
        except OSError:
            free = 0
        return StorageError(
            f"the disk is full, or a limit on file sizes is reached, while {what} is written: "
            f"{reason}; {format_bytes(free)} free ({free} bytes)",
            hint=f"make room on the disk of {folder}, or put the store on another one",
        )
    if error.filename and not Path(str(error.filename)).is_relative_to(folder):
        return StorageError(
            f"{error.filename} cannot be used while {what} is imported: {reason}",
            hint="check that this user may read it",
        )
    return StorageError(
        f"the store cannot be written while {what} is imported: {reason} "
        f"({error.filename or folder})",
        hint=f"check that {folder} is a folder that this user may write, or name another store",
    )


COPY_PIECE_BYTES = 4 << 20
_FICLONE = 0x40049409
"""ioctl of Linux: share the source's blocks with the target, copied on write."""


def place(
    files: Iterable[tuple[Path, str]], folder: Path, *, own_files: bool, progress: Progress
) -> None:
    """Puts each (file, name) into `folder`, whole and synced: by clone where the file system can
    (btrfs, xfs), or by copy. `own_files`: nobody writes to them, as to those of the Hugging Face
    cache, so that a hard link will do; a later write to a user's file would reach the model.

    Raises StorageError where they do not fit, TornModel for a file that shrinks meanwhile.
    """
    to_copy = []
    for file, name in files:
        if not (own_files and _linked(file, folder / name)):
            to_copy.append((file, name, file.stat().st_size))
    total_bytes = max(1, sum(size_bytes for _, _, size_bytes in to_copy))
    if to_copy:
        require_free(folder, total_bytes, "a copy of the model")
    done_bytes = 0
    for file, name, size_bytes in to_copy:
        with opened(file) as source, (folder / name).open("wb") as target:
            if not _cloned(source.fileno(), target.fileno()):
                while piece := source.read(COPY_PIECE_BYTES):
                    target.write(piece)
                    done_bytes += len(piece)
                    progress("copy", min(1.0, done_bytes / total_bytes))
            target.flush()
            os.fsync(target.fileno())
        if (folder / name).stat().st_size != size_bytes:
            raise TornModel(f"{file.name} changed while it was copied", hint="import it again")
    progress("copy", 1.0)


def _linked(file: Path, target: Path) -> bool:
    try:
        os.link(file.resolve(), target)
    except OSError:
        return False
    return True


def _cloned(source: int, target: int) -> bool:
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True
