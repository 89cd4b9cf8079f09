"""`mesh replay` as users run it: on a cell that goes and comes back, interrupted and killed."""

import json
import signal
import subprocess
from pathlib import Path

from mesh.domain.slo import Slo
from mesh_workloads.reading import read
from tests.cli.running import MESH
from tests.e2e.live_cell import ROOT, LiveCell

RUN_S_MAX = 100.0
CALLS = 80
"""Ten a second: the cell goes amid them, and comes back."""
PATIENT = Slo(ttft_s=60.0, tpot_s=10.0)
"""An SLO that is kept on a machine which is busy with other things."""


def begin(cell: LiveCell, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*MESH, "replay", *arguments, "--controller", cell.address, "-o", "json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_cell_that_goes_away_and_comes_back_is_counted_and_called_again(
    cell: LiveCell, tiny_model: Path, tmp_path: Path
) -> None:
    controller = cell.start_controller()
    cell.start_node("n1")
    cell.deploy("chat", tiny_model, slo=PATIENT)
    trace, record = tmp_path / "even.csv", tmp_path / "record.csv"
    rows = "".join(f"{0.1 * n:.1f},0,20,2\n" for n in range(CALLS))
    trace.write_text(f"t_s,function,input_tokens,output_tokens\n{rows}")
    replay = begin(cell, str(trace), "--record", str(record), "--timeout", "5")
    cell.wait_for("calls to be answered", lambda: _ends(record).count("length") >= 5)
    controller.kill()
    cell.wait_for("calls to fail", lambda: _ends(record).count("failed") >= 5)
    failed_before = len(_ends(record))
    cell.start_controller()
    cell.wait_for(
        "calls to be answered again",
        lambda: _ends(record)[failed_before:].count("length") >= 5,
        RUN_S_MAX,
    )
    out, err = replay.communicate(timeout=RUN_S_MAX)
    assert replay.returncode == 1
    made = json.loads(out)
    whole = made["numbers"][0]
    assert whole["calls"] == CALLS
    not_served = sum(whole["failed"].values()) + sum(whole["refused"].values())
    assert whole["finished"] + not_served == CALLS
    assert set(whole["failed"]) <= {"unavailable", "deadline_exceeded", "not_found", "cancelled"}
    assert made["counts_difference"] is None
    assert "The controller began anew meanwhile" in " ".join(made["remarks"])
    error, hint = err.splitlines()[-2:]
    assert error.startswith(f"error: {sum(whole['failed'].values())} of {CALLS} calls failed: ")
    assert hint.startswith("hint: ")


def test_ctrl_c_and_a_kill_leave_what_was_sent(
    cell: LiveCell, tiny_model: Path, tmp_path: Path
) -> None:
    cell.start_controller()
    cell.start_node("n1")
    cell.deploy("chat", tiny_model, slo=PATIENT)
    for number, how in enumerate((signal.SIGINT, signal.SIGKILL)):
        record, report = tmp_path / f"{number}.csv", tmp_path / f"{number}.html"
        replay = begin(
            cell,
            *("--generate", "20", "--duration", "600", "--tokens-scale", "0.01"),
            *("--record", str(record), "--report", str(report)),
        )
        _wait_ends(cell, record, 5)
        replay.send_signal(how)
        out, err = replay.communicate(timeout=RUN_S_MAX)
        kept = len(read(record).arrivals)
        assert kept >= 5
        if how is signal.SIGKILL:
            continue
        assert replay.returncode == 130, err
        made = json.loads(out)
        assert made["stopped"] is True
        assert made["numbers"][0]["calls"] == kept
        assert report.exists()


def _wait_ends(cell: LiveCell, record: Path, count: int) -> None:
    cell.wait_for("calls to be answered", lambda: len(_ends(record)) >= count, RUN_S_MAX)


def _ends(record: Path) -> list[str]:
    """How calls ended, so far."""
    lines = record.read_text().splitlines()[1:] if record.exists() else []
    return [line.split(",")[6] for line in lines if line.count(",") == 13]
