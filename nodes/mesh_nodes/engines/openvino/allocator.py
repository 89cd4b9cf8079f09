"""The C library's allocator, told to give back what it keeps.

It holds freed memory for later, which would count as the process's. `engine` calls it after unloads
and loads that fail, `compilation` after iterations whose activations go back.
"""

import ctypes

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""None where the C library is not glibc."""


def return_memory() -> None:
    """1 to 4 ms in a process with a loaded model."""
    if _trim is not None:
        _trim(0)
