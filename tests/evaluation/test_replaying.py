"""Replays of whole journals: what they say of a run, and which change of a decision they find."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copy
from typing import Any

import pytest

from mesh.core.node.core import NodeCore
from mesh.domain.errors import InvalidInput
from mesh.domain.limits import NodeLimits
from mesh.domain.node_events import HeartbeatDue, LinkOpened
from mesh.evaluation.replaying import replay_journal
from mesh.evaluation.summary import Summary, summarize
from mesh.runtime.journal import NodeStart, open_journal
from mesh.sim.cluster import VirtualCell
from mesh.sim.scenario import arrivals, plan
from tests.sim.scenarios import SMALL, scenario


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Summary]:
    """The journal of a run in which some requests are refused, and what its callers saw."""
    folder = tmp_path_factory.mktemp("run")
    read = scenario(folder, SMALL.replace("requests_per_s = 2.0", "requests_per_s = 40.0"))
    read = replace(read, slo_mix="0.25:0.5,0.1:0.3,best:0.2")
    made = plan(read)
    path = folder / "journal"
    journal = open_journal(path, made.start())
    outcomes = VirtualCell(made, recorders=(journal,)).run(arrivals(read))
    journal.close()
    return path, summarize(outcomes, [of.spec for of in made.deployments])


@pytest.fixture
def journalled(written: tuple[Path, Summary], tmp_path: Path) -> tuple[Path, Summary]:
    """The same, with a journal that the test may change."""
    return Path(copy(written[0], tmp_path)), written[1]


def change(path: Path, changed: Callable[[dict[str, Any]], bool]) -> int:
    """Rewrite the first line that `changed` changes; its number, from 1."""
    lines = path.read_text().splitlines(keepends=True)
    for number, line in enumerate(lines):
        raw = json.loads(line)
        if number > 0 and changed(raw):
            lines[number] = json.dumps(raw) + "\n"
            path.write_text("".join(lines))
            return number + 1
    raise AssertionError("nothing was changed")


def test_a_replay_says_what_callers_saw(journalled: tuple[Path, Summary]) -> None:
    path, summary = journalled
    heard: list[int] = []
    report = replay_journal(path, heard.append)
    assert report.other is None
    assert (report.core, report.open_requests) == ("controller", 0)
    assert report.requests == summary
    assert list(report.requests.by_class) == list(summary.by_class)
    assert summary.refused, "the run should refuse some"
    assert 0 < summary.met < summary.requests
    assert heard == list(range(1, report.events + 1))
    assert len(path.read_text().splitlines()) == report.events + 1
    assert 10 < report.span_s < 120


def test_the_first_changed_decision_is_named_of_all(journalled: tuple[Path, Summary]) -> None:
    path, summary = journalled

    def one_more_block(line: dict[str, Any]) -> bool:
        for action in line["actions"]:
            command = action.get("command", {})
            if "kv_blocks" in command:
                command["kv_blocks"] += 1
                return True
        return False

    number = change(path, one_more_block)
    report = replay_journal(path)
    assert report.other is not None
    assert report.other.line == number
    assert report.other.event == "InvokeRequested"
    found = report.other.differences[0]
    assert found.where.endswith(".command.kv_blocks")
    assert int(found.recorded) == int(found.decided) + 1
    assert report.requests == summary


def test_a_decision_that_was_left_out_is_a_difference(journalled: tuple[Path, Summary]) -> None:
    path, _ = journalled

    def forgotten(line: dict[str, Any]) -> bool:
        was = len(line["actions"])
        del line["actions"][-1:]
        return was > 0

    number = change(path, forgotten)
    report = replay_journal(path)
    assert report.other is not None
    assert report.other.line == number
    assert report.other.differences[0].recorded == "nothing"


def test_requests_without_an_end_are_counted_as_open(journalled: tuple[Path, Summary]) -> None:
    path, summary = journalled
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: len(lines) // 2]))
    report = replay_journal(path)
    assert report.other is None
    assert report.requests is not None
    assert report.open_requests
    assert report.requests.requests + report.open_requests < summary.requests


def test_a_nodes_journal_is_replayed_without_requests(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written = open_journal(path, NodeStart(version="test", limits=NodeLimits()))
    core = NodeCore(limits=NodeLimits())
    opened, due = LinkOpened(), HeartbeatDue(rss_bytes=9, engine_bytes=7)
    for now_s, event in ((1.0, opened), (3.5, due)):
        written.record(now_s, event, core.handle(event, now_s))
    written.close()
    report = replay_journal(path)
    assert (report.core, report.version, report.events) == ("node", "test", 2)
    assert (report.span_s, report.requests, report.open_requests) == (2.5, None, None)
    assert report.other is None


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text("{}\n")
    with pytest.raises(InvalidInput, match="no journal"):
        replay_journal(path)
