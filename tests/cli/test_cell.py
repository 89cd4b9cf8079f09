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
from mesh.cli.cell_plan import CellPlan
from mesh.cli.children import Child
from mesh.cli.restarts import RestartLimits
from mesh.controller import state_check
from mesh.domain.errors import StorageError
from mesh.wire.calls import UNARY_S_MAX


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


def test_a_controller_that_hangs_holds_a_look_up_for_a_moment(hanging: LocalCell) -> None:
    began_s = time.monotonic()
    hanging.check_alive()
    took_s = time.monotonic() - began_s
    assert ANSWER_S_MAX / 2 < took_s < UNARY_S_MAX / 2


def test_a_controller_that_stands_still_is_told_of_once_and_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pulse, "ASK_EVERY_S", 0.05)
    monkeypatch.setattr(pulse, "STILL_S_MAX", 1.0)
    cell = LocalCell(CellPlan(listen="127.0.0.1:0", home=tmp_path, nodes=()))

    def look_until(words: str) -> str:
        said, until_s = "", time.monotonic() + 30
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
        said = look_until("the controller has not answered for 1 s")
        _look_until(cell, time.monotonic() + 1.5)
        os.kill(controller.process.pid, signal.SIGCONT)
        said += look_until("the controller answers again, after")
        assert said.count("has not answered") == 1
    finally:
        cell.stop(lambda: True)


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
