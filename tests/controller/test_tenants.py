"""Limits of tenants, the last minutes in numbers, and those who watch a cell."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from mesh.controller.recent import CALLS_MAX, SAMPLES_MAX, WINDOW_S, Recent
from mesh.controller.tenants import TenantMeter
from mesh.controller.watch import (
    LINES_MAX,
    TENANTS_WATCHERS_MAX,
    WATCHER_LINES_MAX,
    WATCHERS_BY_TENANT_MAX,
    WATCHERS_MAX,
    CellLog,
)
from mesh.domain.access import NOBODY, Caller, Role, TenantLimits, TenantName
from mesh.domain.errors import Refused, Unavailable
from mesh.domain.reasons import RefusalReason
from mesh.domain.views import CellEvent, CellLine
from mesh.report.calls import TEXT_CHARS_MAX
from mesh.sim.clock import HeapClock

A, B = TenantName("a"), TenantName("b")


def metered(limits: TenantLimits) -> tuple[TenantMeter, HeapClock]:
    clock = HeapClock()
    return TenantMeter(lambda tenant: limits if tenant == A else TenantLimits(), clock), clock


def calls(
    meter: TenantMeter,
    count: int,
    tenant: TenantName = A,
    tokens: int = 0,
    *,
    best_effort: bool = False,
) -> int:
    """How many of so many were admitted, one after the other."""
    admitted = 0
    for _ in range(count):
        try:
            with meter.call(tenant, best_effort=best_effort) as taken:
                taken.tokens = tokens
                admitted += 1
        except Refused:
            pass
    return admitted


def test_calls_in_a_second_are_limited_and_others_are_not() -> None:
    meter, clock = metered(TenantLimits(requests_per_s=4.0))
    assert calls(meter, 50) == 4
    clock.advance(0.5)
    assert calls(meter, 50) == 2
    clock.advance(100.0)
    assert calls(meter, 50) == 4, "what was not used is not saved up"
    assert calls(meter, 50, B) == calls(meter, 50, NOBODY) == 50


def test_each_answer_of_a_call_counts_as_a_request_of_the_second() -> None:
    meter, clock = metered(TenantLimits(requests_per_s=4.0))
    with meter.call(A, answers=8) as first, meter.call(A, first=first):
        pass
    assert calls(meter, 1) == 0
    clock.advance(1.0)
    assert calls(meter, 1) == 0, "the eight were overdrawn by four"
    clock.advance(0.25)
    assert calls(meter, 2) == 1


def test_who_has_used_a_minutes_tokens_waits_until_some_are_there_again() -> None:
    meter, clock = metered(TenantLimits(tokens_per_min=600.0))
    assert calls(meter, 5, tokens=400) == 2, "the second overdraws"
    with pytest.raises(Refused, match="limit is 600") as raised, meter.call(A):
        pass
    clock.advance(raised.value.retry_after_s)
    assert calls(meter, 1) == 1


def test_a_call_that_ends_makes_room_for_the_next() -> None:
    meter, _ = metered(TenantLimits(running=1))
    with meter.call(A):
        assert calls(meter, 3) == 0
    assert calls(meter, 3) == 3


def test_each_answer_to_a_prompt_counts_until_it_has_ended() -> None:
    meter, _ = metered(TenantLimits(running=4))
    with pytest.raises(Refused, match="5 answers at once") as raised, meter.call(A, answers=5):
        pass
    assert raised.value.retry_after_s == 0.0, "there is never room for them"
    with meter.call(A, answers=3) as first:
        assert calls(meter, 1) == 1
        with meter.call(A), pytest.raises(Refused, match="has 4 calls"), meter.call(A):
            pass
        with meter.call(A, first=first), pytest.raises(Refused), meter.call(A, answers=2):
            pass
        with meter.call(A, answers=2):
            pass
    assert first.answers_to_come == 0, "the third never began"
    with meter.call(A, answers=4):
        assert calls(meter, 1) == 0


def test_best_effort_leaves_half_of_each_limit_to_other_calls() -> None:
    def spared(meter: TenantMeter, count: int, tokens: int = 0) -> int:
        return sum(calls(meter, 1, tokens=tokens, best_effort=True) for _ in range(count))

    meter, clock = metered(TenantLimits(requests_per_s=8.0))
    assert (spared(meter, 50), calls(meter, 50)) == (4, 4)
    clock.advance(0.25)
    assert (spared(meter, 50), calls(meter, 50)) == (0, 2)
    meter, clock = metered(TenantLimits(tokens_per_min=600.0))
    assert (spared(meter, 50, tokens=100), calls(meter, 50, tokens=100)) == (3, 3)
    with pytest.raises(Refused) as raised, meter.call(A, best_effort=True):
        pass
    clock.advance(raised.value.retry_after_s)
    assert spared(meter, 1) == 1
    meter, _ = metered(TenantLimits(running=3))
    with meter.call(A, best_effort=True), meter.call(A, best_effort=True):
        assert (spared(meter, 1), calls(meter, 1)) == (0, 1)


def test_a_window_counts_what_ended_within_it_by_deployment_and_together() -> None:
    recent = Recent()
    for n in range(100):
        recent.finished(1.0, "chat", ttft_s=0.01 * (n + 1), tpot_s=0.1, met=n < 75)
    recent.refused(2.0, "code", RefusalReason.MEMORY_FULL)
    chat = recent.calls(WINDOW_S, ("chat",))
    assert (chat.finished, chat.attainment) == (100, 0.75)
    assert chat.ttft_p50_s == pytest.approx(0.50)
    assert chat.ttft_p95_s == pytest.approx(0.95)
    assert recent.calls(WINDOW_S).refused == ((RefusalReason.MEMORY_FULL, 1),)
    both = recent.calls(WINDOW_S, ("chat", "code"))
    assert both == recent.calls(WINDOW_S), "all together"
    later = recent.calls(WINDOW_S + 1.5)
    assert (later.finished, later.attainment, later.tpot_p50_s) == (0, None, None)
    assert later.refused, "the refusal came later"
    assert not recent.calls(WINDOW_S + 3.0).refused


def test_a_flood_and_a_long_life_cost_no_memory() -> None:
    recent = Recent()
    for n in range(CALLS_MAX + 10):
        recent.refused(1.0, "chat", RefusalReason.QUEUE_FULL)
        recent.sample(float(n), float(n), running=1, queued=2)
    assert recent.calls(1.0, ("chat",)).refused == ((RefusalReason.QUEUE_FULL, CALLS_MAX),)
    assert len(recent.samples) == SAMPLES_MAX
    spans_s = [recent.calls(at_s, ("chat",)).window_s for at_s in (1.0, 11.0, 100.0, WINDOW_S + 1)]
    assert spans_s == [6.0, 12.0, 96.0, WINDOW_S], "what is counted is of so long"
    recent = Recent()
    for at_s, name, count in ((1.0, "code", 9), (50.0, "chat", CALLS_MAX), (55.0, "code", 1)):
        for _ in range(count):
            recent.refused(at_s, name, RefusalReason.QUEUE_FULL)
    both = recent.calls(60.0, ("chat", "code"))
    assert (both.window_s, both.refused[0][1]) == (12.0, CALLS_MAX + 1), "of the shorter window"
    recent.forget("chat")
    assert not recent.calls(1.0, ("chat",)).refused


def test_a_sample_gives_rates_since_the_one_before() -> None:
    recent = Recent()
    recent.sample(10.0, 1000.0, running=0, queued=0)
    recent.tokens(30)
    recent.refused(11.0, "chat", RefusalReason.NO_NODE)
    recent.sample(12.0, 1002.0, running=1, queued=3)
    first, second = recent.samples
    assert (first.tokens_per_s, first.attainment) == (0.0, None)
    assert (second.tokens_per_s, second.refused_per_s) == (15.0, 0.5)
    assert (second.running, second.queued) == (1, 3)


def test_what_was_counted_holds_until_an_end_of_its_own() -> None:
    recent = Recent()
    recent.finished(1.0, "chat", ttft_s=0.1, tpot_s=0.1, met=True)
    chat = recent.calls(2.0, ("chat",))
    recent.refused(2.0, "code", RefusalReason.MEMORY_FULL)
    assert recent.calls(2.0, ("chat",)) is chat
    recent.finished(2.0, "chat", ttft_s=0.1, tpot_s=0.1, met=True)
    assert [recent.calls(2.0, names).finished for names in (("chat",), ("chat", "code"))] == [2, 2]


def log_of(now_s: float = 10.0) -> CellLog:
    """Each event is told as one line, its own text."""
    return CellLog(
        narrate=lambda event, actions: [CellLine(kind="node", subject="n1", text=str(event))],
        now_s=lambda: now_s,
    )


async def texts_of(log: CellLog, *, backlog: int, follow: bool = False) -> list[str]:
    return [event.line.text async for event in log.watch(backlog=backlog, follow=follow)]


async def test_a_long_text_is_cut_where_it_enters_the_log() -> None:
    log = log_of()
    log.record(1.0, "x" * TEXT_CHARS_MAX, [])
    log.record(1.0, "y" * (1 << 20), [])
    kept, cut = await texts_of(log, backlog=2)
    assert (len(kept), len(cut), cut[-2:]) == (TEXT_CHARS_MAX, TEXT_CHARS_MAX + 2, " …")
    assert [len(line.text) for _, line in log.lines()] == [len(kept), len(cut)]


async def test_the_last_lines_are_kept_with_their_age() -> None:
    log = log_of()
    for n in range(LINES_MAX + 5):
        log.record(4.0, n, [])
    assert await texts_of(log, backlog=2) == [str(LINES_MAX + 3), str(LINES_MAX + 4)]
    assert await texts_of(log, backlog=0) == []
    everything = [event async for event in log.watch(backlog=2**31, follow=False)]
    assert len(everything) == LINES_MAX
    line = CellLine(kind="node", subject="n1", text="5")
    assert everything[0] == CellEvent(number=6, age_s=6.0, line=line)


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


async def test_a_tenant_follows_its_own_lines_and_leaves_room_for_others() -> None:
    def narrate(event: object, actions: object) -> list[CellLine]:
        return [CellLine(kind="node", subject="n1", text=str(event), tenant=str(event)[0])]

    log = CellLog(narrate=narrate, now_s=lambda: 1.0)
    watches = list[AsyncGenerator[CellEvent, None]]()

    async def watch(tenant: str) -> str:
        asks = Caller(role=Role.TENANT, tenant=TenantName(tenant))
        watches.append(log.watch(backlog=2, follow=True, asks=asks))
        return (await anext(watches[-1])).line.text

    for text in "a1", "a2", "a3", "b1", "c1", "d1", "e1":
        log.record(1.0, text, [])
    assert [await watch("a") for _ in range(WATCHERS_BY_TENANT_MAX)] == ["a2"] * 8
    with pytest.raises(Unavailable, match=f"{WATCHERS_BY_TENANT_MAX} watchers"):
        await watch("a")
    for tenant in "bcd":
        assert [await watch(tenant) for _ in range(8)] == [f"{tenant}1"] * 8
    with pytest.raises(Unavailable, match=f"{TENANTS_WATCHERS_MAX} watchers"):
        await watch("e")
    assert await texts_of(log, backlog=1, follow=False) == ["e1"]
    for text in "b2", "a4":
        log.record(1.0, text, [])
    told = [await anext(watches[0]) for _ in range(2)]
    assert [(event.line.text, event.number) for event in told] == [("a3", 3), ("a4", 4)]
    for one in watches:
        await one.aclose()


FREES = """
import asyncio
from pathlib import Path
from mesh.controller import allocator

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

async def main():
    allocator.LOOK_S = 0.05
    giving_back = asyncio.create_task(allocator.give_back_freed())
    await asyncio.sleep(0.2)
    made = [bytes(1000) for _ in range(100_000)]
    on_top = bytes(1000)  # what lies behind keeps the heap from shrinking by itself
    full = resident_bytes()
    del made
    for _ in range(100):
        await asyncio.sleep(0.05)
        if resident_bytes() < full - (80 << 20):
            print("back")
            return

asyncio.run(main())
"""


def test_freed_memory_goes_back_although_something_lies_behind_it() -> None:
    done = subprocess.run([sys.executable, "-c", FREES], capture_output=True, text=True, check=True)
    assert done.stdout == "back\n"
