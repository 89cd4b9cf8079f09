"""Watching the cell: the ring of lines, followers, and those who read too slowly."""

import asyncio
from contextlib import aclosing

import pytest

from mesh.controller.watch import LINES_MAX, WATCHER_LINES_MAX, WATCHERS_MAX, CellLog
from mesh.domain.errors import Unavailable
from mesh.domain.views import CellEvent, CellLine


def log_of(now_s: float = 10.0) -> CellLog:
    """Each event is told as one line, its own text."""
    return CellLog(
        narrate=lambda event, actions: [CellLine(kind="node", subject="n1", text=str(event))],
        now_s=lambda: now_s,
    )


async def texts_of(log: CellLog, *, backlog: int, follow: bool = False) -> list[str]:
    return [event.line.text async for event in log.watch(backlog=backlog, follow=follow)]


async def test_the_last_lines_are_kept_with_their_age() -> None:
    log = log_of()
    for n in range(LINES_MAX + 5):
        log.record(4.0, n, [])
    assert await texts_of(log, backlog=2) == [str(LINES_MAX + 3), str(LINES_MAX + 4)]
    assert await texts_of(log, backlog=0) == []
    everything = [event async for event in log.watch(backlog=2**31, follow=False)]
    assert len(everything) == LINES_MAX
    assert everything[0] == CellEvent(age_s=6.0, line=CellLine(kind="node", subject="n1", text="5"))


async def test_a_follower_gets_what_happens_until_the_log_is_closed() -> None:
    log = log_of()
    log.record(1.0, "before", [])
    following = asyncio.create_task(texts_of(log, backlog=5, follow=True))
    await asyncio.sleep(0)
    log.record(2.0, "after", [])
    await asyncio.sleep(0)
    log.close()
    assert await following == ["before", "after"]
    assert await texts_of(log, backlog=5, follow=True) == ["before", "after"], "and none follow now"


async def test_a_slow_follower_is_dropped_with_a_note_and_the_others_are_not() -> None:
    log = log_of()
    slow = log.watch(backlog=1, follow=True)
    log.record(1.0, "first", [])
    assert (await anext(slow)).line.text == "first"
    quick = asyncio.create_task(texts_of(log, backlog=0, follow=True))
    await asyncio.sleep(0)
    for n in range(WATCHER_LINES_MAX + 10):
        log.record(1.0, n, [])
        await asyncio.sleep(0)
    rest = [event.line async for event in slow]
    assert [line.text for line in rest[:2]] == ["0", "1"]
    assert len(rest) == WATCHER_LINES_MAX + 1
    assert "read too slowly" in rest[-1].text
    log.close()
    assert len(await quick) == WATCHER_LINES_MAX + 10


async def test_there_is_a_bound_on_watchers_and_leaving_makes_room() -> None:
    log = log_of()
    log.record(1.0, "x", [])
    watches = [log.watch(backlog=1, follow=True) for _ in range(WATCHERS_MAX)]
    for watch in watches:
        await anext(watch)
    with pytest.raises(Unavailable, match=f"{WATCHERS_MAX} watchers"):
        await anext(log.watch(backlog=1, follow=True))
    await watches.pop().aclose()
    async with aclosing(log.watch(backlog=1, follow=True)) as late:
        assert (await anext(late)).line.text == "x"
    for watch in watches:
        await watch.aclose()
