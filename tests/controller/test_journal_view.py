"""A journal is looked at step by step as its cell was: forwards, backwards, to its torn end."""

import asyncio
import json
from dataclasses import replace
from math import inf, isfinite, nan
from pathlib import Path

import pytest

from mesh.controller.journal_view import JournalView
from mesh.controller.recent import SAMPLES_MAX
from mesh.domain.access import Caller
from mesh.domain.errors import InvalidInput, NotFound
from mesh.domain.views import CellSnapshot
from mesh.http.feed import LINES_MAX, Feed
from mesh.report.cell_state import cell_state
from mesh.runtime.journal import open_journal
from mesh.runtime.turns import in_turns
from mesh.sim.cluster import VirtualCell
from mesh.sim.scenario import arrivals, plan
from tests.sim.scenarios import SMALL, scenario

ANYONE = Caller()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CellSnapshot]:
    """A journal with a torn last line, and its cell as it was in the end."""
    folder = tmp_path_factory.mktemp("run")
    read = replace(scenario(folder, SMALL), slo_mix="0.25:0.6,1.0:0.4")
    made = plan(read)
    path = folder / "journal"
    journal = open_journal(path, made.start())
    cell = VirtualCell(made, recorders=(journal,))
    cell.run(arrivals(read))
    journal.close()
    *_, last = path.read_text().splitlines()
    ended = cell.core.snapshot(json.loads(last)["now_s"])
    with path.open("a") as torn:
        torn.write('{"now_s": 9')
    return path, ended


async def test_a_journal_ends_where_its_cell_did(written: tuple[Path, CellSnapshot]) -> None:
    path, ended = written
    view = JournalView(path)
    await view.seek(10**9)
    assert view.position.index == view.position.events > 100
    (picture,) = await view.pictures([ANYONE])
    assert (picture.nodes, picture.deployments) == (ended.nodes, ended.deployments)
    assert picture.status.served == ended.served > 0
    told = await view.viewed.requests(ANYONE, 0)
    assert told["open"] == []
    assert view.viewed.recent.samples
    report = await view.viewed.report(ANYONE, 10**6)
    assert report.calls[0].finished == ended.served
    assert list(report.by_class) == ["tpot-250ms", "tpot-1000ms"], "as the manifest has them"
    with pytest.raises(NotFound):
        view.viewed.end(ANYONE, "r1-1")


async def test_a_step_back_is_as_it_was(written: tuple[Path, CellSnapshot]) -> None:
    path, _ = written
    view = JournalView(path)
    await view.seek(20)
    before = await in_turns(cell_state((await view.pictures([ANYONE]))[0]))
    await view.seek(21)
    assert view.position.event
    assert json.loads(view.position.decision.removesuffix(" …"))["event"]
    await view.seek(20)
    assert await in_turns(cell_state((await view.pictures([ANYONE]))[0])) == before
    at_s = view.position.at_s
    await view.advance(2.0)
    assert view.position.at_s == pytest.approx(at_s + 2.0)
    assert 20 < view.position.index < view.position.events


async def test_viewers_are_told_the_whole_wherever_one_moves(
    written: tuple[Path, CellSnapshot],
) -> None:
    view = JournalView(written[0])
    feed = Feed(view, run="j", unix_s=view.unix_s)
    viewer = feed.events(ANYONE, "")
    assert b"event: cell" in b"".join(await anext(viewer))
    await view.seek(50)
    await feed.again()
    async with asyncio.timeout(20):
        told = b""
        while b"event: cell" not in told or b"event: lines" not in told:
            told += b"".join(await anext(viewer))
    await viewer.aclose()
    reloaded = feed.events(ANYONE, "")
    async with asyncio.timeout(20):
        told = b""
        while b"event: lines" not in told:
            told += b"".join(await anext(reloaded))
    await reloaded.aclose()


async def test_lines_are_told_once_after_one_moved_while_nobody_viewed(
    written: tuple[Path, CellSnapshot],
) -> None:
    view = JournalView(written[0])
    feed = Feed(view, run="j", unix_s=view.unix_s)
    await view.seek(50)
    await feed.again()
    there = [event async for event in view.lines(backlog=LINES_MAX, follow=False)]
    viewer = feed.events(ANYONE, "")
    async with asyncio.timeout(20):
        told = b"".join([*await anext(viewer), *await anext(viewer)])
    await viewer.aclose()
    lines = [one for one in told.split(b"\n\n") if b"event: lines" in one]
    found = [line for one in lines for line in json.loads(one.split(b"data: ")[1].split(b"\n")[0])]
    assert len(found) == len(there) > 0


async def test_what_is_no_controllers_journal_is_refused(
    written: tuple[Path, CellSnapshot], tmp_path: Path
) -> None:
    foreign, spoilt = tmp_path / "foreign", tmp_path / "spoilt"
    foreign.write_text("a diary\n")
    with pytest.raises(InvalidInput, match="no journal"):
        JournalView(foreign)
    with pytest.raises(InvalidInput, match="cannot read"):
        JournalView(tmp_path / "none")
    lines = written[0].read_text().splitlines(keepends=True)[:30]
    lines[10] = '{"now_s": 1.0, "event": {"_type": "Explode"}, "actions": []}\n'
    spoilt.write_text("".join(lines))
    view = JournalView(spoilt)
    await view.seek(9)
    with pytest.raises(InvalidInput, match="spoilt:11 is no decision"):
        await view.seek(20)
    assert view.position.index == 9


@pytest.mark.parametrize("silent_s", [8 * 3600.0, 1e17, 1e300, inf, nan])
async def test_a_long_silence_or_an_absurd_time_holds_nobody_up(
    written: tuple[Path, CellSnapshot], tmp_path: Path, silent_s: float
) -> None:
    lines = written[0].read_text().splitlines(keepends=True)[:40]
    late = json.loads(lines[30])
    late["now_s"] += silent_s
    path = tmp_path / "late"
    path.write_text("".join([*lines[:30], json.dumps(late) + "\n", *lines[31:]]))
    view = JournalView(path)
    await view.seek(29)
    snapshots, others = 0, 0
    taken = view._core.snapshot

    def counted(now_s: float) -> CellSnapshot:
        nonlocal snapshots
        snapshots += 1
        assert snapshots <= SAMPLES_MAX
        return taken(now_s)

    async def run_beside() -> None:
        nonlocal others
        while True:
            await asyncio.sleep(0)
            others += 1

    view._core.snapshot = counted  # type: ignore[method-assign]
    beside = asyncio.create_task(run_beside())
    if not isfinite(silent_s):
        with pytest.raises(InvalidInput, match="late:31 is no decision"):
            await view.seek(10**9)
        assert view.position.index == 29
    else:
        await view.seek(30)
        assert view.position.index == 30
        assert (snapshots, others > 20) == (SAMPLES_MAX, True)
        assert len(view.viewed.recent.samples) == SAMPLES_MAX
    beside.cancel()


async def test_without_its_file_one_stays_where_one_is(
    written: tuple[Path, CellSnapshot], tmp_path: Path
) -> None:
    path = tmp_path / "removed"
    path.write_bytes(written[0].read_bytes())
    view = JournalView(path)
    await view.seek(30)
    before = (await view.pictures([ANYONE]))[0].nodes
    assert before
    path.unlink()
    with pytest.raises(InvalidInput, match="cannot read"):
        await view.seek(10)
    assert (view.position.index, (await view.pictures([ANYONE]))[0].nodes) == (30, before)
    whole = JournalView(written[0])
    for one in (view, whole):
        await one.seek(60)
    nodes = [(await one.pictures([ANYONE]))[0].nodes for one in (view, whole)]
    assert nodes[0] == nodes[1] != before, "what is open is read on"
