"""When a child that ended is started again, and when no more."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh.cli import children
from mesh.cli.children import Child
from mesh.cli.kept_child import LET_GO_S_MAX, KeptChild
from mesh.cli.restarts import NO_RESTARTS, Restart, RestartLimits, Restarts
from mesh.domain.errors import MeshError

LIMITS = RestartLimits(in_a_row_max=3, pause_s_min=1.0, pause_s_max=3.0, well_s=10.0)
SERVES, KILLED, FAILED, USAGE = None, -9, 1, 2
Seen = tuple[int | None, float]
"""The exit code of a process that ended, or None of one that serves, and when."""


def handle(restarts: Restarts, seen: int | None, now_s: float) -> Restart | None:
    if seen is not None:
        return restarts.ended(seen, now_s)
    restarts.serves(now_s)
    return None


def restart(now_s: float, pause_s: float, number: int) -> Restart:
    return Restart(at_s=now_s + pause_s, pause_s=pause_s, number=number)


@pytest.mark.parametrize(
    ("seen", "last"),
    [
        pytest.param([(KILLED, 5.0)], restart(5.0, 1.0, 1), id="one-that-never-served"),
        pytest.param([(SERVES, 5.0), (KILLED, 6.0)], restart(6.0, 1.0, 1), id="one-that-served"),
        pytest.param([(SERVES, 5.0)], None, id="serving-needs-nothing"),
        pytest.param([(KILLED, 0.0), (KILLED, 2.0)], restart(2.0, 2.0, 2), id="the-pause-doubles"),
        pytest.param(
            [(KILLED, 0.0), (KILLED, 2.0), (KILLED, 5.0)],
            restart(5.0, 3.0, 3),
            id="up-to-its-bound",
        ),
        pytest.param(
            [(KILLED, 0.0), (KILLED, 2.0), (KILLED, 5.0), (FAILED, 9.0)],
            None,
            id="given-up-after-the-bound",
        ),
        pytest.param(
            [(KILLED, 0.0), (SERVES, 2.0), (KILLED, 11.9)],
            restart(11.9, 2.0, 2),
            id="served-too-briefly-to-be-well",
        ),
        pytest.param(
            [(KILLED, 0.0), (SERVES, 2.0), (KILLED, 12.0)],
            restart(12.0, 1.0, 1),
            id="forgiven-once-well",
        ),
        pytest.param(
            [(KILLED, 0.0), (SERVES, 2.0), (SERVES, 9.0), (KILLED, 12.0)],
            restart(12.0, 1.0, 1),
            id="serving-counts-from-when-it-was-first-seen",
        ),
        pytest.param(
            [(SERVES, 0.0), (KILLED, 100.0), (KILLED, 102.0)],
            restart(102.0, 2.0, 2),
            id="the-process-before-does-not-make-this-one-well",
        ),
        pytest.param([(USAGE, 0.0)], None, id="told-what-cannot-be-meant"),
        pytest.param([(0, 0.0)], restart(0.0, 1.0, 1), id="nobody-asked-it-to-stop"),
    ],
)
def test_what_is_decided(seen: list[Seen], last: Restart | None) -> None:
    restarts = Restarts(LIMITS)
    decisions = [handle(restarts, what, now_s) for what, now_s in seen]
    assert decisions[-1] == last


def test_without_restarts_the_first_end_is_the_last() -> None:
    restarts = Restarts(NO_RESTARTS)
    restarts.serves(0.0)
    assert restarts.ended(KILLED, 1e6) is None
    assert restarts.in_a_row == 0


def test_one_that_is_well_between_its_ends_is_started_again_for_ever() -> None:
    restarts = Restarts(RestartLimits())
    for now_s in range(0, 100_000, 1000):
        restarts.serves(now_s)
        assert restarts.ended(KILLED, now_s + 10.0) == restart(now_s + 10.0, 0.5, 1)


ONE_RESTART = RestartLimits(in_a_row_max=1, pause_s_min=1.0)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptChild]:
    """It sleeps. What follows passes the time by itself."""
    (tmp_path / "sleeper.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def begin(again: bool) -> Child:
        return children.start("node n", "sleeper", [], tmp_path / "n.log", again=again)

    node = KeptChild("node n", begin, ONE_RESTART, "n")
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
