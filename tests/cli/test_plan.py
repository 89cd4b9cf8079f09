"""`mesh plan` against a real cell: plans, what it refuses, and what it applies."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh.cli.verbs.plan import calls_of
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName
from mesh.domain.views import InstancePlan
from mesh.evaluation.replaying import outcomes_of
from mesh.wire.client import MeshClient
from tests.cli.conftest import RunningCell
from tests.cli.running import mesh

CALLS = ("--rate", "0.01", "--lengths", "16,32:8")


@pytest.fixture(scope="module")
def measured(cell: RunningCell) -> Iterator[str]:
    """A deployment whose weights are held as no other test holds them, whose profile would hold for
    it.
    """
    deploy(cell, 256)
    yield "planned"
    cell.mesh("delete", "planned")


def deploy(cell: RunningCell, context_tokens_max: int) -> None:
    lines = (
        *(f"context_tokens_max: {context_tokens_max}", "weights: i8"),
        *("slo: {ttft_s: 30, tpot_s: 5}", "scaling: {plan: {}}"),
    )
    assert cell.mesh("deploy", "-", stdin=cell.manifest("planned", *lines)).code == 0


def test_a_plan_is_told_and_applied_by_the_path_of_scale(
    cell: RunningCell, measured: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = cell.mesh("plan", measured, *CALLS)
    assert ran.code == 2
    assert "no iteration of 'planned' has been measured" in ran.error_lines[0]
    assert "run `mesh profile planned`" in ran.error_lines[1]
    assert cell.mesh("profile", measured).code == 0
    ran = cell.mesh("plan", measured, *CALLS, "--apply", "-o", "json")
    assert ran.code == 0, ran.err
    made = json.loads(ran.out)
    assert (made["replicas"], made["nodes"], made["lacks"]) == (1, ["cpu0"], "")
    assert 0 < made["ttft_s"] < 30
    assert 0 < made["utilisation"] < 0.8
    assert "whole models: no engine of mesh runs single operators" in made["granularity"]
    assert "it saved no device" in made["granularity"]
    assert ran.err == "planned: keeps 1 instances loaded\n"
    spec = json.loads(cell.mesh("get", measured, "-o", "json").out)["spec"]
    assert spec["scaling"]["replicas_min"] == 1
    table = cell.mesh("plan", measured, *CALLS).out
    assert "calls        0.01 calls a second with 24 tokens each, answers of 8" in table
    assert "planned: 0 (no call within 10 s)" in cell.mesh("status").out
    assert "planned" in cell.mesh("describe", measured).out
    planned = MeshClient.plan

    def changed_meanwhile(client: MeshClient, *asked: Any) -> InstancePlan:
        made = planned(client, *asked)
        deploy(cell, 128)
        return made

    monkeypatch.setattr(MeshClient, "plan", changed_meanwhile)
    ran = cell.mesh("plan", measured, *CALLS, "--apply")
    assert ran.code == 2
    assert "its newest revision is 2, the plan was made for 1" in ran.err


def test_what_cannot_be_planned_is_said(cell: RunningCell, measured: str) -> None:
    cell.mesh("profile", measured)
    for asked, said in (
        ((), "has had no call within 300 s"),
        (("--rate", "0", "--lengths", "16:8"), "the rate is 0 a second"),
        (("--rate", "1e9", "--lengths", "16:8"), "calls a second are above the"),
        (("--rate", "1", "--lengths", "16"), "'16' is not such as 128,1024:64"),
        (("--rate", "1"), "give --rate and --lengths together"),
        (("--rate", "1", "--lengths", "999:8"), "a prompt has 999 tokens; the context of"),
    ):
        ran = cell.mesh("plan", measured, *asked)
        assert (ran.code, said in ran.err) == (2, True), ran.err
    ran = cell.mesh("plan", "nobody", *CALLS)
    assert (ran.code, "no deployment 'nobody'" in ran.err) == (1, True)


def test_a_journal_tells_the_calls_and_one_without_ended_calls_is_refused(tmp_path: Path) -> None:
    scenario = tmp_path / "small.toml"
    scenario.write_text(
        """
        nodes = [{ name = "cpu", device = "cpu", memory_gib = 34 }]
        deployments = [{ name = "chat", model = "llama-3.2-3b" }]
        [workload]
        duration_s = 40
        requests_per_s = 0.5
        input_tokens = [100, 200]
        output_tokens = [4, 8]
        """
    )
    journal = tmp_path / "journal"
    assert mesh("sim", str(scenario), "--journal", str(journal)).code == 0
    calls = calls_of(journal, DeploymentName("chat"))
    assert 0.2 < calls.rate_per_s < 1.0
    assert all(100 <= tokens <= 200 for tokens in calls.prompts)
    assert 4 <= calls.answer_tokens <= 8
    with pytest.raises(InvalidInput, match="has 0 ended calls of 'other', of which 0 were"):
        calls_of(journal, DeploymentName("other"))


def test_answers_that_an_earlier_controller_began_count_whole(tmp_path: Path) -> None:
    scenario = tmp_path / "killed.toml"
    scenario.write_text(
        """
        seed = 1
        nodes = [{ name = "gpu", device = "gpu", memory_gib = 40 }]
        deployments = [{ name = "chat", model = "llama-3.2-3b" }]
        [workload]
        duration_s = 60
        requests_per_s = 1.0
        input_tokens = [100, 200]
        output_tokens = [300, 300]
        [faults]
        until_s = 50
        per_minute = { kill_controller = 6 }
        """
    )
    assert mesh("sim", str(scenario), "--journal", str(tmp_path / "journal")).code == 0
    journals = sorted(tmp_path.glob("journal-*"))
    resumed = [each for path in journals for each in outcomes_of(path) if each.earlier_tokens]
    whole = [each.earlier_tokens + len(each.tokens_s) for each in resumed if each.finished]
    assert {*whole} == {300}
    for journal in journals:
        if sum(each.finished for each in outcomes_of(journal)) > 1:
            assert calls_of(journal, DeploymentName("chat")).answer_tokens == 300
