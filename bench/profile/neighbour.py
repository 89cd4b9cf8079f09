"""Noisy neighbours: processes that keep every core busy, as long as it is wanted or in turns."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

BUSY_S, CALM_S = 3.0, 4.0


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


@contextmanager
def neighbours_in_turns() -> Iterator[None]:
    """They come for BUSY_S, go for CALM_S, and come again."""
    over = threading.Event()

    def turns() -> None:
        while not over.wait(CALM_S):
            with noisy_neighbour():
                over.wait(BUSY_S)

    thread = threading.Thread(target=turns)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
