"""A child that is kept: its process is followed, and started again at the right moment."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh.cli import children
from mesh.cli.children import Child
from mesh.cli.kept_child import LET_GO_S_MAX, KeptChild, RestartLimits
from mesh.domain.errors import MeshError

LIMITS = RestartLimits(in_a_row_max=1, pause_s_min=1.0)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptChild]:
    """It sleeps. What follows passes the time by itself."""
    (tmp_path / "sleeper.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def begin(again: bool) -> Child:
        return children.start("node n", "sleeper", [], tmp_path / "n.log", again=again)

    node = KeptChild("node n", begin, LIMITS, "n")
    yield node
    if node.process is not None:
        children.stop([node.process], hurry=lambda: True)


def kill(node: KeptChild) -> None:
    assert node.process is not None
    node.process.process.kill()
    node.process.process.wait()


def state(node: KeptChild) -> tuple[bool, bool]:
    """Whether it has a process, and whether it serves."""
    return node.process is not None, node.serving


def test_it_is_started_again_after_the_pause_and_once_the_cell_has_let_go_of_it(
    node: KeptChild, capsys: pytest.CaptureFixture[str]
) -> None:
    node.look(8.0)
    node.follow(8.0, answers=True)
    assert state(node) == (True, True)
    kill(node)
    node.look(10.0)
    assert state(node) == (False, False)
    node.follow(10.9, answers=False)
    assert state(node) == (False, False), "amid the pause"
    node.follow(11.1, answers=True)
    assert state(node) == (False, False), "the cell still has the one before"
    node.follow(11.2, answers=False)
    assert state(node) == (True, False)
    node.follow(12.0, answers=True)
    assert state(node) == (True, True)
    assert capsys.readouterr().err.splitlines() == [
        "node n was ended by SIGKILL; restart 1 of 1 in 1 s",
        "node n is back",
    ]


def test_the_wait_for_the_cell_has_a_bound(node: KeptChild) -> None:
    kill(node)
    node.look(10.0)
    node.follow(11.0 + LET_GO_S_MAX, answers=True)
    assert node.process is not None


def test_the_end_after_the_last_restart_is_an_error(node: KeptChild) -> None:
    kill(node)
    node.look(10.0)
    node.follow(11.0, answers=False)
    kill(node)
    with pytest.raises(
        MeshError, match="node n was ended by SIGKILL after restart 1 of 1 in a row"
    ):
        node.look(20.0)
    assert node.process is None
