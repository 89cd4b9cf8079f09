"""`mesh replay` against a cell whose engine follows a script: what it sends, shows and keeps."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh.cli.replay_view import LINES_BESIDE, ReplayView
from mesh_workloads.reading import read
from tests.cli.conftest import RunningCell
from tests.cli.running import Ran
from tests.evaluation.replay.made import PLAN, RESULTS

NAMES = ("replay-a", "replay-b")
ROWS = [(0.1 * n, n % 3, 20 + n, 2 + n % 4) for n in range(24)]


@pytest.fixture(scope="module")
def deployed(cell: RunningCell) -> Iterator[RunningCell]:
    for name in NAMES:
        slo = "slo: {ttft_s: 60.0, tpot_s: 10.0}"
        assert cell.mesh("deploy", "-", stdin=cell.manifest(name, slo)).code == 0
    yield cell
    assert cell.mesh("delete", *NAMES).code == 0


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.csv"
    lines = [",".join(map(str, row)) for row in ROWS]
    path.write_text("\n".join(["t_s,function,input_tokens,output_tokens", *lines]) + "\n")
    return path


def replay(cell: RunningCell, *arguments: str | Path) -> Ran:
    return cell.mesh("replay", *map(str, arguments), "--deployments", ",".join(NAMES))


def test_every_call_is_sent_and_told(deployed: RunningCell, trace: Path, tmp_path: Path) -> None:
    record, report = tmp_path / "record.csv", tmp_path / "report.html"
    ran = replay(
        deployed, trace, "--map", "popularity", "--record", record, "--report", report, "-o", "json"
    )
    assert ran.code == 0, ran.err
    made = json.loads(ran.out)
    assert (made["planned"], made["errors"], made["attainment"]) == (24, 0.0, 1.0)
    assert made["counts_difference"] == 0.0
    whole, first, second = made["numbers"]
    assert (whole["calls"], first["calls"], second["calls"]) == (24, 16, 8)
    assert whole["input_tokens"] == sum(row[2] for row in ROWS)
    assert whole["output_tokens"] == sum(row[3] for row in ROWS)
    kept = read(record)
    assert sorted((a.input_tokens, a.output_tokens) for a in kept.arrivals) == sorted(
        row[2:] for row in ROWS
    )
    assert "Replay of small" in report.read_text()
    assert f"the report is in {report}" in ran.err


def test_a_record_replays_as_its_run(deployed: RunningCell, trace: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.csv", tmp_path / "second.csv"
    assert replay(deployed, trace, "--record", first, "--time-scale", "0.5").code == 0
    assert replay(deployed, first, "--record", second).code == 0

    def sent(path: Path) -> list[tuple[str, ...]]:
        columns = ("t_s", "function", "input_tokens", "output_tokens", "deployment")
        with path.open() as file:
            return sorted(tuple(row[c] for c in columns) for row in csv.DictReader(file))

    assert sent(first) == sent(second)


def test_the_tables_are_for_people(deployed: RunningCell, trace: Path) -> None:
    ran = replay(deployed, trace, "--duration", "1", "--simulate", "--map", "popularity")
    if ran.code == 2:
        pytest.fail(ran.err)
    assert ran.code == 0, ran.err
    heads = [line.split()[0] for line in ran.out.splitlines() if line]
    assert heads[:4] == ["DEPLOYMENT", "all", *NAMES]
    assert "Beside a simulation" in ran.out
    assert "The controller's own counts" in ran.out
    assert "small: 10 calls of 3 functions within 1 s" in ran.err


def test_a_generated_trace_and_a_file_of_options(deployed: RunningCell, tmp_path: Path) -> None:
    config = tmp_path / "replay.toml"
    config.write_text("generate = 8.0\nduration = 2\ntokens_scale = 0.02\nseed = 4\n")
    ran = replay(deployed, "--config", config, "-o", "json")
    assert ran.code == 0, ran.err
    made = json.loads(ran.out)
    assert made["trace"] == "generated"
    assert made["duration_s"] == 2.0
    assert all(each["calls"] for each in made["numbers"])
    shorter = json.loads(replay(deployed, "--config", config, "--duration", "1", "-o", "json").out)
    assert shorter["duration_s"] == 1.0


def test_functions_are_sampled(deployed: RunningCell, trace: Path) -> None:
    whole, part = (
        json.loads(replay(deployed, trace, *more, "--time-scale", "0.1", "-o", "json").out)
        for more in ((), ("--functions", "32"))
    )
    # Functions 0 and 1 of every eight.
    assert (whole["planned"], part["planned"]) == (24, 16)


def test_the_workload_of_a_scenario_is_a_trace(deployed: RunningCell) -> None:
    scenario = Path("workloads/small_cpu_cell.toml")
    arguments = ("--rate-scale", "0.1", "--time-scale", "0.002", "--tokens-scale", "0.01")
    ran = replay(deployed, scenario, *arguments, "-o", "json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["trace"] == "serverless"


def test_one_call_too_many_makes_it_fail(deployed: RunningCell, trace: Path) -> None:
    ran = replay(deployed, trace, "--time-scale", "0.001", "--open-max", "1")
    assert ran.code == 1
    error, hint = ran.err.splitlines()[-2:]
    assert error.startswith("error: ")
    assert "of 24 calls failed: not_sent" in error
    assert "raise --open-max" in hint


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "there is no trace"),
        (("{trace}", "--generate", "1"), 2, "a trace and --generate"),
        (("--generate", "1", "--start", "5"), 2, "what is generated has no --start"),
        (("--generate", "1", "--duration", "0"), 2, "0.0 is not in the range"),
        (("nowhere.csv",), 1, "there is no file nowhere.csv"),
        (("{trace}", "--format", "mooncake"), 2, "are of another format than mooncake"),
        (("{trace}", "--format", "parquet"), 2, "there is no trace format 'parquet'"),
        (("{trace}", "--map", "{trace}"), 2, "are not function,deployment"),
        (("{trace}", "--start", "900"), 2, "has no arrivals from 900 s"),
        (("{trace}", "--time-scale", "0"), 2, "0.0 is not in the range"),
        (("{trace}", "--config", "nowhere.toml"), 1, "there is no file nowhere.toml"),
        (("{trace}", "--record", "nowhere/r.csv"), 2, "there is no folder 'nowhere'"),
    ],
)
def test_what_cannot_be_meant_is_said_in_two_lines(
    deployed: RunningCell, trace: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    ran = replay(deployed, *(a.format(trace=trace) for a in arguments))
    assert ran.code == code, ran.err
    error, hint = ran.err.splitlines()[-2:]
    assert said in error
    assert hint.startswith("hint: ")


def test_what_is_unknown_is_named(deployed: RunningCell, trace: Path, tmp_path: Path) -> None:
    ran = deployed.mesh("replay", str(trace), "--deployments", "nil,replay-a,void")
    assert ran.code == 1
    assert "2 of the 3 deployments asked for are not in the cell: nil, void" in ran.err
    table = tmp_path / "table.csv"
    table.write_text("function,deployment\n0,replay-a\n7,replay-b\n*,replay-b\n")
    ran = replay(deployed, trace, "--map", table)
    assert ran.code == 2
    assert "functions in the table that trace small does not call in this window: 7" in ran.err


def test_unknown_options_are_named(deployed: RunningCell, trace: Path, tmp_path: Path) -> None:
    config = tmp_path / "replay.toml"
    config.write_text("rate_scal = 2.0\n")
    ran = replay(deployed, trace, "--config", config)
    assert ran.code == 2
    assert "there is no option rate_scal" in ran.err
    config.write_text("rate_scale = \n")
    ran = replay(deployed, trace, "--config", config)
    assert ran.code == 2
    assert "replay.toml: not TOML" in ran.err


def shown(view: ReplayView, height: int = 40) -> list[str]:
    return [line.plain for line in view.picture(height)]


def test_it_says_what_is_due_open_and_ended() -> None:
    view = ReplayView(PLAN)
    for result in RESULTS[:5]:
        view.ended(result)
    view.at(5.5)
    bar, heads, whole, *each = shown(view)
    assert "6 of 10 s, 5 of 9 calls ended" in bar
    assert heads.split()[0] == "DEPLOYMENT"
    # Due 6, open 1, finished 4, refused 1, failed 0, met 2 of 5.
    assert whole.split() == ["all", "6", "1", "4", "1", "0", "40.0", "1.500"]
    assert [line.split()[0] for line in each] == ["chat", "code"]


def test_it_fits_on_the_screen_and_begins_with_nothing() -> None:
    view = ReplayView(PLAN)
    assert len(shown(view, LINES_BESIDE + 2)) == 4
    view.at(-0.5)
    assert "0 of 10 s, 0 of 9 calls ended" in shown(view)[0]
