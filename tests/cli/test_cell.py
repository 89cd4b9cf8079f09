"""A local cell whose controller hangs: whoever looks after it is not held up."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh.cli import children
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
