"""The cell as viewers follow it: whole, then by changes; who comes back, and who reads slowly."""

import asyncio
import json
import select
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from math import inf, nan
from typing import Any, cast

import pytest
import requests

from mesh.controller.recent import Recent
from mesh.controller.watch import CellLog
from mesh.domain.access import Caller, Role, TenantName
from mesh.domain.errors import Unavailable
from mesh.domain.profile import Stalls
from mesh.domain.reasons import RefusalReason
from mesh.domain.recent import CellSample
from mesh.domain.views import CellEvent, CellLine
from mesh.http import feed as feeds
from mesh.http import reading as readings
from mesh.http import viewing
from mesh.http.app import assembled
from mesh.http.feed import VIEWER_EVENTS_MAX, VIEWERS_MAX, Feed
from mesh.http.journal import view_only
from mesh.http.reading import Reads
from mesh.http.refusals import encoded
from mesh.http.server import HttpServer
from mesh.http.sessions import Sessions
from mesh.report import plain
from mesh.report.cell_report import CellReport
from mesh.report.cell_state import CellPicture, cell_state, change
from mesh.report.plain import json_pieces, plain_fields, plain_json
from mesh.runtime import turns
from mesh.runtime.turns import Steps, in_turns
from mesh.wire.access import Gate
from mesh.wire.work_threads import WORK_THREADS, WORKS_MAX
from tests.cli.views import CHAT_SMALL, NODE, STATUS
from tests.controller.live import WAIT_S_MAX
from tests.http.edge import Edge, raw
from tests.support.scripted_engine import FOOTPRINT
from tests.support.waiting import until

pytestmark = pytest.mark.own_cell
ADMIN = Caller()
CALLS = Recent().calls(0.0)
PICTURE = CellPicture(
    status=STATUS,
    nodes=(NODE,),
    deployments=(CHAT_SMALL,),
    recent=CALLS,
    recent_of={CHAT_SMALL.spec.name: CALLS},
)
TENANT = Caller(role=Role.TENANT, tenant=TenantName("a"))
LINES, LINE_CHARS = 24, 1 << 20
"""More than the buffers of a connection hold."""


class Watched:
    """A cell whose uptime is the number of snapshots that were taken."""

    def __init__(self) -> None:
        self.taken = 0
        self.sampled = 3
        self.said: asyncio.Queue[str] = asyncio.Queue()

    async def pictures(self, callers: Sequence[Caller]) -> list[CellPicture]:
        self.taken += 1
        status = replace(STATUS, uptime_s=float(self.taken))
        samples = [
            CellSample(
                time_unix_s=float(n),
                running=n,
                queued=0,
                tokens_per_s=1.0,
                refused_per_s=0.0,
                attainment=None,
            )
            for n in range(self.sampled)
        ]
        return [replace(PICTURE, status=status, samples=samples) for _ in callers]

    async def lines(self, *, backlog: int, follow: bool) -> AsyncGenerator[CellEvent, None]:
        while True:
            text = await self.said.get()
            line = CellLine(kind="node", subject="n1", text=text)
            yield CellEvent(number=1, age_s=1.0, line=line)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(feeds, "TICK_S", 0.01)
    return Watched()


def feed_of(watched: Watched) -> Feed:
    return Feed(watched, run="r1", unix_s=lambda: 100.0)


async def told(blocks: AsyncIterator[list[bytes]]) -> AsyncIterator[tuple[str, str, Any]]:
    """The id, name and data of each event."""
    async for some in blocks:
        for block in b"".join(some).decode().removesuffix("\n\n").split("\n\n"):
            given = dict(line.split(": ", 1) for line in block.split("\n"))
            yield given.get("id", ""), given["event"], json.loads(given["data"])


async def uptimes(events: AsyncIterator[tuple[str, str, Any]], after: int) -> list[float]:
    """The first five that are told after so many snapshots."""
    found: list[float] = []
    while len(found) < 5:
        uptime_s = (await anext(events))[2]["patch"]["status"]["uptime_s"]
        found += [uptime_s] if uptime_s > after else []
    return found


async def test_a_viewer_is_told_the_whole_and_then_its_changes(watched: Watched) -> None:
    feed = feed_of(watched)
    async with aclosing(feed.events(ADMIN, "")) as blocks:
        events = told(blocks)
        number, name, whole = await anext(events)
        assert (name, whole["why"], number) == ("cell", "", "r1-1-0")
        assert whole["samples"]["running"] == [0, 1, 2]
        assert whole["status"]["uptime_s"] == 1.0
        _, name, change = await anext(events)
        assert name == "change"
        assert change["patch"] == {"status": {"uptime_s": 2.0}}, "what is as it was is not told"
        watched.sampled += 2
        while not change["samples"]:
            change = (await anext(events))[2]
        assert [one["running"] for one in change["samples"]] == [3, 4], "none is left out"
    assert json.loads(b"".join(await feed.cell(ADMIN)))["status"].keys() == whole["status"].keys()


async def test_a_snapshot_is_taken_for_all_viewers_not_for_nobody(watched: Watched) -> None:
    feed = feed_of(watched)
    async with aclosing(feed.events(ADMIN, "")) as one, aclosing(feed.events(TENANT, "")) as two:
        await anext(one)
        await anext(two)
        both = watched.taken + 1
        assert await uptimes(told(one), both) == await uptimes(told(two), both)
    before = watched.taken
    await asyncio.sleep(5 * feeds.TICK_S)
    assert (feed.viewers, watched.taken) == (0, before)


async def test_a_viewer_that_is_expected_finds_the_cell_looked_at_and_none_keeps_it(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "EXPECTED_S", 0.2)
    monkeypatch.setattr(feeds, "TICK_S", 60.0)
    feed = feed_of(watched)
    for _ in range(3):
        feed.expect(ADMIN)
    await asyncio.sleep(0.1)
    async with aclosing(feed.events(ADMIN, "")) as blocks:
        assert (await anext(told(blocks)))[2]["status"]["uptime_s"] == watched.taken == 1
        await asyncio.sleep(0.2)
        assert feed.viewers == 1, "it came, so it stays"
    feed.expect(ADMIN)
    await asyncio.sleep(0.1)
    assert json.loads(b"".join(await feed.cell(ADMIN)))["status"]["uptime_s"] == 3.0
    await asyncio.sleep(0.2)
    async with aclosing(feed.events(ADMIN, "")) as blocks:
        assert (await anext(told(blocks)))[2]["status"]["uptime_s"] == watched.taken == 4


async def test_the_state_is_whole_while_the_first_viewer_waits_for_it(watched: Watched) -> None:
    feed, may_look = feed_of(watched), asyncio.Event()
    pictures = watched.pictures

    async def slow(callers: Sequence[Caller]) -> list[CellPicture]:
        await may_look.wait()
        return await pictures(callers)

    watched.pictures = slow  # type: ignore[method-assign]
    async with aclosing(feed.events(ADMIN, "")) as first:
        viewing = asyncio.ensure_future(anext(first))
        await asyncio.sleep(0)
        asking = asyncio.create_task(feed.cell(ADMIN))
        await asyncio.sleep(0)
        may_look.set()
        assert json.loads(b"".join(await asking))["status"]
        await viewing


async def test_changes_are_told_again_after_a_look_that_failed(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    feed, pictures = feed_of(watched), watched.pictures

    async def fails(callers: Sequence[Caller]) -> list[CellPicture]:
        watched.pictures = pictures  # type: ignore[method-assign]
        raise RuntimeError("a look failed")

    async with aclosing(feed.events(ADMIN, "")) as blocks:
        events = told(blocks)
        await anext(events)
        watched.pictures = fails  # type: ignore[method-assign]
        async with asyncio.timeout(WAIT_S_MAX):
            while "a look failed" not in caplog.text:
                await anext(events)
            assert (await anext(events))[1] == "change"


async def test_an_audience_that_cannot_be_told_delays_no_other_and_loses_no_sample(
    watched: Watched,
) -> None:
    feed, pictures = feed_of(watched), watched.pictures

    async def spoilt(callers: Sequence[Caller]) -> list[CellPicture]:
        given = zip(callers, await pictures(callers), strict=True)
        return [
            replace(one, status=cast(Any, None)) if asks == ADMIN else one for asks, one in given
        ]

    async def samples(events: AsyncIterator[tuple[str, str, Any]]) -> list[int]:
        async with asyncio.timeout(WAIT_S_MAX):
            while not (found := (await anext(events))[2]["samples"]):
                pass
        return [one["running"] for one in found]

    async with aclosing(feed.events(ADMIN, "")) as one, aclosing(feed.events(TENANT, "")) as two:
        first, second = told(one), told(two)
        await anext(first)
        await anext(second)
        watched.pictures = spoilt  # type: ignore[method-assign]
        await asyncio.sleep(5 * feeds.TICK_S)
        watched.sampled += 1
        assert 3 in await samples(second)
        watched.pictures = pictures  # type: ignore[method-assign]
        assert 3 in await samples(first)


async def test_who_still_reads_when_the_controller_stops_is_told_that(watched: Watched) -> None:
    feed = feed_of(watched)
    async with aclosing(feed.events(ADMIN, "")) as reads:
        await anext(reads)
        feed.close()
        await asyncio.sleep(5 * feeds.TICK_S)
        *_, (_, name, end) = [one async for one in told(reads)]
    assert (name, end) == ("end", {"why": feeds.ENDED})


async def test_who_comes_back_goes_on_or_is_told_of_a_loss(watched: Watched) -> None:
    feed = feed_of(watched)
    async with aclosing(feed.events(ADMIN, "")) as stays:
        events = told(stays)
        await anext(events)
        first, _, _ = await anext(events)
        second, _, change = await anext(events)
        async with aclosing(feed.events(ADMIN, first)) as back:
            assert await anext(told(back)) == (second, "change", change)
        others = first.replace("r1-1-", "r1-2-"), first.replace("r1-", "r0-")
        for forged in (*others, "r1-1-99999", "nothing", "r1-1--1", "x" * 5_000):
            async with aclosing(feed.events(ADMIN, forged)) as lost:
                _, name, whole = await anext(told(lost))
                assert (name, whole["why"]) == ("cell", feeds.LOST)
    async with aclosing(feed.events(ADMIN, second)) as late:
        assert (await anext(told(late)))[1] == "cell", "nobody viewed meanwhile: nothing was kept"


async def test_what_others_were_told_last_is_no_place_to_go_on(watched: Watched) -> None:
    """A tab signs in as another while it is hidden; both audiences were told as much."""
    feed = feed_of(watched)
    async with aclosing(feed.events(ADMIN, "")) as one, aclosing(feed.events(TENANT, "")) as two:
        for blocks in (one, two):
            await anext(blocks)
        (last_id, _, _), (other_id, _, _) = [await anext(told(blocks)) for blocks in (one, two)]
        for asks, theirs in ((TENANT, last_id), (ADMIN, other_id)):
            async with aclosing(feed.events(asks, theirs)) as blocks:
                _, name, whole = await anext(told(blocks))
                assert (name, whole["why"]) == ("cell", feeds.LOST)


async def test_lines_come_at_once_to_whoever_may_read_them(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "TICK_S", 60.0)
    feed = feed_of(watched)
    async with aclosing(feed.events(ADMIN, "")) as one, aclosing(feed.events(TENANT, "")) as two:
        await anext(one)
        await anext(two)
        watched.said.put_nowait("loaded\n\nevent: end")
        _, name, (line,) = await anext(told(one))
        assert name == "lines"
        assert line["text"] == "loaded\n\nevent: end", "no text ends an event"
        assert line["time_unix_s"] == 99.0
        async with aclosing(feed.events(ADMIN, "")) as later:
            both = told(later)
            (cell_id, cell, _), (lines_id, lines, _) = [await anext(both) for _ in range(2)]
            assert (cell, lines) == ("cell", "lines")
            assert (cell_id, lines_id) == ("", "r1-1-1"), "who leaves before the lines is told both"
        feed.close()
        assert [name async for _, name, _ in told(two)] == ["end"]
    with pytest.raises(Unavailable):
        await anext(feed.events(ADMIN, ""))


async def test_a_line_that_is_told_again_has_the_same_id(watched: Watched) -> None:
    """Its time is reckoned anew. A line of another controller, or tenant, has another id."""
    line = CellLine(kind="node", subject="n1", text="loaded")
    said = [line, replace(line, tenant="a"), line]
    log = CellLog(narrate=lambda event, actions: said, now_s=lambda: 2.0)
    log.record(1.0, None, [])
    watched.lines = log.watch  # type: ignore[method-assign]
    for run, unix_s in (("r1", 100.0), ("r1", 109.0), ("r2", 109.0)):
        feed = Feed(watched, run=run, unix_s=partial(float, unix_s))
        async with asyncio.timeout(WAIT_S_MAX), aclosing(feed.events(ADMIN, "")) as blocks:
            lines = await anext(data async for _, name, data in told(blocks) if name == "lines")
        ids = [(line["line_id"], line["time_unix_s"]) for line in lines]
        assert ids == [(f"{run}-{one}", unix_s - 1.0) for one in ("-1", "a-1", "-2")]


async def test_lines_go_on_after_one_that_cannot_be_told(watched: Watched) -> None:
    feed, lines = feed_of(watched), watched.lines

    def fails(*, backlog: int, follow: bool) -> AsyncGenerator[CellEvent, None]:
        watched.lines = lines  # type: ignore[method-assign]
        raise RuntimeError("no line")

    watched.lines = fails  # type: ignore[method-assign]
    async with asyncio.timeout(WAIT_S_MAX), aclosing(feed.events(ADMIN, "")) as blocks:
        events = told(blocks)
        await anext(events)
        watched.said.put_nowait("loaded")
        while (await anext(events))[1] != "lines":
            pass


async def test_a_viewer_that_reads_too_slowly_is_dropped_and_told(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "LINES_S", 0.0)
    feed = feed_of(watched)
    async with aclosing(feed.events(ADMIN, "")) as slow:
        await anext(slow)
        for n in range(2 * VIEWER_EVENTS_MAX):
            watched.said.put_nowait(str(n))
            await asyncio.sleep(0.001)
        names = [(name, data) async for _, name, data in told(slow)]
        assert VIEWER_EVENTS_MAX < len(names) < 2 * VIEWER_EVENTS_MAX
        assert names[-1] == ("end", {"why": feeds.DROPPED})


async def test_lines_that_come_one_after_the_other_are_told_together(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "TICK_S", 60.0)
    monkeypatch.setattr(feeds, "LINES_S", 1.0)
    feed = feed_of(watched)
    async with aclosing(feed.events(ADMIN, "")) as blocks:
        await anext(blocks)
        for n in range(5):
            watched.said.put_nowait(str(n))
            await asyncio.sleep(0.005)
        (block,) = await anext(blocks)
        assert block.count(b"event: ") == block.count(b"id: ") == 1, "nobody goes on amid them"
        assert json.loads(block.split(b"\n")[1].removeprefix(b"data: "))[4]["text"] == "4"
        watched.said.put_nowait("last")
        await asyncio.sleep(0.005)
        feed.close()
        (_, _, (line,)), (_, name, _) = [one async for one in told(blocks)]
    assert (line["text"], name) == ("last", "end")


async def test_viewers_that_come_together_share_what_is_encoded_one_audience_at_a_time(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces, encoded_times, at_work, at_work_max = json_pieces, 0, 0, 0

    def counted(data: Mapping[str, object], depth: int) -> Steps[list[bytes]]:
        nonlocal encoded_times, at_work, at_work_max
        encoded_times, at_work = encoded_times + 1, at_work + 1
        at_work_max = max(at_work_max, at_work)
        made = yield from pieces(data, depth)
        at_work -= 1
        return made

    monkeypatch.setattr(feeds, "TICK_S", 60.0)
    monkeypatch.setattr(turns, "TURN_S", 0.0)  # others go on after each entry
    monkeypatch.setattr(feeds, "json_pieces", counted)
    feed = feed_of(watched)
    feed.expect(ADMIN)
    audiences = ADMIN, TENANT, replace(TENANT, tenant=TenantName("b"))
    viewers = [feed.events(asks, "") for asks in audiences * 8]
    whole = [b"".join(some) for some in await asyncio.gather(*(anext(one) for one in viewers))]
    assert (watched.taken, encoded_times, len(set(whole)), at_work_max) == (3, 3, 3, 1)
    for viewer in viewers:
        await viewer.aclose()


async def test_many_lines_at_once_are_one_event_and_drop_nobody(watched: Watched) -> None:
    feed, count = feed_of(watched), 10 * VIEWER_EVENTS_MAX
    async with aclosing(feed.events(ADMIN, "")) as blocks:
        await anext(blocks)
        for n in range(count):
            watched.said.put_nowait(str(n))
        texts: list[str] = []
        ids = []
        async with asyncio.timeout(WAIT_S_MAX):
            async for number, name, data in told(blocks):
                if name == "lines":
                    texts += [line["text"] for line in data]
                    ids.append(number)
                if len(texts) == count:
                    break
    assert texts == [str(n) for n in range(count)]
    assert len(ids) < VIEWER_EVENTS_MAX


async def test_a_viewer_that_never_reads_is_cut_off_and_delays_nobody(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewing, "WRITE_S_MAX", 0.2)
    feed, server = feed_of(watched), HttpServer("127.0.0.1:0")
    routes = view_only(feed, lambda: cast(Reads, None), journal=False)
    server.start(assembled(routes, Gate(), Sessions(time.monotonic)))
    host, port = server.address.split(":")
    async with asyncio.timeout(WAIT_S_MAX), aclosing(feed.events(ADMIN, "")) as reads:
        with socket.create_connection((host, int(port))) as silent:
            silent.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            events = told(reads)
            while feed.viewers < 2:
                await anext(events)
            for _ in range(LINES):
                watched.said.put_nowait("\x1b[31m" + LINE_CHARS * "x")
            found = 0
            while found < LINES or feed.viewers > 1:
                _, name, data = await anext(events)
                found += len(data) if name == "lines" else 0
    await server.stop(1.0)


async def test_viewers_are_bounded(watched: Watched) -> None:
    feed = feed_of(watched)
    here = [feed.events(ADMIN, "") for _ in range(VIEWERS_MAX)]
    for viewer in here:
        await anext(viewer)
    for asks in (ADMIN, TENANT):
        with pytest.raises(Unavailable, match="is the limit"):
            await anext(feed.events(asks, ""))
    for viewer in here:
        await viewer.aclose()
    assert feed.viewers == 0


async def test_no_tenants_take_all_places_of_viewers(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "VIEWERS_MAX", 8)
    monkeypatch.setattr(feeds, "VIEWERS_BY_TENANT_MAX", 2)
    feed, here = feed_of(watched), []
    for name in "abcd":
        asks = replace(TENANT, tenant=TenantName(name))
        with suppress(Unavailable):
            for _ in range(3):
                viewer = feed.events(asks, "")
                await anext(viewer)
                here.append(viewer)
    assert len(here) == 6, "two of each of three"
    here.append(feed.events(ADMIN, ""))
    await anext(here[-1])
    for viewer in here:
        await viewer.aclose()


async def test_the_state_says_what_the_command_line_says(http: Edge) -> None:
    await http.cell.deployed()
    told = (await http.get("/api/v1/cell")).json()
    status = await http.cell.ask(http.cell.client.status)
    assert told["status"]["version"] == status.version
    assert told["status"]["instances"] == status.instances
    (node,) = await http.cell.ask(http.cell.client.nodes)
    assert told["nodes"]["n1"]["promised_bytes"] == node.promised_bytes
    assert sum(part["size_bytes"] for part in told["nodes"]["n1"]["parts"]) == node.memory_bytes
    assert set(told["instances"]) == {one.instance_id for one in node.instances}
    assert told["deployments"]["chat"]["recent"]["finished"] == 0
    assert (await http.chat()).status_code == 200
    recent = (await http.get("/api/v1/cell")).json()["deployments"]["chat"]["recent"]
    assert (recent["finished"], recent["met"], recent["attainment"]) == (1, 1, 1.0)


HOSTILE = "\u202e<\x1b[31m\ud800"
BUSY = replace(
    NODE.instances[0],
    batch=9,
    correction=nan,
    headroom_least_s=None,
    stalls=Stalls(count=9, longest_s=inf),
)
LATER = replace(
    PICTURE,
    nodes=(replace(NODE, instances=(BUSY,), hardware=HOSTILE, footprints=(("ov", FOOTPRINT),)),),
    deployments=(replace(CHAT_SMALL, instances=(BUSY,), phase=HOSTILE),),
    recent=replace(CALLS, refused=((RefusalReason.QUEUE_FULL, 3),)),
)


async def test_the_state_is_encoded_as_the_command_line_prints_it() -> None:
    for picture in (PICTURE, LATER):
        state = await in_turns(cell_state(picture))
        pieces = await in_turns(json_pieces(state, feeds.STATE_DEPTH))
        told = json.loads(b"".join(pieces))
        entries: list[tuple[Any, object]] = [(told["recent"], picture.recent)]
        entries += [(told["nodes"][node.node_id], node) for node in picture.nodes]
        entries += [(told["deployments"][one.spec.name], one) for one in picture.deployments]
        entries += [(told["instances"][i.instance_id], i) for i in picture.nodes[0].instances]
        for entry, value in entries:
            said = json.loads(encoded(plain_fields(value)))
            said.pop("instances", None)
            assert said.items() <= entry.items()


async def test_a_state_and_its_change_are_the_next_state() -> None:
    """Where a member that becomes null is left out."""

    def merged(target: Any, patch: Any) -> Any:
        if not isinstance(patch, dict):
            return patch
        kept = dict(target) if isinstance(target, dict) else {}
        for name, value in patch.items():
            kept[name] = merged(kept.get(name), value)
        return {name: value for name, value in kept.items() if value is not None}

    for before, after in ((PICTURE, LATER), (LATER, PICTURE)):
        was, now = await in_turns(cell_state(before)), await in_turns(cell_state(after))
        states = was, now, await in_turns(change(was, now))
        one, next_one, patch = (json.loads(plain_json(state)) for state in states)
        assert merged(merged({}, one), patch) == merged({}, next_one)
        assert patch.keys() == {"nodes", "deployments", "instances", "recent"}, "and no more"
        changed = patch["instances"][BUSY.instance_id]
        assert changed.keys() == {"batch", "correction", "headroom_least_s", "stalls"}


async def test_the_whole_of_a_large_cell_is_encoded_in_small_pieces() -> None:
    one: dict[str, object] = {"name": "\u202edeployment", "texts": ["x" * 1_000, None, 1.5]}
    state = {"deployments": {str(n): one for n in range(500)}, "nodes": {}, "why": ""}
    for told, encloses in ((state, 0), ({"patch": state, "samples": []}, 1)):
        depth = feeds.STATE_DEPTH + encloses
        entries = list(plain._entries(told, depth))
        assert b"".join(entries) == encoded(told)
        assert max(map(len, entries)) < 2_000
        pieces = await in_turns(json_pieces(told, depth))
        assert b"".join(pieces) == encoded(told)
        assert max(map(len, pieces)) < 100_000


async def test_a_look_at_the_headers_takes_no_viewers_place(http: Edge) -> None:
    def look() -> None:
        with requests.Session() as session:
            head = session.head(http.url + "/api/v1/events", timeout=WAIT_S_MAX)
            assert head.headers["content-type"].startswith("text/event-stream")
            told = session.get(http.url + "/api/v1/cell", timeout=WAIT_S_MAX)
            assert told.status_code == 200, "the same connection is free for more"

    await http.cell.ask(look)


@pytest.mark.parametrize("forged", ["r0-1", "nothing", "-1", "9" * 5_000, "r1-1-<b>", "\xff-\xb2"])
async def test_a_forged_last_event_id_is_told_the_whole(http: Edge, forged: str) -> None:
    def first() -> str:
        headers = {"Last-Event-ID": forged.encode("latin-1")}
        with requests.get(
            http.url + "/api/v1/events", headers=headers, stream=True, timeout=WAIT_S_MAX
        ) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines(decode_unicode=True)
            return str(next(line for line in lines if line.startswith("data: ")))

    told = json.loads((await http.cell.ask(first)).removeprefix("data: "))
    assert (told["why"], "status" in told) == (feeds.LOST, True)


async def test_a_viewer_that_leaves_is_seen_to_leave(http: Edge) -> None:
    client = raw(http, b"GET /api/v1/events", b"")
    read = b""
    while b"event: change" not in read:
        read += await asyncio.to_thread(client.recv, 1 << 16)
    assert b"event: cell" in read
    client.close()
    again = await http.get("/api/v1/cell")
    assert again.json()["why"] == ""


async def test_reports_that_are_made_at_once_are_bounded(
    http: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(readings, "page", lambda _: str(may_end.wait(WAIT_S_MAX)))
    made = [raw(http, b"GET /api/v1/report.html", b"") for _ in range(WORKS_MAX)]
    await asyncio.sleep(0.2)
    for path in ("report", "report.html", "trace", "usage"):
        client = raw(http, b"GET /api/v1/" + path.encode(), b"")
        client.setblocking(False)
        told = await asyncio.get_running_loop().sock_recv(client, 1 << 16)
        assert told.startswith(b"HTTP/1.1 429")
        assert b"retry-after: 1" in told.lower()
        assert b"reports, traces, sums of usage and files are being made; 8 is the limit" in told
        client.close()
    may_end.set()
    for client in made:
        assert (await asyncio.to_thread(client.recv, 1 << 16)).startswith(b"HTTP/1.1 200")
        client.close()
    assert (await http.get("/api/v1/usage")).status_code == 200


@pytest.mark.parametrize("path", ["report", "report.html", "trace", "usage", "manifest"])
async def test_what_a_client_that_has_left_asked_for_is_not_made(
    http: Edge, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    may_end = threading.Event()
    pages: list[CellReport] = []

    def page(told: CellReport) -> str:
        pages.append(told)
        return str(may_end.wait(WAIT_S_MAX))

    monkeypatch.setattr(readings, "page", page)
    run = [raw(http, b"GET /api/v1/report.html", b"") for _ in range(WORK_THREADS)]
    await asyncio.to_thread(until, lambda: len(pages) == WORK_THREADS)
    asked = b"GET /api/v1/" + path.encode()
    left = [raw(http, asked, b"") for _ in range(WORKS_MAX - WORK_THREADS + 1)]
    (beyond,), _, _ = await asyncio.to_thread(select.select, left, [], [], WAIT_S_MAX)
    assert beyond.recv(1 << 16).startswith(b"HTTP/1.1 429"), "the others have places"
    for client in left:
        client.close()
    await asyncio.sleep(0.1)
    answered = asyncio.create_task(http.get("/api/v1/manifest"))
    await asyncio.sleep(0.1)
    may_end.set()
    assert (await answered).status_code == 200, "they have no places any more"
    for client in run:
        assert (await asyncio.to_thread(client.recv, 1 << 16)).startswith(b"HTTP/1.1 200")
        client.close()
    assert len(pages) == WORK_THREADS


async def test_requests_are_shown_told_whole_and_cancelled(http: Edge) -> None:
    node = await http.cell.deployed()
    assert (await http.chat()).status_code == 200
    told = (await http.get("/api/v1/requests")).json()
    (ended,) = told["ended"]
    assert (told["open"], ended["end"], told["after"]) == ([], "length", 1)
    whole = (await http.get(f"/api/v1/requests/{ended['request_id']}")).json()
    assert whole["steps"][0]["text"].startswith("asked: ")
    assert whole["output_tokens"] == len(whole["tokens_after_s"])
    node.held = True
    asked = asyncio.create_task(http.chat())
    still: list[Any] = []
    while not still:
        still = (await http.get("/api/v1/requests?after=1")).json()["open"]
    assert still[0]["headroom_s"] > 0
    path = f"/api/v1/requests/{still[0]['request_id']}/cancel"
    other = {"Origin": "http://localhost:1"}
    assert (await http.post(path, {}, headers=other)).status_code == 403
    assert (await http.post(path, {})).status_code == 200
    assert (await asked).status_code >= 400
    assert (await http.post(path, {})).status_code == 404
    trace = (await http.get("/api/v1/trace")).json()["traceEvents"]
    assert {"prefill", "decode"} <= {event["name"] for event in trace}
    (used,) = (await http.get("/api/v1/usage?by=deployment")).json()
    assert used["deployment"] == "chat"
    report = (await http.get("/api/v1/report?since_s=600")).json()
    assert [(one["deployment"], one["calls"]) for one in report["calls"]] == [
        ("all", 2),
        ("chat", 2),
    ]
    assert (report["calls"][0]["finished"], report["calls"][0]["judged"]) == (1, 1)
    kept = await http.get("/api/v1/report.html")
    assert "attachment" in kept.headers["content-disposition"]
    assert "<script" not in kept.text
    told = json.loads(await http.cell.ask(http.cell.client.report, 600.0))
    assert told["calls"] == report["calls"]
    for wrong in ("usage?by=colour", "usage?since_s=nan", "requests?after=-1", "requests/r9"):
        refused = await http.get(f"/api/v1/{wrong}")
        assert refused.status_code in (400, 404), wrong
        assert refused.json()["error"]["message"]
