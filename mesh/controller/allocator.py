"""What the controller's allocator keeps of freed memory, and when it gives that back.

glibc keeps what is freed for later: after thousands of connections have come and gone, a controller
would hold their memory for good. `server` calls it; nothing comes after.
"""

import asyncio
import ctypes

LOOK_S = 2.0
TRIM_BYTES = 16 << 20
"""When this much has been freed since the last time, giving it back is worth its milliseconds."""


class _Info(ctypes.Structure):
    """struct mallinfo2 of mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


_library = ctypes.CDLL(None)
_trim = getattr(_library, "malloc_trim", None)
_info = getattr(_library, "mallinfo2", None)
"""None where the C library is not glibc, or one before 2.33."""
if _info is not None:
    _info.restype = _Info


async def give_back_freed() -> None:
    """Look every LOOK_S, until it is cancelled. A thread looks: it takes milliseconds where much is
    free in many pieces."""
    if _trim is None or _info is None:
        return
    kept_bytes = await asyncio.to_thread(_free_bytes)
    while True:
        await asyncio.sleep(LOOK_S)
        kept_bytes = await asyncio.to_thread(_looked, kept_bytes)


def _looked(kept_bytes: int) -> int:
    """What is free after giving back what is worth it; `kept_bytes` were after the last time."""
    free_bytes = _free_bytes()
    kept_bytes = min(kept_bytes, free_bytes)
    if free_bytes - kept_bytes < TRIM_BYTES or _trim is None:
        return kept_bytes
    _trim(0)
    return _free_bytes()


def _free_bytes() -> int:
    return 0 if _info is None else int(_info().fordblks)
