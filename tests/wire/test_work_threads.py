"""Work in threads is bounded by places, which are given back when the work has ended."""

import asyncio
import gc
import threading
import weakref
from contextlib import ExitStack

from mesh.domain.errors import Refused
from mesh.wire.work_threads import WORK_THREADS, WORKS_MAX, WorkThreads

WAIT_S_MAX = 20.0


class Given:
    """What work is done with."""


async def test_what_waits_is_forgotten_with_its_task_and_what_runs_keeps_its_place() -> None:
    threads, may_end = WorkThreads(), threading.Event()
    begun, entered = list[Given](), threading.Semaphore(0)

    def work(given: Given) -> None:
        begun.append(given)
        entered.release()
        assert may_end.wait(WAIT_S_MAX)

    async def call(given: Given) -> None:
        with threads.place():
            await threads.run(work, given)

    def places_free() -> int:
        with ExitStack() as taken:
            for n in range(WORKS_MAX + 1):
                try:
                    taken.enter_context(threads.place())
                except Refused:
                    return n
        raise AssertionError("there is no bound")

    runs = [asyncio.create_task(call(Given())) for _ in range(WORK_THREADS)]
    for _ in runs:
        assert await asyncio.to_thread(entered.acquire, timeout=WAIT_S_MAX)
    given = Given()
    kept = weakref.ref(given)
    waits = asyncio.create_task(call(given))
    del given
    await asyncio.sleep(0)
    assert places_free() == WORKS_MAX - WORK_THREADS - 1
    for task in (waits, *runs):
        task.cancel()
    await asyncio.wait([waits])
    assert waits.cancelled()
    del waits, task
    gc.collect()
    assert kept() is None, "no queue keeps it"
    await asyncio.wait(runs, timeout=0.05)
    assert places_free() == WORKS_MAX - WORK_THREADS, "what runs is counted until it has ended"
    may_end.set()
    assert [type(e) for e in await asyncio.gather(*runs, return_exceptions=True)] == [
        asyncio.CancelledError
    ] * WORK_THREADS
    assert (places_free(), len(begun)) == (WORKS_MAX, WORK_THREADS)
    threads.close()
