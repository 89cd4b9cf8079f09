"""Whether a process has begun to use CUDA is seen without beginning to."""

from enum import Enum
from pathlib import Path

import pytest

from mesh_nodes.engines.cuda_driver import cuda_in_use


class Code(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_DEINITIALIZED = 4


class Library:
    """`cuda.bindings.driver` of a process in some state."""

    CUresult = Code

    def __init__(self, code: Code, *context: int) -> None:
        self._answer = (code, *context)

    def cuCtxGetCurrent(self) -> tuple[object, ...]:  # noqa: N802
        return self._answer


FRESH = Library(Code.CUDA_ERROR_NOT_INITIALIZED)


@pytest.mark.parametrize(
    ("library", "seen"),
    [
        (FRESH, ""),
        (Library(Code.CUDA_SUCCESS, 0xC0FFEE), "it has a context"),
        (Library(Code.CUDA_SUCCESS, 0), "its driver says CUDA_SUCCESS"),
        (Library(Code.CUDA_ERROR_DEINITIALIZED), "its driver says CUDA_ERROR_DEINITIALIZED"),
    ],
)
def test_the_driver_tells_of_its_own_initialisation(library: Library, seen: str) -> None:
    assert cuda_in_use(library) == seen


def test_an_open_device_tells_of_any_other_library(tmp_path: Path) -> None:
    (tmp_path / "0").symlink_to("/dev/nvidiactl")
    (tmp_path / "1").symlink_to("/dev/nvidia0")
    assert cuda_in_use(FRESH, tmp_path) == ""
    (tmp_path / "2").symlink_to("/dev/nvidia-uvm")
    assert cuda_in_use(FRESH, tmp_path) == "/dev/nvidia-uvm is open"


def test_a_process_without_a_driver_uses_none() -> None:
    assert cuda_in_use() == ""
