"""`mesh top`: one picture in a pipe, a screen of its own on a terminal, a controller that goes."""

import io
import json
import sys
from collections.abc import Iterator

import pytest

from mesh.cli.main import run
from mesh.cli.verbs import top
from mesh.domain.errors import Unavailable
from mesh.domain.views import CellStatus, DeploymentSnapshot, NodeSnapshot
from tests.cli.conftest import RunningCell
from tests.cli.running import mesh
from tests.cli.test_output import on_terminal
from tests.cli.views import CHAT_SMALL, NODE, STATUS

LATER_S = 7.0
"""Between two looks of the scripted clock."""


class Controller:
    """Answers as the script says, and is a MeshClient to the verb: `up` or `gone` for each look;
    after the last one the user types Ctrl-C.
    """

    def __init__(self, *looks: str) -> None:
        self._looks: Iterator[str] = iter(looks)
        self.now_s = 100.0

    def __enter__(self) -> "Controller":
        return self

    def __exit__(self, *ended: object) -> None:
        return

    def status(self) -> CellStatus:
        look = next(self._looks, None)
        if look is None:
            raise KeyboardInterrupt
        if look == "gone":
            raise Unavailable("connection refused")
        return STATUS

    def nodes(self) -> tuple[NodeSnapshot, ...]:
        return (NODE,)

    def list(self) -> tuple[DeploymentSnapshot, ...]:
        return (CHAT_SMALL,)


def watched(monkeypatch: pytest.MonkeyPatch, *looks: str) -> tuple[int, str, str]:
    """`mesh top` on a terminal: its exit code, what it drew, what it told on stderr."""
    controller = Controller(*looks)

    def sleep(span_s: float) -> None:
        controller.now_s += LATER_S

    screen, errors = on_terminal(monkeypatch), io.StringIO()
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "40")
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setattr(top, "MeshClient", lambda address: controller)
    monkeypatch.setattr("mesh.cli.verbs.top.time.sleep", sleep)
    monkeypatch.setattr("mesh.cli.verbs.top.time.monotonic", lambda: controller.now_s)
    return run(["top"]), screen.getvalue(), errors.getvalue()


def test_ctrl_c_ends_it_well_and_gives_the_screen_back(monkeypatch: pytest.MonkeyPatch) -> None:
    code, drawn, errors = watched(monkeypatch, "up", "up")
    assert (code, errors) == (0, "")
    assert drawn.count("chat-small-1") >= 2
    assert drawn.count("\x1b[?1049h") == drawn.count("\x1b[?1049l") == 1


def test_a_controller_that_comes_back_is_watched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    code, drawn, errors = watched(monkeypatch, "up", *(["gone"] * 4), "up")
    assert (code, errors) == (0, "")
    assert "reconnecting: no answer for 7 s" in drawn
    assert "reconnecting: no answer for 28 s" in drawn
    assert "reconnecting" not in drawn.rpartition("mesh 1.2.3")[2]


def test_a_controller_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    code, drawn, errors = watched(monkeypatch, "up", *(["gone"] * 5))
    assert code == 1
    error, hint = errors.splitlines()
    assert "has not answered for 35 s: connection refused" in error
    assert "hint: " in hint
    assert drawn.count("\x1b[?1049l") == 1, "the error is read on the screen that was there before"


def test_one_that_was_never_there_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    code, drawn, errors = watched(monkeypatch, "gone")
    assert (code, drawn) == (1, "")
    assert "connection refused" in errors


def test_once_prints_one_picture_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_terminal(monkeypatch)
    monkeypatch.setattr(top, "MeshClient", lambda address: Controller("up"))
    assert run(["top", "--once"]) == 0
    assert screen.getvalue().count("chat-small-1") == 2  # as an instance, and in an operation
    assert "\x1b[?1049h" not in screen.getvalue()


def test_a_dumb_terminal_gets_one_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(top, "MeshClient", lambda address: Controller("up"))
    assert run(["top"]) == 0
    assert "\x1b" not in screen.getvalue()


@pytest.mark.parametrize("interval", ["0", "-1", "x", "4000"])
def test_an_interval_has_bounds(interval: str) -> None:
    ran = mesh("top", "--interval", interval)
    assert ran.code == 2
    assert "invalid value for '--interval'" in ran.error_lines[0]


def test_a_pipe_gets_one_picture_of_the_cell(cell: RunningCell) -> None:
    ran = cell.mesh("top")
    assert (ran.code, ran.err) == (0, "")
    assert f"at {cell.address}" in ran.out.splitlines()[0]
    assert "cpu0  ready  cpu" in ran.out
    assert "\x1b" not in ran.out


def test_the_structured_form_is_that_of_nodes(cell: RunningCell) -> None:
    (seen,) = json.loads(cell.mesh("top", "-o", "json").out)
    (node,) = json.loads(cell.mesh("nodes", "-o", "json").out)
    assert seen.keys() == node.keys()
    assert seen["memory_bytes"] == node["memory_bytes"] > 0
    assert seen["base_bytes"] == node["base_bytes"]
