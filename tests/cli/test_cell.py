"""A local cell whose controller hangs or has damaged state: whoever looks after it says so."""

import os
import signal
import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from mesh.cli import children, pulse
from mesh.cli.cell import ANSWER_S_MAX, LocalCell
from mesh.cli.cell_plan import CellPlan, plan_nodes
from mesh.cli.children import Child
from mesh.cli.restarts import RestartLimits
from mesh.controller import state_check
from mesh.domain.errors import StorageError, Unavailable
from mesh.wire.client import UNARY_S_MAX


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCell]:
    """Its controller's port takes connections, and nobody answers on them."""
    (tmp_path / "sleeper.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    start = children.start

    def sleeper(name: str, module: str, arguments: object, log_path: Path, *, again: bool) -> Child:
        return start(name, "sleeper", [], log_path, again=again)

    monkeypatch.setattr(children, "start", sleeper)
    cell = LocalCell(CellPlan(listen="127.0.0.1:0", home=tmp_path, nodes=()))
    cell.start()
    host, _, port = cell.address.rpartition(":")
    with socket.create_server((host, int(port))):
        yield cell
        cell.stop(lambda: True)


ANNOUNCES = """
import sys, time
from mesh.domain.ids import NodeId
from mesh.domain.messages import NodeStarting
from mesh.domain.reasons import DeviceKind
from mesh_nodes.announcing import Announcer

node = NodeStarting(
    node_id=NodeId("cpu0"), device=DeviceKind.CPU, hardware="none", cores=1, engine="none",
    memory_bytes=1, phase="starts",
)
announcer = Announcer(sys.argv[sys.argv.index("--join") + 1], node)
announcer.say("measures precisions", 0.25)
time.sleep(600)
"""


def nodes_run(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has `children.start` run `program` in place of node agents."""
    (folder / "announces.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    start = children.start

    def begin(name: str, module: str, given: list[str], log: Path, *, again: bool) -> Child:
        instead = "announces" if module == "mesh_nodes" else module
        return start(name, instead, given, log, again=again)

    monkeypatch.setattr(children, "start", begin)


def test_what_a_node_measures_before_it_joins_is_shown_and_it_does_not_count_as_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes_run(ANNOUNCES, tmp_path, monkeypatch)
    cell = LocalCell(CellPlan(listen="127.0.0.1:0", home=tmp_path, nodes=plan_nodes(["cpu"])))
    said, ready = "", list[str]()
    until_s = time.monotonic() + 60

    def stopping() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "measures" in said or time.monotonic() > until_s

    try:
        cell.start()
        assert not cell.wait_ready(stopping, ready.append)
    finally:
        cell.stop(lambda: True)
    assert "cell: node cpu0 measures precisions" in said
    assert [line.split()[0] for line in ready] == ["controller"]


def test_a_node_that_gets_on_gives_no_time_to_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gets_on = """
if "cpu0" in sys.argv:
    for n in range(6000):
        announcer.say("measures precisions", n / 6000)
        time.sleep(0.1)
"""
    hangs = ANNOUNCES.replace('NodeId("cpu0")', "NodeId(sys.argv[sys.argv.index('--name') + 1])")
    before, _, after = hangs.partition("announcer.say")
    program = f"{before.rstrip()}\n{gets_on}announcer.say{after}"
    nodes_run(program, tmp_path, monkeypatch)
    nodes = plan_nodes(["cpu", "cpu"])
    cell = LocalCell(CellPlan(listen="127.0.0.1:0", home=tmp_path, nodes=nodes))
    until_s = time.monotonic() + 60

    def stopping() -> bool:
        if len(cell._starting) == 2:
            monkeypatch.setattr("mesh.cli.cell.READY_S_MAX", 3.0)
        return time.monotonic() > until_s

    try:
        cell.start()
        with pytest.raises(Unavailable, match="cpu1 has not joined after 3 s"):
            cell.wait_ready(stopping, lambda line: None)
    finally:
        cell.stop(lambda: True)


def test_a_controller_that_hangs_holds_a_look_up_for_a_moment(hanging: LocalCell) -> None:
    began_s = time.monotonic()
    hanging.check_alive()
    took_s = time.monotonic() - began_s
    assert ANSWER_S_MAX / 2 < took_s < UNARY_S_MAX


def test_a_controller_that_stands_still_is_told_of_once_and_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pulse, "ASK_EVERY_S", 0.05)
    monkeypatch.setattr(pulse, "STILL_S_MAX", 3.0)
    cell = LocalCell(CellPlan(listen="127.0.0.1:0", home=tmp_path, nodes=()))

    def look_until(words: str) -> str:
        said, until_s = "", time.monotonic() + 60
        while words not in said:
            assert time.monotonic() < until_s, said
            cell.check_alive()
            said += capsys.readouterr().err
            time.sleep(0.02)
        return said

    try:
        cell.start()
        assert cell.wait_ready(lambda: False, lambda line: None)
        _look_until(cell, time.monotonic() + 0.5)
        assert "answer" not in capsys.readouterr().err
        (controller,) = cell.children
        os.kill(controller.process.pid, signal.SIGSTOP)
        said = look_until("the controller has not answered for 3 s")
        _look_until(cell, time.monotonic() + 1.5)
        os.kill(controller.process.pid, signal.SIGCONT)
        said += look_until("the controller answers again, after")
        assert said.count("has not answered") == 1
    finally:
        cell.stop(lambda: True)


def test_silence_is_counted_from_the_first_question_that_found_no_answer() -> None:
    """Nobody looks for 200 s, and then somebody does."""
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        felt = pulse.Pulse(f"127.0.0.1:{hangs.getsockname()[1]}", 0.0, told.append)
        try:
            for now_s in (200.0, 209.9):
                felt.look(now_s)
            assert told == []
            felt.look(210.0)
            assert told[0].startswith("the controller has not answered for 10 s: ")
        finally:
            felt.close()


def _look_until(cell: LocalCell, look_s: float) -> None:
    while time.monotonic() < look_s:
        cell.check_alive()
        time.sleep(0.02)


def test_a_controller_whose_registry_was_damaged_is_not_started_again(tmp_path: Path) -> None:
    cell = LocalCell(CellPlan(listen="127.0.0.1:0", home=tmp_path, nodes=()), RestartLimits())
    try:
        cell.start()
        assert cell.wait_ready(lambda: False, lambda line: None)
        (controller,) = cell.children
        controller.process.kill()
        controller.process.wait()
        registry = tmp_path / "controller" / "registry.sqlite3"
        registry.write_bytes(b"no database at all, " * 500)
        Path(f"{registry}-wal").unlink()  # it would mend the file
        with pytest.raises(StorageError, match="file is not a database") as refusal:
            _look_until(cell, time.monotonic() + 30)
        assert "move it away" in refusal.value.hint
        assert cell.children == ()
    finally:
        cell.stop(lambda: True)


@pytest.mark.parametrize(
    ("code", "passes"), [(sqlite3.SQLITE_FULL, True), (sqlite3.SQLITE_CORRUPT, False)]
)
def test_a_full_disk_may_be_otherwise_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, passes: bool
) -> None:
    def failing(home: Path) -> None:
        cause = sqlite3.OperationalError("it failed")
        cause.sqlite_errorcode = code
        raise StorageError("cannot open the registry") from cause

    monkeypatch.setattr(state_check, "check_state", failing)
    with nullcontext() if passes else pytest.raises(StorageError):
        state_check.check_restart(tmp_path)
