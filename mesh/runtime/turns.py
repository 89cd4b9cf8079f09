"""Long work on the event loop, a step at a time: whatever else is ready goes on in between.

In a thread it would keep the loop longer: only one of the two runs Python at a time, and after each
system call the loop would wait for the thread again. Before: who makes what viewers see.
"""

import asyncio
import time
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that stops wherever others may go on, and what has come of it."""
TURN_S = 0.00025
"""For so long work goes on in one go."""


async def in_turns(steps: Steps[T]) -> T:
    """What comes of the work. What it raises is raised here."""
    begun_s = time.perf_counter()
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        begun_s = await others_first(begun_s)


def at_once(steps: Steps[T]) -> T:
    """What comes of the work where nobody else waits for the loop."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


async def let_go(values: list[T]) -> None:
    """Empty the list, a value at a time: to deallocate what a large cell was a second ago would
    keep the loop for milliseconds.
    """
    begun_s = time.perf_counter()
    while values:
        values.pop()
        begun_s = await others_first(begun_s)


async def others_first(begun_s: float) -> float:
    """When the loop was last given to others: now, where that was longer ago than TURN_S."""
    if time.perf_counter() - begun_s <= TURN_S:
        return begun_s
    await asyncio.sleep(0)
    return time.perf_counter()
