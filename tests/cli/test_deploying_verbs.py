"""Deployments and stored models by the command line, against a real cell."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.cli.spec_changes import changes
from mesh.cli.verbs.deploy import read_file
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName
from mesh.domain.slo import Slo, best_effort
from mesh.manifest.documents import MANIFEST_BYTES_MAX
from mesh_loader.store import ModelStore
from tests.cli.conftest import RunningCell
from tests.cli.running import mesh
from tests.support.tiny_model import write_tiny_llama
from tests.support.waiting import until


def test_scale_changes_only_what_is_given(cell: RunningCell, chat: str) -> None:
    ran = cell.mesh("scale", "chat", "--max", "2", "--keep-alive", "0.5")
    assert (ran.code, ran.err) == (0, "chat: scaled\n")
    (deployment,) = json.loads(cell.mesh("get", "-o", "json").out)
    assert deployment["spec"]["scaling"] == {
        "replicas_min": 0,
        "replicas_max": 2,
        "keep_alive_s": 0.5,
        "plan": None,
    }
    ran = cell.mesh("scale", "chat", "--min", "3")
    assert ran.code == 2
    assert "replicas_max" in ran.error_lines[0]


def test_deploy_waits_for_its_instances_and_delete_takes_them_away(cell: RunningCell) -> None:
    manifest = cell.manifest("warm", "scaling: {replicas_min: 1}")
    ran = cell.mesh("deploy", "-", "--wait", "--timeout", "30", stdin=manifest)
    assert ran.code == 0, ran.err
    assert ran.err.splitlines()[-1] == "warm: ready"
    assert cell.mesh("deploy", "-", "--dry-run", stdin=manifest).out == "warm: unchanged\n"
    (instance,) = json.loads(cell.mesh("get", "warm", "-o", "json").out)["instances"]
    assert instance["state"] == "ready"
    assert instance["instance_id"] in cell.mesh("describe", "warm").out
    status = json.loads(cell.mesh("status", "-o", "json").out)
    assert instance["instance_id"] in [one["instance_id"] for one in status["by_instance"]]
    header, *rows = cell.mesh("status").out.partition("\n\n")[2].splitlines()
    assert header.split()[:2] == ["INSTANCE", "NODE"]
    assert [instance["instance_id"], "cpu0", "ready"] in [row.split()[:3] for row in rows]
    assert cell.mesh("wait", "warm", "--for", "loaded", "--timeout", "5").err == "warm: loaded\n"
    assert cell.mesh("delete", "warm").err == "warm: deleted\n"
    assert cell.mesh("wait", "warm", "--for", "gone", "--timeout", "5").err == "warm: gone\n"
    assert cell.mesh("wait", "warm").code == cell.mesh("get", "warm").code == 1


def test_a_dry_run_says_what_would_happen_and_does_nothing(cell: RunningCell, chat: str) -> None:
    new = cell.manifest("newcomer")
    ran = cell.mesh("deploy", "-", "--dry-run", stdin=new)
    assert (ran.code, ran.out) == (0, "newcomer: new\n")
    assert cell.mesh("get", "newcomer").code == 1
    changed = cell.manifest(chat, "slo: {ttft_s: 0.5}", "devices: [cpu]")
    ran = cell.mesh("deploy", "-", "--dry-run", stdin=changed + b"---\n" + new)
    assert ran.code == 0
    assert ran.out.splitlines()[-1] == "newcomer: new"
    assert f"{chat}: a new revision takes over once it is loaded\n" in ran.out
    assert "  slo.ttft_s: " in ran.out
    assert cell.mesh("deploy", "-", "--wait", "--dry-run", stdin=new).code == 2


def test_revisions_that_differ_in_their_classes_are_told_apart() -> None:
    plain = DeploymentSpec(name=DeploymentName("chat"), source="pkg://a/b.gguf")
    quick, slow = Slo(name="quick", ttft_s=1.0, tpot_s=0.1), Slo(name="slow", ttft_s=9.0)
    one = replace(plain, classes=(quick, slow), class_default="quick", slo=quick)
    other = replace(one, classes=(quick, replace(slow, ttft_s=8.0), best_effort("rest", 60.0)))
    assert [str(change) for change in changes(one, other)] == [
        "classes.slow.ttft_s 9 → 8",
        "classes.rest unset → best effort",
    ]
    assert "classes.slow 9 s, 0.25 s → unset" in map(str, changes(one, plain))


def test_a_rollout_is_shown_and_undone(cell: RunningCell) -> None:
    assert cell.mesh("deploy", "-", stdin=cell.manifest("changing")).code == 0
    assert cell.mesh("rollout", "undo", "changing").code == 1
    slower = cell.manifest("changing", "slo: {ttft_s: 9}")
    ran = cell.mesh("deploy", "-", stdin=slower)
    assert ran.err.splitlines()[-1] == "changing: revision 2 serves"
    header, *rows = cell.mesh("rollout", "status", "changing").out.splitlines()
    columns = ["REVISION", "STATE", "READY", "REQUESTS", "SOURCE", "CHANGES", "MESSAGE"]
    assert header.split() == columns
    changes = [row.split("tiny")[-1].rsplit("-", 1)[0].strip() for row in rows]
    assert changes == ["-", "slo.ttft_s 2 → 9"]
    assert [row.split()[:2] for row in rows] == [["1", "past"], ["2", "serving"]]
    assert cell.mesh("rollout", "undo", "changing").err == "changing: revision 3 serves\n"
    shown = json.loads(cell.mesh("rollout", "status", "changing", "-o", "json").out)
    assert [one["spec"]["slo"]["ttft_s"] for one in shown] == [2.0, 9.0, 2.0]
    assert cell.mesh("delete", "changing").code == 0


def test_an_undo_waits_until_the_earlier_revision_serves_again(cell: RunningCell) -> None:
    """A change that needs other instances is undone; the last line is the state that it
    waited for.
    """
    first = cell.manifest("undone", "scaling: {replicas_min: 1}")
    assert cell.mesh("deploy", "-", "--wait", stdin=first).code == 0
    second = cell.manifest("undone", "scaling: {replicas_min: 1}", "context_tokens_max: 256")
    assert cell.mesh("deploy", "-", "--wait", stdin=second).code == 0
    ran = cell.mesh("rollout", "undo", "undone", "--wait")
    assert ran.code == 0
    assert ran.err.splitlines()[-1] == "undone: revision 3 serves, 1/1 instances ready"
    rows = cell.mesh("rollout", "status", "undone").out.splitlines()[1:]
    assert [row.split()[1] for row in rows if row.split()[1] != "retiring"][-1] == "serving"
    changed = [row.split("tiny")[-1].rsplit("-", 1)[0].strip() for row in rows]
    assert changed == ["-", "context_tokens_max unset → 256", "context_tokens_max 256 → unset"]
    assert cell.mesh("delete", "undone").code == 0


def test_all_are_deployed_though_one_fails_the_command(cell: RunningCell, tmp_path: Path) -> None:
    missing = cell.manifest("broken").replace(b"/tiny", b"/nowhere")
    (tmp_path / "a.yaml").write_bytes(missing + b"---\n" + cell.manifest("good"))
    (tmp_path / "b.yaml").write_bytes(cell.manifest("fine"))
    ran = cell.mesh("deploy", str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml"))
    assert ran.code == 1
    assert ran.err.count("error: ") == ran.err.count("hint: ") == 1
    assert "nowhere" in ran.err
    assert {"good: deployed", "fine: deployed"} <= set(ran.err.splitlines())
    ran = cell.mesh("delete", "good", "broken", "fine")
    assert ran.code == 1
    assert ran.err.count("error: ") == 1
    assert {"good: deleted", "fine: deleted"} <= set(ran.err.splitlines())


def test_a_mistake_in_the_last_file_deploys_nothing(cell: RunningCell, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(cell.manifest("early"))
    (tmp_path / "b.yaml").write_bytes(cell.manifest("late", "slo: {ttft: 2}"))
    ran = cell.mesh("deploy", str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml"))
    assert ran.code == 2
    assert "b.yaml:6: spec.slo.ttft: unknown field" in ran.error_lines[0]
    assert cell.mesh("get", "early").code == 1


@pytest.mark.parametrize(
    ("source", "error"),
    [("ftp://x/y", "ftp"), ("file:///nowhere/at/all", "nowhere"), ("pkg://no-such!/x", "no-such")],
)
def test_a_bad_source_is_two_lines_everywhere(source: str, error: str, cell: RunningCell) -> None:
    manifest = cell.manifest("odd").replace(f"file://{cell.model}".encode(), source.encode())
    ran = cell.mesh("deploy", "-", stdin=manifest)
    assert ran.code in (1, 2)
    failure = [line for line in ran.err.splitlines() if not line.startswith("odd: ")]
    assert len(failure) == 2, ran.err
    assert error in failure[0]
    pulled = cell.mesh("pull", source)
    assert pulled.code == ran.code
    assert error in pulled.err


def test_a_drained_node_takes_nothing_until_that_is_undone(cell: RunningCell, chat: str) -> None:
    ran = cell.mesh("drain", "cpu0", "--wait", "--timeout", "30")
    assert ran.code == 0, ran.err
    assert ran.err.splitlines()[-1] == "cpu0: empty"
    (node,) = json.loads(cell.mesh("nodes", "-o", "json").out)
    assert (node["state"], node["instances"]) == ("draining", [])
    assert cell.mesh("drain", "cpu0", "--undo").err == "cpu0: takes work again\n"
    assert cell.mesh("invoke", "chat", "hi", "--max-tokens", "1").code == 0
    assert cell.mesh("drain", "nobody").code == 1


def test_load_and_unload_come_before_and_after_calls(cell: RunningCell, chat: str) -> None:
    def states() -> list[str]:
        (found,) = json.loads(cell.mesh("get", "-o", "json").out)
        return [instance["state"] for instance in found["instances"]]

    cell.mesh("unload", chat)
    until(lambda: states() == [], 20.0)
    ran = cell.mesh("load", chat)
    assert (ran.code, ran.err) == (0, f"{chat}: loading, or loaded\n")
    until(lambda: states() in (["ready"], ["parked"]), 20.0)
    assert cell.mesh("unload", chat).code == 0
    until(lambda: states() == [], 20.0)
    assert cell.mesh("load", "none").code == 1


def test_pull_imports_once_and_says_where(cell: RunningCell, chat: str) -> None:
    ran = cell.mesh("pull", f"file://{cell.model}", "-o", "json")
    assert ran.code == 0
    pulled = json.loads(ran.out)
    assert (Path(pulled["path"]) / "model.json").is_file()
    assert f"path               {pulled['path']}" in cell.mesh("pull", f"file://{cell.model}").out


def test_store_removes_nothing_that_is_deployed(cell: RunningCell, chat: str) -> None:
    (stored,) = json.loads(cell.mesh("store", "ls", "-o", "json").out)
    verified = cell.mesh("store", "verify", "-o", "json")
    assert (verified.code, json.loads(verified.out)) == (0, [])
    assert json.loads(cell.mesh("store", "gc", "-o", "json").out) == []
    kept = cell.mesh("store", "rm", stored["model_id"])
    assert kept.code == 1
    assert kept.error_lines == (
        f"{stored['model_id']} is deployed as chat",
        "mesh delete chat",
    )
    assert len(json.loads(cell.mesh("store", "ls", "-o", "json").out)) == 1


def test_store_ls_lists_the_others_and_names_the_damaged_one(tmp_path: Path) -> None:
    models = ModelStore(tmp_path / "store")
    for seed in (1, 2):
        models.import_model(f"file://{write_tiny_llama(tmp_path / str(seed), seed=seed)}")
    bad, good = models.folders()
    (bad / "model.json").write_text("{")
    ran = mesh("store", "ls", "--home", str(tmp_path), "-o", "json")
    assert ran.code == 1
    assert [found["model_id"] for found in json.loads(ran.out)] == [good.name]
    assert f"{bad.name} is damaged" in ran.err


def test_store_verify_fails_where_it_names_damage(tmp_path: Path) -> None:
    folder = tmp_path / "store" / "models" / "sha256-0123456789abcdef"
    folder.mkdir(parents=True)
    ran = mesh("store", "verify", "--home", str(tmp_path), "-o", "json")
    assert ran.code == 1
    assert [Path(found["path"]).name for found in json.loads(ran.out)] == [
        "model.json",
        "digests.json",
    ]
    assert "2 damaged in" in ran.err


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"nowhere.yaml: no such file or directory"):
        read_file(str(tmp_path / "nowhere.yaml"))
    with pytest.raises(InvalidInput, match="is a directory"):
        read_file(str(tmp_path))


def test_a_file_without_an_end_is_read_to_its_bound() -> None:
    assert len(read_file("/dev/zero")) == MANIFEST_BYTES_MAX + 1
