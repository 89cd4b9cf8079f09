"""A file in memory as bytes that OpenVINO takes without a copy.

`checkpoint` and `prepared` cut their tensors out of it; `compilation` drops its pages while the
compiled model makes its own, repacked, copy of nearly all weights.
"""

import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mesh_nodes.engines.file_guard import FileGuard

_RELEASE_S = 0.01
"""Between two releases. OpenVINO repacks about a gigabyte a second: some 10 MiB of what it has read
are there at once."""


class Pages(Protocol):
    """Files' pages in this process."""

    def release_pages(self) -> None:
        """Take them out of it; a later read brings them back."""
        ...

    def settle(self) -> None:
        """Raises BlockingIOError where what was read may not be what was checked."""
        ...


class MappedFile:
    """Private and copy-on-write, since OpenVINO copies read-only arrays; nobody writes to it. It is
    guarded for as long as the object lives.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError, or ValueError when the file is empty."""
        self._guard = FileGuard(path)
        self._memory = mmap.mmap(self._guard.descriptor, 0, access=mmap.ACCESS_COPY)

    @property
    def size_bytes(self) -> int:
        return len(self._memory)

    def bytes_at(self, begin: int, count: int) -> bytes:
        return self._memory[begin : begin + count]

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...], begin: int) -> npt.NDArray[Any]:
        """A view, which keeps the file mapped. Raises ValueError beyond the file's end."""
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self._memory, dtype, count, begin).reshape(shape)

    def release_pages(self) -> None:
        """See `Pages`."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    def settle(self) -> None:
        """See `FileGuard`."""
        self._guard.settle()


@contextmanager
def pages_released(files: Sequence[Pages]) -> Iterator[None]:
    """Release the files' pages again and again within the block, which reads them, and at its end:
    they never are in this process all at once.
    """
    over = threading.Event()

    def release() -> None:
        for file in files:
            file.release_pages()

    def keep_releasing() -> None:
        while not over.wait(_RELEASE_S):
            release()

    releaser = threading.Thread(target=keep_releasing, name="mesh-weights-pages", daemon=True)
    releaser.start()
    try:
        yield
    finally:
        over.set()
        releaser.join()
        release()
