"""Locust replays traces against live cells: distributed, interrupted, with a cell that goes away,
with its page, and with input that cannot be meant.
"""

import csv
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mesh.domain.slo import Slo
from mesh_load import LOCUSTFILE
from tests.e2e.live_cell import LiveCell, Process, free_port

RUN_S_MAX = 90.0
SLO = Slo(ttft_s=5.0, tpot_s=1.0)


class Locust:
    """A run of locust in a process group of its own, with its files in `folder`."""

    def __init__(self, folder: Path, address: str, *arguments: str) -> None:
        self.folder, port = folder, str(free_port())
        self._popen = subprocess.Popen(
            [
                *(sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", address),
                # Tests beside this one have masters, too.
                *("--master-bind-port", port, "--master-port", port),
                *("--only-summary", "--report", "r.html", "--record", "r.csv"),
                *("--json-file", "r", "--csv", "r", *arguments),
            ],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.said = ""

    def wait(self) -> int:
        """Its exit code; nothing of it is left then."""
        try:
            self.said, _ = self._popen.communicate(timeout=RUN_S_MAX)
        finally:
            if self._popen.poll() is None:
                os.killpg(self._popen.pid, signal.SIGKILL)
        return self._popen.returncode

    def interrupt(self) -> None:
        """As Ctrl-C does: all of its processes."""
        os.killpg(self._popen.pid, signal.SIGINT)

    def sent(self) -> int:
        """Calls that have ended so far."""
        record = self.folder / "r.csv"
        return max(record.read_text().count("\n") - 1, 0) if record.exists() else 0

    def figures(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "r_slo.json").read_text())
        return found

    def record(self) -> list[dict[str, str]]:
        with (self.folder / "r.csv").open() as file:
            return list(csv.DictReader(file))


def serving(cell: LiveCell, model: Path, *names: str, http: str = "off") -> Process:
    """Deployments of these names, loaded; the controller's process."""
    controller = cell.start_controller("--http", http)
    cell.start_node("n1", "--step-s", "0.005")
    for name in names:
        cell.deploy(name, model, slo=SLO)
        cell.warm(name)
    return controller


Row = tuple[float, int, int, int]
"""When, which function, tokens in and out."""


def trace(folder: Path, rows: Sequence[Row]) -> str:
    path = folder / "trace.csv"
    lines = [
        f"{at_s:.3f},{function},{inputs},{outputs}" for at_s, function, inputs, outputs in rows
    ]
    path.write_text("\n".join(["t_s,function,input_tokens,output_tokens", *lines]) + "\n")
    return str(path)


def steady(
    seconds: float, rate_per_s: float, functions: int = 2
) -> list[tuple[float, int, int, int]]:
    count = int(seconds * rate_per_s)
    return [(n / rate_per_s, n % functions, 10 + n % 7, 1 + n % 9) for n in range(count)]


def test_workers_send_the_whole_trace_and_all_agree_on_what_came(
    cell: LiveCell, tiny_model: Path, tmp_path: Path
) -> None:
    http = f"127.0.0.1:{free_port()}"
    serving(cell, tiny_model, "one", "two", http=http)
    rows = steady(2.0, 20.0)
    options = ("--map", "popularity", "--http", http, "--trace", trace(tmp_path, rows))
    locust = Locust(tmp_path, cell.address, "--headless", "--processes", "2", *options)
    assert locust.wait() == 0, locust.said
    found = locust.figures()
    assert (found["planned"], found["stopped"], found["errors"]) == (40, False, 0.0)
    assert found["counts_difference"] == 0.0
    by_name = {one["deployment"]: one for one in found["numbers"]}
    assert {name: one["finished"] for name, one in by_name.items()} == {
        "all": 40,
        "one": 20,
        "two": 20,
    }
    assert by_name["all"]["output_tokens"] == sum(outputs for *_, outputs in rows)
    assert [worker["ended"] for worker in found["workers"]] == [20, 20]
    recorded = sorted(
        (float(row["t_s"]), int(row["input_tokens"]), int(row["tokens"])) for row in locust.record()
    )
    assert recorded == [(at_s, inputs, outputs) for at_s, _, inputs, outputs in rows]
    stats = {
        (one["name"], one["method"]): one for one in json.loads((tmp_path / "r.json").read_text())
    }
    for name in ("one", "two"):
        for kind in ("call", "TTFT", "SLO mean", "SLO each"):
            assert stats[name, kind]["num_requests"] == 20, (name, kind)
    assert "SLO_MEAN_%" in locust.said
    assert "the report is in r.html" in locust.said
    assert "<svg" in (tmp_path / "r.html").read_text()


def test_ctrl_c_writes_down_what_was_sent(cell: LiveCell, tiny_model: Path, tmp_path: Path) -> None:
    serving(cell, tiny_model, "one")
    path = trace(tmp_path, steady(60.0, 10.0))
    locust = Locust(tmp_path, cell.address, "--headless", "--processes", "2", "--trace", path)
    cell.wait_for("calls that ended", lambda: locust.sent() >= 5, RUN_S_MAX)
    locust.interrupt()
    assert locust.wait() == 1, locust.said
    found = locust.figures()
    assert found["stopped"]
    ended = found["numbers"][0]["calls"]
    assert 5 <= ended < 600
    assert len(locust.record()) == ended
    assert f"Stopped early: {600 - ended} of 600 calls were not due yet." in locust.said
    assert (tmp_path / "r.html").exists()


def test_a_cell_that_is_away_is_counted(cell: LiveCell, tiny_model: Path, tmp_path: Path) -> None:
    controller = serving(cell, tiny_model, "one")
    locust = Locust(
        tmp_path, cell.address, "--headless", "--trace", trace(tmp_path, steady(10.0, 10.0))
    )
    cell.wait_for("calls that ended", lambda: locust.sent() >= 5, RUN_S_MAX)
    controller.kill()
    cell.wait_for("calls that failed", lambda: ",failed," in (tmp_path / "r.csv").read_text())
    cell.start_controller()
    back = locust.sent()
    assert locust.wait() == 1, locust.said
    found = locust.figures()
    failed = dict(found["numbers"][0]["failed"])
    assert set(failed) == {"unavailable"}
    assert found["numbers"][0]["calls"] == 100
    ends = [row["end"] for row in sorted(locust.record(), key=lambda row: float(row["t_s"]))]
    assert ends[-1] == "length"
    assert back < 100
    assert "The controller began anew meanwhile" in locust.said
    assert f"calls failed: unavailable {failed['unavailable']}" in locust.said


def test_the_page_starts_and_shows_a_run(cell: LiveCell, tiny_model: Path, tmp_path: Path) -> None:
    serving(cell, tiny_model, "one")
    url = f"http://127.0.0.1:{free_port()}"
    path = trace(tmp_path, steady(1.5, 20.0))
    locust = Locust(tmp_path, cell.address, "--trace", path, "--web-port", url.rpartition(":")[2])

    def get(page: str) -> bytes:
        try:
            with urllib.request.urlopen(f"{url}{page}", timeout=10.0) as answer:
                body: bytes = answer.read()
                return body
        except OSError:
            return b""

    def shown() -> dict[str, Any] | None:
        stats = json.loads(get("/stats/requests") or "{}")
        tabs = {tab["key"]: tab["data"] for tab in stats.get("extended_stats", [])}
        return tabs if tabs.get("slo") and tabs["slo"][0]["finished"] == 30 else None

    page = cell.wait_for("the page", lambda: get("/"), RUN_S_MAX)
    assert b'"key": "slo"' in page
    urllib.request.urlopen(f"{url}/swarm", data=b"", timeout=10.0).close()
    tabs = cell.wait_for("the whole run in its table", shown, RUN_S_MAX)
    assert [row["deployment"] for row in tabs["slo"]] == ["all", "one"]
    assert tabs["workers"][0]["calls"] == 30
    assert get("/mesh/slo.csv").decode().splitlines()[1].startswith("all,30,30,")
    assert json.loads(get("/mesh/slo.json"))["planned"] == 30
    cell.wait_for("the report", (tmp_path / "r_slo.json").exists, RUN_S_MAX)
    locust.interrupt()
    assert locust.wait() == 0, locust.said


def test_wrong_input_ends_in_two_lines(cell: LiveCell, tiny_model: Path, tmp_path: Path) -> None:
    serving(cell, tiny_model, "one")
    torn = tmp_path / "torn.csv"
    torn.write_text("t_s,function,input_tokens,output_tokens\n0.5,1,10,5\n0.7,1,-3,5\n")
    whole = trace(tmp_path, steady(2.0, 1.0))
    cases = (
        (("--trace", str(torn)), f"error: {torn}:3:"),
        (("--trace", whole, "--deployments", "other"), "not in the cell: other"),
    )
    runs = [Locust(tmp_path, cell.address, "--headless", *arguments) for arguments, _ in cases]
    for run, (_, expected) in zip(runs, cases, strict=True):
        assert run.wait() in (1, 2), run.said
        assert expected in run.said
        assert "hint: " in run.said
        assert "Traceback" not in run.said
