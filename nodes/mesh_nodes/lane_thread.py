"""One lane's thread: a first-in-first-out queue of calls, and a hand-over that lets it go first.

Who puts a call holds the interpreter and would keep it for its own work; the thread, woken, would
get it only after a switch interval. `hand_over` gives it away: it waits until the thread has begun.
`lanes` owns these.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

Work = Callable[[], None]
"""Never raises: it hands every failure on as its result."""


class LaneThread:
    """`put` is for any thread, its own included; `hand_over` and `end` are for one other."""

    def __init__(self, name: str, *, nice: int = 0) -> None:
        """`nice`: how far it is below the process's other threads."""
        self._nice = nice
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._working = False
        self._begun = threading.Lock()
        self._begun.acquire()
        self._thread = threading.Thread(target=self._work_off, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Work) -> None:
        self._queue.put(work)

    def hand_over(self, timeout_s: float) -> None:
        """Wait until the thread has begun what was put, unless it has something else in hand."""
        if self._working or self._queue.empty():
            return
        # One release may be left of a call that began before anyone waited for it.
        self._begun.acquire(blocking=False)
        if not self._queue.empty():
            self._begun.acquire(timeout=timeout_s)

    def end(self, last: Work | None = None) -> None:
        """Drop what waits; the thread ends after the call in hand, and `last`."""
        with contextlib.suppress(Empty):
            while True:
                self._queue.get_nowait()
        if last is not None:
            self._queue.put(last)
        self._queue.put(None)

    def ended(self, give_up_s: float) -> bool:
        """Whether the thread has ended, now or by that monotonic time."""
        self._thread.join(max(0.0, give_up_s - time.monotonic()))
        return not self._thread.is_alive()

    def _work_off(self) -> None:
        if self._nice:
            thread = threading.get_native_id()
            # A sandbox may refuse it; calls would wait for ever for a thread that ended here.
            with contextlib.suppress(OSError):
                nice = os.getpriority(os.PRIO_PROCESS, thread) + self._nice
                os.setpriority(os.PRIO_PROCESS, thread, nice)
        while (work := self._queue.get()) is not None:
            self._working = True
            if self._begun.locked():
                self._begun.release()
            work()
            self._working = False
