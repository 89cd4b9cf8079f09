"""File locks of the store: one process at a time for one source, and one at a time to publish;
nodes share the lock of a model that they use; who writes into a scratch folder locks that.

A lock is the kernel's flock on a small file, so it ends with its holder however the holder ends.
Waiting is bounded. Lock files stay where they are: removing one would let two holders in.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mesh.domain.errors import Unavailable

POLL_S = 0.1
SHARE_WAIT_S = 0.2
"""For who takes a model out, which is a few renames and unlinks."""
SHARE_POLL_S = 0.005
YOUNG_S = 10.0
"""A scratch folder may not be locked yet, and its maker must find the lock free."""


@contextmanager
def locked(path: Path, *, wait_s: float, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds the lock for the block; `on_wait` is called every POLL_S while another holds it.

    Raises Unavailable when it is not free within `wait_s`, and whatever `on_wait` raises.
    """
    give_up_s = time.monotonic() + wait_s
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while not _try_lock(descriptor):
            if time.monotonic() >= give_up_s:
                raise Unavailable(
                    f"another process has held {path} for {wait_s:.0f} s",
                    hint="wait until its import ends, or stop that process",
                )
            on_wait()
            time.sleep(POLL_S)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def locked_if_free(path: Path) -> Iterator[bool]:
    """Holds the lock for the block where nobody else does; says whether it is held, which it never
    is where the file system has no such lock: NFS has none of folders.
    """
    descriptor = _opened(path)
    try:
        try:
            taken = _try_lock(descriptor)
        except OSError:
            taken = False
        yield taken
    finally:
        os.close(descriptor)


def model_lock(root: Path, model_id: str) -> Path:
    """The lock of a model in the store under `root`: users of the model share it, and whoever
    deletes the model holds it alone.
    """
    return root / "locks" / f"model-{model_id}.lock"


def share(path: Path) -> int:
    """A descriptor that shares the lock until it is closed. Waits SHARE_WAIT_S at most for a
    holder, which may have been stopped. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _opened(path)
    give_up_s = time.monotonic() + SHARE_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return descriptor
        except OSError as error:
            if not isinstance(error, BlockingIOError) or time.monotonic() >= give_up_s:
                os.close(descriptor)
                raise
        time.sleep(SHARE_POLL_S)


def abandoned(folder: Path) -> bool:
    """Whether a scratch folder's maker is gone, who holds its lock nearly from the start."""
    try:
        if time.time() - folder.stat().st_mtime < YOUNG_S:
            return False
        with locked_if_free(folder) as free:
            return free
    except OSError:
        return False


def _opened(path: Path) -> int:
    if path.is_dir():
        return os.open(path, os.O_RDONLY)
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
