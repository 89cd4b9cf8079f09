"""What the host says of its memory, and of what this process and an engine's own take of it.

Before: the engines, which check loads by the first, and what the node tells of itself.
"""

from collections.abc import Iterable

import psutil


def available_bytes() -> int:
    return int(psutil.virtual_memory().available)


def total_bytes() -> int:
    return int(psutil.virtual_memory().total)


def own_resident_bytes() -> int:
    """RSS of this process."""
    return int(psutil.Process().memory_info().rss)


def resident_bytes(forkserver: int | None, pids: Iterable[int]) -> int:
    """The memory of the forkserver and of the processes that it has forked. Pages that an engine
    process shares with the forkserver count once; those that it has copied since do not count.
    """
    forkserver_bytes = _rss_bytes(forkserver)
    return forkserver_bytes + sum(max(_rss_bytes(pid) - forkserver_bytes, 0) for pid in pids)


def _rss_bytes(pid: int | None) -> int:
    """0 for a process that is not there."""
    try:
        return 0 if pid is None else int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0
