"""Waits for what comes by and by, in this process or in another, for so long and no longer."""

import os
import time
from collections.abc import Callable

import psutil

POLL_S = 0.01


def until(condition: Callable[[], bool], for_s: float = 60.0, poll_s: float = POLL_S) -> None:
    give_up_s = time.monotonic() + for_s
    while not condition():
        assert time.monotonic() < give_up_s, f"it did not happen within {for_s:g} s"
        time.sleep(poll_s)


def as_long_s(quiet_s: float) -> float:
    """As long as what takes `quiet_s` on a quiet machine takes where processes wait for cores."""
    return quiet_s * max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0)


def alive(pid: int) -> bool:
    """A zombie that nobody has reaped yet is dead."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
