"""The verbs on a terminal: prompts, bars that are wiped, Ctrl-C and Ctrl-D, colours."""

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator

import pytest

from tests.cli.conftest import RunningCell

ANSWER_S_MAX = 60.0
"""For whatever is to be shown next. A process starts in about a second on an idle machine."""
AGAIN_S = 5.0
CTRL_C, CTRL_D = b"\x03", b"\x04"
ON_TERMINAL = (
    "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "from mesh.cli.main import main; main()"
)
"""A terminal sends its signals to the session that it controls."""


class Terminal:
    """A process on a pseudo-terminal of 100 columns, and what it has shown."""

    def __init__(self, cell: RunningCell, arguments: tuple[str, ...]) -> None:
        self._own, its = pty.openpty()
        termios.tcsetwinsize(its, (40, 100))
        environ = {**os.environ, "MESH_CONTROLLER": cell.address, "TERM": "xterm-256color"}
        for name in ("NO_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE"):
            environ.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_TERMINAL, *arguments],
            stdin=its,
            stdout=its,
            stderr=its,
            env=environ,
            start_new_session=True,
        )
        os.close(its)
        self.shown = ""

    def type(self, keys: bytes) -> None:
        os.write(self._own, keys)

    def until(self, seen: Callable[[str], bool]) -> str:
        """What has been shown since the last call, once `seen` holds for it."""
        give_up_s = time.monotonic() + ANSWER_S_MAX
        while not seen(self.shown):
            assert time.monotonic() < give_up_s, repr(self.shown)
            assert self._read(), repr(self.shown)
        shown, self.shown = self.shown, ""
        return shown

    def interrupt_prompt(self) -> None:
        """Press Ctrl-C until the prompt's line ends. Python shows a prompt before it reads, and one
        that comes in between, about one in two hundred, is noticed with the next key only.
        """
        give_up_s = time.monotonic() + ANSWER_S_MAX
        while "\n" not in self.shown:
            assert time.monotonic() < give_up_s, repr(self.shown)
            self.type(CTRL_C)
            while "\n" not in self.shown and self._read(AGAIN_S):
                pass

    def end(self) -> int:
        """Wait until it has ended; its exit code."""
        while self._read():
            pass
        return self.process.wait(timeout=ANSWER_S_MAX)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._own)

    def _read(self, wait_s: float = ANSWER_S_MAX) -> bool:
        ready, _, _ = select.select([self._own], [], [], wait_s)
        try:
            piece = os.read(self._own, 65536) if ready else b""
        except OSError:  # the other end has closed
            return False
        self.shown += piece.decode("utf-8", "replace")
        return bool(piece)


@pytest.fixture
def terminal(cell: RunningCell) -> Iterator[Callable[..., Terminal]]:
    started: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        started.append(Terminal(cell, arguments))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture(scope="module")
def talker(cell: RunningCell) -> Iterator[str]:
    """Refuses nobody, however busy the machine is."""
    lines = ("slo: {ttft_s: 30, tpot_s: 5}",)
    assert cell.mesh("deploy", "-", stdin=cell.manifest("talker", *lines)).code == 0
    yield "talker"
    cell.mesh("delete", "talker")


def at_prompt(shown: str) -> bool:
    return shown.endswith("> ")


def test_chat_answers_until_ctrl_d(talker: str, terminal: Callable[..., Terminal]) -> None:
    chat = terminal("chat", talker, "--max-tokens", "5")
    assert "/quit ends it" in chat.until(at_prompt)
    chat.type(b"hi\n")
    first, answer, *_ = chat.until(at_prompt).splitlines()
    assert first == "hi"
    assert answer.strip()
    assert not answer.startswith("error: ")
    chat.type(b"x" * 600 + b"\n")
    assert "error: " in chat.until(at_prompt)  # and the talk goes on
    chat.type(CTRL_D)
    assert chat.end() == 0


def test_ctrl_c_stops_an_answer_and_then_ends_the_chat(
    talker: str, terminal: Callable[..., Terminal]
) -> None:
    chat = terminal("chat", talker, "--max-tokens", "400")
    chat.until(at_prompt)
    chat.type(b"hi\n")
    chat.until(lambda shown: len(shown) > len("hi\r\n") + 20)
    chat.type(CTRL_C)
    assert "the question is forgotten" in chat.until(at_prompt)
    chat.interrupt_prompt()
    assert chat.end() == 130


def test_a_bar_is_shown_while_a_request_waits_and_wiped_before_the_answer(
    cell: RunningCell, terminal: Callable[..., Terminal]
) -> None:
    assert cell.mesh("deploy", "-", stdin=cell.manifest("cold")).code == 0
    try:
        ask = terminal("invoke", "cold", "hi", "--max-tokens", "3")
        assert ask.end() == 0
        bar, _, answer = ask.shown.rpartition("\x1b[2K")
        assert "cold" in bar
        assert answer.strip()
        assert "\x1b" not in answer.strip()
    finally:
        cell.mesh("delete", "cold")


def test_tables_are_coloured_not_wrapped(talker: str, terminal: Callable[..., Terminal]) -> None:
    get = terminal("get", talker)
    assert get.end() == 0
    assert len(get.shown.splitlines()) == 2
    assert "\x1b[32mready\x1b[0m" in get.shown


def test_a_replay_draws_its_progress_and_tells_what_was_sent_after_ctrl_c(
    talker: str, terminal: Callable[..., Terminal]
) -> None:
    options = ("--tokens-scale", "0.01", "--deployments", talker)
    replay = terminal("replay", "--generate", "5", *options)
    replay.until(lambda shown: re.search(r", [1-9]\d* of \d+ calls ended", shown) is not None)
    replay.type(CTRL_C)
    assert replay.end() == 130
    assert "Stopped early" in replay.shown
    assert "LATE_MS_P99" in replay.shown
    assert "Traceback" not in replay.shown


def test_top_draws_on_a_screen_of_its_own_until_ctrl_c(terminal: Callable[..., Terminal]) -> None:
    top = terminal("top", "--interval", "0.1")
    top.until(lambda shown: shown.count("cpu0") >= 2)
    top.type(CTRL_C)
    assert top.end() == 0
    assert top.shown.count("\x1b[?1049l") == 1
    assert "Traceback" not in top.shown
