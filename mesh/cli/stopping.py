"""Turns SIGINT, SIGTERM and SIGHUP into a question that a loop asks, not an exception anywhere.

`mesh up` and `mesh demo` own child processes: an exception at a random point could leave one.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopping:
    """A context in which those signals are counted. Must be entered on the main thread."""

    def __init__(self) -> None:
        self._first = threading.Event()
        self._second = threading.Event()
        self._before: dict[signal.Signals, object] = {}

    def asked(self) -> bool:
        return self._first.is_set()

    def asked_again(self) -> bool:
        """The user is in a hurry."""
        return self._second.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Sleep, but no longer than until a signal comes; whether one has come."""
        return self._first.wait(timeout_s)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """For what asks nobody: here the first signal raises KeyboardInterrupt, and is counted; one
        that came before raises it at once.
        """
        for number in _SIGNALS:
            signal.signal(number, signal.default_int_handler)
        try:
            if self.asked():
                raise KeyboardInterrupt
            yield
        except KeyboardInterrupt:
            self._first.set()
            raise
        finally:
            for number in _SIGNALS:
                signal.signal(number, self._count)

    def __enter__(self) -> "Stopping":
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._count)
        return self

    def __exit__(self, *ended: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _count(self, number: int, frame: FrameType | None) -> None:
        (self._second if self._first.is_set() else self._first).set()
