"""Long work on the event loop, a step at a time: whatever else is ready goes on in between.

A thread would compute beside the loop, but of the two only one runs Python at a time, and each call
of the system costs the loop its place: it then waits for the thread again.
"""

import asyncio
import time
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that stops wherever others may go on, and what has come of it."""
TURN_S = 0.0005
"""For so long work goes on in one go."""


async def in_turns(steps: Steps[T]) -> T:
    begun_s = time.perf_counter()
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        begun_s = await others_first(begun_s)


async def others_first(begun_s: float) -> float:
    """When the loop was last given to others: now, where that was longer ago than TURN_S."""
    if time.perf_counter() - begun_s <= TURN_S:
        return begun_s
    await asyncio.sleep(0)
    return time.perf_counter()
