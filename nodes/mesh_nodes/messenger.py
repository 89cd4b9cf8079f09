"""Carries calls to the asyncio loop without holding up the thread that makes them.

`call_soon_threadsafe` writes to a socket, and gives the interpreter away while it does: the loop,
woken, takes it and works for as long as it likes, 0.5 ms where this was measured, before the caller
goes on. The compute thread has an iteration to start. So it puts its calls in a queue, which takes
a microsecond, and a thread of their own carries them over once the iteration computes.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue

Call = Callable[[], object]


def call_on(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    """Call on the loop's thread, from any. Once the loop has closed the agent is on its way out,
    and nobody waits for the call.
    """
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)


class Messenger:
    """Calls are made on the loop's thread, in the order of `post`, which any thread may use."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._carry, name="mesh-messenger", daemon=True)
        self._thread.start()

    def post(self, call: Call) -> None:
        """Puts the call in the queue. The callers bound its length: the link refuses reports beyond
        its own bound.
        """
        self._calls.put(call)

    def close(self, timeout_s: float) -> None:
        """Carry what has been posted, then end."""
        self._calls.put(None)
        self._thread.join(timeout_s)

    def _carry(self) -> None:
        while (call := self._calls.get()) is not None:
            call_on(self._loop, call)
