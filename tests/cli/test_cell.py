"""A local cell whose controller hangs: whoever looks after it is not held up, and says so."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh.cli import children, pulse
from mesh.cli.cell import ANSWER_S_MAX, LocalCell
from mesh.cli.cell_plan import CellPlan
from mesh.cli.children import Child
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
        look_s = time.monotonic() + 0.5
        while time.monotonic() < look_s:
            cell.check_alive()
            time.sleep(0.02)
        assert "answer" not in capsys.readouterr().err
        (controller,) = cell.children
        os.kill(controller.process.pid, signal.SIGSTOP)
        said = look_until("the controller has not answered for 1 s")
        still_s = time.monotonic() + 1.5
        while time.monotonic() < still_s:
            cell.check_alive()
            time.sleep(0.02)
        os.kill(controller.process.pid, signal.SIGCONT)
        said += look_until("the controller answers again, after")
        assert said.count("has not answered") == 1
    finally:
        cell.stop(lambda: True)
