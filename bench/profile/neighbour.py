"""A noisy neighbour: processes that keep every core busy, for as long as it is wanted."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def noisy_neighbour() -> Iterator[None]:
    """One process for each core that this one may use."""
    busy = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(busy) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
