"""A child process that is bounded in time, and heard while it runs."""

import sys
import time

import pytest

from mesh_loader.bounded_child import OOM_SCORE, run_bounded

WAIT_S = 20.0
SPEAKS = """
import sys, time
print("one", flush=True)
print("tw", end="", flush=True)
time.sleep(0.4)
print("o", flush=True)
print("the rest", end="")
"""


def test_lines_are_told_once_and_whole_while_the_program_runs() -> None:
    said: list[tuple[bytes, float]] = []
    begun_s = time.monotonic()
    finished = run_bounded(
        [sys.executable, "-c", SPEAKS],
        timeout_s=WAIT_S,
        environment={},
        on_wait=lambda: None,
        on_line=lambda line: said.append((line, time.monotonic() - begun_s)),
    )
    assert [line for line, _ in said] == [b"one\n", b"two\n"]
    assert said[0][1] < said[1][1], "the first was told before the program had ended"
    assert (finished.exit_code, finished.output) == (0, "one\ntwo\nthe rest")


def test_what_a_listener_raises_stops_the_program() -> None:
    def refuse(line: bytes) -> None:
        raise ValueError(line)

    with pytest.raises(ValueError, match="one"):
        run_bounded(
            [sys.executable, "-c", SPEAKS.replace("0.4", "60")],
            timeout_s=WAIT_S,
            environment={},
            on_wait=lambda: None,
            on_line=refuse,
        )


def test_what_would_rather_end_than_the_node_has_the_highest_score() -> None:
    program = (
        "from mesh_loader.bounded_child import end_first; end_first(); "
        "print(open('/proc/self/oom_score_adj').read())"
    )
    finished = run_bounded(
        [sys.executable, "-c", program], timeout_s=WAIT_S, environment={}, on_wait=lambda: None
    )
    assert int(finished.output) == OOM_SCORE
