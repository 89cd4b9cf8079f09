"""`mesh sim`: its numbers, its forms and its failures."""

import json
import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.cli.verbs.sim import Journals
from mesh.domain.limits import NodeLimits
from mesh.runtime.journal import ControllerStart, NodeStart, open_journal, read_journal
from mesh.sim.scenario import plan, read_scenario
from tests.cli.running import mesh
from tests.sim.scenarios import SMALL


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return str(path)


def test_the_numbers_of_a_run_are_shown(scenario: str) -> None:
    ran = mesh("sim", scenario)
    assert ran.code == 0, ran.err
    names = [line.split("  ")[0] for line in ran.out.splitlines()]
    assert names[:4] == ["policy", "seed", "requests", "SLO met, every token"]
    assert "gpu nodes in use" in names
    assert "NODE" in ran.out
    assert "gpu-2" in ran.out


def test_json_has_all_of_it_and_follows_from_the_seed(scenario: str) -> None:
    first, again, other = (
        json.loads(mesh("sim", scenario, "-o", "json", "--seed", seed).out)
        for seed in ("7", "7", "8")
    )
    for made in (first, again, other):
        assert made.pop("wall_s") > 0
    assert first == again
    assert first["requests"] != other["requests"]
    assert (first["policy"], first["seed"]) == ("llm-mesh", 7)
    assert first["requests"]["met"] <= first["requests"]["finished"]
    assert len(first["nodes"]) == 3


def test_attainment_is_told_by_class_where_requests_have_classes(scenario: str) -> None:
    mix = ("--slo-mix", "1.0:0.4,best:0.3,0.25:0.3")
    told = json.loads(mesh("sim", scenario, *mix, "-o", "json").out)["requests"]
    assert list(told["by_class"]) == ["tpot-1000ms", "tpot-250ms", "best"]
    for count in ("requests", "finished", "met", "met_in_the_mean"):
        assert sum(of[count] for of in told["by_class"].values()) == told[count]
    shown = mesh("sim", scenario, *mix).out
    for name, of in told["by_class"].items():
        assert re.search(rf"class {name} +{of['requests']} requests; met: every token", shown)
    for plain in (mesh("sim", scenario), mesh("sim", scenario, "-o", "json")):
        assert "class" not in plain.out


TIMERS = """
prefetch_compared_from_s = 300
[[nodes]]
name = "gpu"
device = "gpu"
memory_gib = 17
prefetch_gib = 8
costs = { load_bytes_per_s = 6.5e9 }
[[deployments]]
name = "timer"
count = 3
model = "llama-3.2-3b"
context_tokens_max = 512
scaling = { keep_alive_s = 1.0 }
[workload]
kind = "trace"
file = "timers.csv"
"""
"""Memory for two of three models."""


def test_timers_are_loaded_before_they_are_due_and_the_report_says_what_that_is_worth(
    tmp_path: Path,
) -> None:
    calls = sorted((100.0 * n + 30.0 * of + 1.0, of) for n in range(20) for of in range(3))
    rows = "".join(f"{at_s},{of},32,4\n" for at_s, of in calls)
    (tmp_path / "timers.csv").write_text("t_s,function,input_tokens,output_tokens\n" + rows)
    (tmp_path / "timers.toml").write_text(TIMERS)
    made = json.loads(mesh("sim", str(tmp_path / "timers.toml"), "-o", "json").out)
    assert made["requests"]["finished"] == len(calls)
    assert made["prefetches"]["used"] > 0
    assert made["cold_felt"] < made["prefetches"]["felt"], "what came before is not in it"
    assert made["cold_felt_ratio"] <= 0.2
    assert made["bytes_ratio"] <= 1.05


def test_ideal_costs_and_what_callers_take_change_the_run(scenario: str) -> None:
    usual, ideal, few = (
        json.loads(mesh("sim", scenario, "-o", "json", *more).out)
        for more in ((), ("--ideal",), ("--output-tokens-max", "3"))
    )
    assert usual["requests"] != ideal["requests"]
    assert few["requests"]["output_tokens"] <= 3 * few["requests"]["requests"]
    assert all(node["used_share"] == node["busy_share"] for node in ideal["nodes"])
    assert any(node["used_share"] > node["busy_share"] for node in usual["nodes"])


def test_refusals_are_looked_at_when_asked(scenario: str) -> None:
    made = json.loads(mesh("sim", scenario, "--check-refusals", "-o", "json").out)
    refused = made["requests"]["requests"] - made["requests"]["finished"]
    assert made["refusals"]["reasons_drawn"] <= refused
    assert json.loads(mesh("sim", scenario, "-o", "json").out)["refusals"] is None
    assert "beside a free link" in mesh("sim", scenario, "--check-refusals").out


def test_the_policy_asked_for_is_run_and_in_the_journal(scenario: str, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    ran = mesh("sim", scenario, "--policy", "fcfs", "--journal", str(journal), "-o", "json")
    assert json.loads(ran.out)["policy"] == "fcfs"
    start, decisions = read_journal(journal)
    assert isinstance(start, ControllerStart)
    assert start.policy == "fcfs"
    assert sum(1 for _ in decisions) > 10


def test_the_journals_of_controllers_that_follow_are_numbered_by_start(
    scenario: str, tmp_path: Path
) -> None:
    """Whatever their epochs are, which count seconds where there is a lease."""
    start = plan(read_scenario(Path(scenario))).start()
    with ExitStack() as opened:
        journals = Journals(tmp_path / "j.jsonl", opened)
        for epoch in (1, 37, 12):
            journals.started(replace(start, epoch=epoch))
    found = [read_journal(tmp_path / name)[0] for name in ("j.jsonl", "j-2.jsonl", "j-3.jsonl")]
    assert [one.epoch for one in found if isinstance(one, ControllerStart)] == [1, 37, 12]


@pytest.fixture
def calls(tmp_path: Path) -> str:
    path = tmp_path / "calls.csv"
    lines = "".join(f"{n}.5,{n % 7},{100 + n},5\n" for n in range(20))
    path.write_text("t_s,function,input_tokens,output_tokens\n" + lines)
    return str(path)


def test_a_trace_takes_the_place_of_the_workload_and_its_functions_that_of_the_deployments(
    scenario: str, calls: str, tmp_path: Path
) -> None:
    one = tmp_path / "one.toml"
    text = Path(scenario).read_text()
    second = text.index("[[deployments]]", text.index("[[deployments]]") + 1)
    one.write_text(text[:second] + text[text.index("[workload]") :])
    journal = tmp_path / "journal"
    ran = mesh("sim", str(one), "--trace", calls, "--journal", str(journal), "-o", "json")
    assert ran.code == 0, ran.err
    made = json.loads(ran.out)
    assert made["requests"]["requests"] == 20
    assert made["requests"]["output_tokens"] == 100
    start, _ = read_journal(journal)
    assert isinstance(start, ControllerStart)
    assert len(start.deployments) == 7


def test_a_trace_is_cut_at_the_duration(tmp_path: Path, calls: str) -> None:
    text = SMALL.replace("count = 3", "count = 6")
    (tmp_path / "small.toml").write_text(text)
    where = str(tmp_path / "small.toml")
    ran = mesh("sim", where, "--trace", calls, "--duration", "4", "-o", "json")
    assert json.loads(ran.out)["requests"]["requests"] == 4
    assert "requests arrive" in ran.err


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("absent.toml",), 1, "absent.toml"),
        (("--policy", "best"), 2, "best"),
        (("--functions", "32"), 2, "scenario has none"),
        (("--functions", "33"), 2, "33"),
        (("--duration", "0"), 2, "0"),
        (("--trace", "absent.csv"), 1, "absent.csv"),
        (("--trace", __file__), 2, "no known trace format"),
    ],
)
def test_errors_are_told(scenario: str, arguments: tuple[str, ...], code: int, named: str) -> None:
    where = arguments if arguments[0].endswith("toml") else (scenario, *arguments)
    ran = mesh("sim", *where)
    assert ran.code == code
    *said, error, hint = ran.err.splitlines()
    assert error.startswith("error: ")
    assert named in error
    assert hint.startswith("hint: ")
    assert all(": the trace is read" in line for line in said)


def test_a_trace_with_more_functions_than_deployments_is_refused(scenario: str, calls: str) -> None:
    ran = mesh("sim", scenario, "--trace", calls)
    assert ran.code == 2
    assert "calls 7 functions; there are 4 deployments" in ran.err


def test_what_cannot_be_simulated_is_counted(scenario: str, calls: str) -> None:
    with Path(calls).open("a") as file:
        file.write("21.0,1,100,0\n22.0,2,0,5\n")
    text = Path(scenario).read_text()
    Path(scenario).write_text(text.replace("count = 3", "count = 6"))
    ran = mesh("sim", scenario, "--trace", calls, "-o", "json")
    assert "2 requests without a prompt or an answer are left out" in ran.err
    assert json.loads(ran.out)["requests"]["requests"] == 20


def test_a_client_that_went_away_was_not_refused(scenario: str, tmp_path: Path) -> None:
    faulty = tmp_path / "faulty.toml"
    faulty.write_text(SMALL + "[faults]\nuntil_s = 9\nper_minute = { cancel = 60 }\n")
    shown = mesh("sim", str(faulty)).out
    assert "\ncancelled  " in shown
    assert "refused, cancelled" not in shown


def test_a_wrong_scenario_is_a_usage_error_that_names_the_key(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(SMALL.replace("seed = 3", "sead = 3"))
    ran = mesh("sim", str(path))
    assert ran.code == 2
    assert "sead" in ran.error_lines[0]


def test_a_journal_is_decided_again(scenario: str, tmp_path: Path) -> None:
    journal = str(tmp_path / "journal")
    simulated = json.loads(mesh("sim", scenario, "--journal", journal, "-o", "json").out)
    ran = mesh("sim", "--replay", journal)
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[-1].split("  ")[-1] == "as recorded"
    again = json.loads(mesh("sim", "--replay", journal, "-o", "json").out)
    assert again["requests"] == simulated["requests"]
    assert again["other"] is None


def test_a_changed_journal_ends_with_1_and_names_the_line(scenario: str, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    mesh("sim", scenario, "--journal", str(journal))
    lines = journal.read_text().splitlines(keepends=True)
    number = next(n for n, line in enumerate(lines) if n and '"kv_blocks":' in line)
    lines[number] = lines[number].replace('"kv_blocks":', '"kv_blocks":1')
    journal.write_text("".join(lines))
    ran = mesh("sim", "--replay", str(journal))
    assert ran.code == 1
    assert f"first in line {number + 1}" in ran.out
    assert "kv_blocks  1" in ran.out


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        ((), 2, "a scenario is missing"),
        (("x.toml", "--replay", "y"), 2, "neither a scenario"),
        (("--seed", "3", "--replay", "y"), 2, "neither a scenario"),
        (("--replay", "absent"), 2, "absent"),
        (("--replay", __file__), 2, "no journal"),
    ],
)
def test_a_wrong_replay_is_told(arguments: tuple[str, ...], code: int, named: str) -> None:
    ran = mesh("sim", *arguments)
    assert ran.code == code
    assert named in ran.error_lines[0]
    assert ran.out == ""


def test_the_page_takes_no_journal_that_it_cannot_show(scenario: str, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    assert mesh("sim", scenario, "--journal", str(whole)).code == 0
    open_journal(tmp_path / "node", NodeStart(version="1", limits=NodeLimits())).close()
    (tmp_path / "other").write_text("<html>")
    (tmp_path / "broken").write_text(whole.read_text() + "no decision\n")
    for name, said in (
        ("absent", "cannot read the journal"),
        ("other", "is no journal"),
        ("broken", "is no decision"),
        ("node", "is the journal of a node"),
    ):
        ran = mesh("page", "--journal", str(tmp_path / name), "--http", "127.0.0.1:0")
        assert (ran.code, ran.out) == (2, "")
        assert said in ran.error_lines[0]
    for listen in ("0.0.0.0:0", "[::]:0", "mesh.example:8071"):
        ran = mesh("page", "--journal", str(whole), "--http", listen)
        assert (ran.code, ran.out) == (2, "")
        assert "without a key" in ran.error_lines[0]
        assert "--open" in ran.error_lines[1]


FAULTS = """
[faults]
until_s = 8
per_minute = { crash = 30, kill_controller = 12, break = 30 }
"""


def test_a_checked_run_says_what_was_looked_at(scenario: str, tmp_path: Path) -> None:
    faulty = tmp_path / "faulty.toml"
    faulty.write_text(SMALL + FAULTS)
    journal = tmp_path / "made.jsonl"
    ran = mesh("sim", str(faulty), "--check", "--journal", str(journal), "-o", "json")
    assert ran.code == 0, ran.err
    made = json.loads(ran.out)
    faults, checks = dict(made["faults"]), dict(made["checks"])
    assert faults["crash"] > 0
    assert checks["decisions"] > 100
    for epoch in range(2, 2 + faults["kill_controller"]):
        start, _ = read_journal(tmp_path / f"made-{epoch}.jsonl")
        assert isinstance(start, ControllerStart)
        assert start.epoch == epoch
    assert "checked, decisions" in mesh("sim", scenario, "--check").out


def test_a_run_that_breaks_a_rule_fails_with_the_command_that_shows_it_again(
    scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.sim.checking.STUCK_S", -1e6)
    ran = mesh("sim", scenario, "--check", "--seed", "7", "--policy", "fcfs")
    assert ran.code == 1
    assert "RuleBroken: requests are stuck" in ran.err
    assert f"mesh sim {scenario} --policy fcfs --check --seed 7" in ran.err
    assert mesh("sim", scenario).code == 0


def test_a_page_has_the_classes_of_a_run_that_has_some(scenario: str, tmp_path: Path) -> None:
    page, kept = tmp_path / "a.html", tmp_path / "a.json"
    asked = ("sim", scenario, "--slo-mix", "0.25:0.5,1.0:0.5", "--html", str(page), "-o", "json")
    kept.write_text(mesh(*asked).out)
    made = json.loads(kept.read_text())
    assert list(made["report"]["by_class"]) == list(made["requests"]["by_class"])
    for name, of in made["requests"]["by_class"].items():
        told = made["report"]["by_class"][name]
        assert (told["calls"], told["met"]) == (of["requests"], of["met"])
    assert "SLO classes" in page.read_text()
    without = mesh("sim", scenario, "--html", str(page), "-o", "json").out
    assert "by_class" not in without
    assert "SLO classes" not in page.read_text()
    mesh("sim", scenario, "--html", str(page), "--beside", str(kept))
    assert "tpot-1000ms" in page.read_text(), "the other run has classes"


def test_a_page_has_the_numbers_of_the_run_and_stands_beside_another(
    scenario: str, tmp_path: Path
) -> None:
    first, both, kept = tmp_path / "a.html", tmp_path / "b.html", tmp_path / "a.json"
    told = mesh("sim", scenario, "--html", str(first), "-o", "json").out
    kept.write_text(told)
    made = json.loads(told)
    whole = made["report"]["calls"][0]
    for field in ("finished", "met", "met_in_the_mean", "output_tokens"):
        assert whole[field] == made["requests"][field]
    assert whole["calls"] == made["requests"]["requests"]
    assert whole["ttft_s"][95] == made["requests"]["ttft_s_p95"]
    assert sum(load["loads"] for load in made["report"]["loads"]) > 0
    assert 1 < len(made["report"]["looks"]) <= 240
    text = first.read_text()
    assert "Nodes and memory over time" in text
    assert not re.search("<script|https?://|<link", text)
    mesh("sim", scenario, "--seed", "8", "--html", str(both), "--beside", str(kept))
    assert "Memory, a" in both.read_text(), "the other is named as its file is"
    kept.write_text("{}")
    ran = mesh("sim", scenario, "--html", str(both), "--beside", str(kept))
    assert ran.code == 2
    assert "holds no report of a cell" in ran.err
