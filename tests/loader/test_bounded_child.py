"""A child process that is bounded in time, and heard while it runs."""

import sys
import tempfile
import time

import pytest

from mesh_loader.bounded_child import OOM_SCORE, OUTPUT_BYTES_MAX, run_bounded

WAIT_S = 60.0
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


def test_a_program_that_writes_without_end_is_heard_with_a_bound() -> None:
    program = "import os\nfor _ in range(400): os.write(1, b'x' * 9999 + b'\\n' * (_ % 2))"
    lengths: list[int] = []
    finished = run_bounded(
        [sys.executable, "-c", program],
        timeout_s=WAIT_S,
        environment={},
        on_wait=lambda: None,
        on_line=lambda line: lengths.append(len(line)),
    )
    assert (finished.exit_code, len(finished.output), len(lengths)) == (0, OUTPUT_BYTES_MAX, 200)


def test_a_program_that_closes_its_output_is_waited_for() -> None:
    program = "import os, sys, time; os.close(1); os.close(2); time.sleep(0.3); os._exit(7)"
    finished = run_bounded(
        [sys.executable, "-c", program], timeout_s=WAIT_S, environment={}, on_wait=lambda: None
    )
    assert (finished.exit_code, finished.output) == (7, "")


def test_programs_run_without_a_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a read-only root."""
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/proc/none"])
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(FileNotFoundError):
        tempfile.gettempdir()
    finished = run_bounded(
        [sys.executable, "-c", "print(1)"], timeout_s=WAIT_S, environment={}, on_wait=lambda: None
    )
    assert finished.output == "1\n"
