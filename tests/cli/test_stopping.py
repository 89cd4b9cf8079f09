"""A signal to stop is a question, or where nobody asks an interrupt."""

import signal
import sys
from types import FrameType
from typing import Any

import pytest

from mesh.cli.stopping import Stopping


def test_signals_are_counted() -> None:
    with Stopping() as stopping:
        assert not stopping.asked()
        signal.raise_signal(signal.SIGTERM)
        assert (stopping.asked(), stopping.asked_again()) == (True, False)
        signal.raise_signal(signal.SIGINT)
        assert stopping.asked_again()


@pytest.mark.parametrize("after", range(1, 20))
def test_a_signal_never_waits_for_who_waits_for_it(after: int) -> None:
    """Whatever the main thread does when it comes: each line of `wait` in turn, and what it calls.
    The handler would wait for ever for a lock that the thread which it interrupts holds.
    """
    lines = 0

    def line(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        if lines == after and event == "line":
            sys.settrace(None)
            signal.raise_signal(signal.SIGTERM)
        return line

    with Stopping() as stopping:
        sys.settrace(line)
        try:
            stopping.wait(0.001)
        finally:
            sys.settrace(None)
        assert stopping.asked() or lines < after


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_where_nobody_asks_the_first_one_interrupts_and_further_ones_are_counted(
    number: signal.Signals,
) -> None:
    before = signal.getsignal(number)
    with Stopping() as stopping:
        with pytest.raises(KeyboardInterrupt), stopping.interrupting():
            signal.raise_signal(number)
        assert (stopping.asked(), stopping.asked_again()) == (True, False)
        signal.raise_signal(number)
        assert stopping.asked_again()
    assert signal.getsignal(number) is before


def test_a_signal_that_came_before_interrupts_too() -> None:
    with Stopping() as stopping:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), stopping.interrupting():
            pytest.fail("nobody would see that it had come")
