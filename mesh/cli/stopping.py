"""Turns SIGINT, SIGTERM and SIGHUP into a question that a loop asks, not an exception anywhere.

`mesh up` and `mesh demo` own child processes: an exception at a random point could leave one.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopping:
    """A context in which those signals are counted. Must be entered on the main thread."""

    def __init__(self) -> None:
        self._signals = 0
        self._heard = [one for one in _SIGNALS if not _is_kept_from_us(one)]
        self._came: SimpleQueue[None] = SimpleQueue()
        """A handler may put into it whatever the main thread does at that moment. An event's lock
        would not let it while the main thread holds that itself, as `wait` does.
        """
        self._before: dict[signal.Signals, object] = {}

    def asked(self) -> bool:
        return self._signals > 0

    def asked_again(self) -> bool:
        """The user is in a hurry."""
        return self._signals > 1

    def wait(self, timeout_s: float) -> bool:
        """Sleep, but no longer than until a signal comes; whether one has come."""
        if not self.asked():
            with suppress(Empty):
                self._came.get(timeout=timeout_s)
        return self.asked()

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """For what asks nobody: here the first signal raises KeyboardInterrupt, and is counted; one
        that came before raises it at once.
        """
        for number in self._heard:
            signal.signal(number, signal.default_int_handler)
        try:
            if self.asked():
                raise KeyboardInterrupt
            yield
        except KeyboardInterrupt:
            self._signals = max(self._signals, 1)
            raise
        finally:
            for number in self._heard:
                signal.signal(number, self._count)

    def __enter__(self) -> "Stopping":
        for number in self._heard:
            self._before[number] = signal.signal(number, self._count)
        return self

    def __exit__(self, *ended: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _count(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        self._came.put(None)


def _is_kept_from_us(number: signal.Signals) -> bool:
    """Whether who started this has it ignored: `nohup` a hang-up, a shell the Ctrl-C that is meant
    for others than its background job. SIGTERM is meant for this process whoever started it.
    """
    return number is not signal.SIGTERM and signal.getsignal(number) is signal.SIG_IGN
