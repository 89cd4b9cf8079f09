"""Puts a file of a model into the store's staging folder: by link, by clone, or by copy.

A hard link is made only of files that nobody writes to, as those of the Hugging Face cache or an
export of our own: a link to a user's file would let a later write reach a published model. Where
the file system can clone (btrfs, xfs), a copy costs nothing either.
"""

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

from mesh.domain.errors import TornModel
from mesh.runtime.engine import Progress
from mesh_loader.disk import require_free
from mesh_loader.model_files import opened

COPY_PIECE_BYTES = 4 << 20
_FICLONE = 0x40049409
"""ioctl of Linux: share the source's blocks with the target, copied on write."""


def place(
    files: Iterable[tuple[Path, str]], folder: Path, *, own_files: bool, progress: Progress
) -> None:
    """Puts each (file, name) into `folder`, whole and synced.

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
