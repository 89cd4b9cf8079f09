"""`mesh top`: its picture, in a pipe and on a terminal, and a controller that goes."""

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.cli.main import run
from mesh.cli.verbs import top
from mesh.cli.verbs.top import BAR_CELLS, Picture, bar, fitting, frame
from mesh.domain.errors import Unavailable
from mesh.domain.views import CellStatus, DeploymentSnapshot, NodeSnapshot
from mesh.report.memory_parts import Part, parts
from tests.cli.conftest import RunningCell
from tests.cli.running import mesh
from tests.cli.test_output import on_terminal
from tests.cli.views import CHAT_SMALL, FRESH, LOADING, NODE, PARKED, READY, STATUS

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


BUSY = replace(NODE, instances=(READY, LOADING, PARKED))
SIZES = st.integers(0, 2**40)


def sizes(node: NodeSnapshot) -> dict[str, int]:
    return {part.name: part.size_bytes for part in parts(node)}


def shown(*nodes: NodeSnapshot, trouble: str = "") -> list[str]:
    queued = replace(FRESH, queued=2)
    picture = Picture(status=STATUS, nodes=nodes, deployments=(CHAT_SMALL, queued))
    return [line.plain for line in frame(picture, "127.0.0.1:7070", trouble)]


def test_of_many_queues_the_longest_are_shown() -> None:
    queued = [replace(FRESH, queued=n) for n in range(9)]
    lines = frame(Picture(status=STATUS, nodes=(), deployments=queued), "127.0.0.1:7070")
    assert lines[-1].plain == "queued by deployment: x 8, x 7, x 6, x 5, x 4, x 3, 2 more"


def test_the_parts_of_a_node_add_up_to_its_limit() -> None:
    found = sizes(BUSY)
    assert sum(found.values()) == NODE.memory_bytes
    assert found["base"] == NODE.base_bytes
    assert found["weights"] == READY.weights_bytes + PARKED.weights_bytes
    assert found["KV"] == READY.kv_used_bytes
    assert found["idle"] == READY.kv_bytes + PARKED.kv_bytes - READY.kv_used_bytes


def test_what_is_cached_lies_in_the_size_in_force_and_beyond_it_in_what_is_free() -> None:
    """A parked instance has one block in force."""
    block_bytes = READY.kv_bytes // READY.kv_blocks
    some = replace(READY, kv_blocks_cached=10)
    found = sizes(replace(NODE, instances=(some,)))
    assert found["cached"] == 10 * block_bytes
    assert found["idle"] == READY.kv_bytes - READY.kv_used_bytes - 10 * block_bytes
    parked = replace(PARKED, kv_blocks=1, kv_bytes=block_bytes, kv_used_bytes=0)
    without = sizes(replace(NODE, instances=(parked,)))
    found = sizes(replace(NODE, instances=(replace(parked, kv_blocks_cached=10),)))
    assert (found["cached"], found["idle"]) == (10 * block_bytes, 0)
    assert found["free"] == without["free"] - 9 * block_bytes


def test_a_load_is_in_flight_until_it_is_done() -> None:
    """The larger of what is promised and what is tracked counts: a shrink has not given back yet
    what it promises to."""
    held = READY.weights_bytes + READY.kv_bytes
    node = replace(NODE, instances=(READY, LOADING), promised_bytes=held, tracked_bytes=held)
    assert sizes(node)["in flight"] == 0
    assert sizes(replace(node, promised_bytes=held + 7))["in flight"] == 7
    assert sizes(replace(node, tracked_bytes=held + 9))["in flight"] == 9


def test_a_node_that_holds_more_than_its_limit_has_nothing_free() -> None:
    found = sizes(replace(NODE, memory_bytes=NODE.base_bytes + 1))
    assert (found["free"], found["weights"]) == (0, READY.weights_bytes)


@given(st.lists(SIZES, min_size=6, max_size=6).filter(any))
def test_a_bar_is_as_wide_as_it_should_be_and_shows_whatever_there_is(given: list[int]) -> None:
    found = [Part(letter, "", letter, size) for letter, size in zip("BWKk>.", given, strict=True)]
    drawn = bar(found).plain
    assert len(drawn) == BAR_CELLS
    assert set(drawn) == {part.letter for part in found if part.size_bytes}


def test_a_bar_is_in_proportion() -> None:
    found = [Part("a", "", "a", 100), Part("b", "", "b", 0), Part("c", "", "c", 300)]
    assert bar(found, 8).plain == "aacccccc"
    assert bar([Part("a", "", "a", 0)], 8).plain == ""


def test_a_whole_picture_fits_into_100_columns() -> None:
    lines = shown(BUSY)
    assert "\n".join(lines) == (
        "mesh 1.2.3 at 127.0.0.1:7070: 1 of 2 nodes ready, 3 running, 3 queued, "
        "1234 served, 5 refused\n"
        "queued by deployment: x 2, chat-small 1\n"
        "\n"
        "cpu0  ready  cpu, 2 cores, openvino, silent 0.4 s\n"
        f"  {'B' * 2}{'W' * 5}K{'k' * 6}>{'.' * 57}\n"
        "  B base 153  W weights 324  K KV 12.0  c cached 0.0  k idle 349  > in flight 27.9"
        "  . free 3231 MiB\n"
        "  limit 4096, promised 713, tracked 522, to promise 3231 MiB; RSS 858 MiB, "
        "unaccounted -1.9 MiB\n"
        "  INSTANCE      STATE    BATCH  HEADROOM_S  ITER_MS  CORRECTION  KV_USED_MIB"
        "  KV_HELD_MIB  ON_DEVICE\n"
        "  chat-small-1  ready        3       -0.12    34.56        1.08         12.0"
        "        360.0  100%\n"
        "  chat-small-2  loading      0           -    20.00        1.00          0.0"
        "          0.0  -\n"
        "  code-1        parked       0           -    34.56        1.08          0.0"
        "          0.7  100%\n"
        "  OPERATION  INSTANCE      SIZE_MIB  STATE    NEEDED_IN_S\n"
        "  resize     chat-small-1     522.1  running        -0.50\n"
        "  load       chat-small-2     190.7  waiting            -"
    )
    assert max(map(len, lines)) <= 100


def test_what_is_not_known_yet_and_what_is_not_there_is_left_out() -> None:
    lines = shown(replace(NODE, instances=(), operations=(), rss_bytes=0), trouble="lost")
    assert lines[0] == "lost"
    assert lines[-1].endswith("; RSS not told yet")
    assert not [line for line in lines if "INSTANCE" in line]


def test_what_a_node_calls_itself_cannot_steer_the_terminal() -> None:
    assert any("\\x1b[2J" in line for line in shown(replace(NODE, engine="\x1b[2J")))
    assert not [line for line in shown(replace(NODE, engine="\x1b[2J")) if "\x1b" in line]


@pytest.mark.parametrize(("height", "last"), [(2, "… 2 more lines; `mesh top --once` shows all")])
def test_a_low_screen_says_what_it_leaves_out(height: int, last: str) -> None:
    picture = Picture(status=STATUS, nodes=(), deployments=(replace(FRESH, queued=1),))
    lines = frame(picture, "h:1", "lost")
    assert fitting(lines, len(lines)) == lines
    kept = fitting(lines, height)
    assert (len(kept), kept[0], kept[-1].plain) == (height, lines[0], last)
