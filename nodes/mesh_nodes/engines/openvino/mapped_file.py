"""A file in memory as bytes that OpenVINO takes without a copy.

`checkpoint` and `prepared` cut their tensors out of it; `compilation` drops its pages once the
compiled model has its own, repacked, copy of nearly all weights.
"""

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


class MappedFile:
    """Private and copy-on-write, since OpenVINO copies read-only arrays; nobody writes to it."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, or ValueError when the file is empty."""
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

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
        """Take the file's pages out of this process; a later read brings them back."""
        self._memory.madvise(mmap.MADV_DONTNEED)
