"""Every verb against a real cell: what it does, what it prints, how it ends."""

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from mesh_loader.store import ModelStore
from tests.cli.conftest import RunningCell
from tests.cli.running import mesh, mesh_process
from tests.support.tiny_model import write_tiny_llama
from tests.support.waiting import until


@pytest.fixture(scope="module")
def chat(cell: RunningCell) -> Iterator[str]:
    """A deployment that most tests only look at."""
    lines = ("context_tokens_max: 256", "slo: {ttft_s: 30, tpot_s: 5}")
    ran = cell.mesh("deploy", "-", stdin=cell.manifest("chat", *lines))
    assert (ran.code, ran.out) == (0, ""), ran.err
    assert ran.err.splitlines()[-1] == "chat: deployed"
    yield "chat"
    assert cell.mesh("delete", "chat").code == 0


def test_get_lists_deployments_in_aligned_columns(cell: RunningCell, chat: str) -> None:
    ran = cell.mesh("get")
    assert (ran.code, ran.err) == (0, "")
    header, *rows = ran.out.splitlines()
    assert header.split()[:4] == ["NAME", "STATE", "READY", "RUNNING"]
    assert [row.split()[:2] for row in rows] == [["chat", "ready"]]
    assert rows[0].split()[-1] == f"file://{cell.model}"
    assert cell.mesh("get", "chat").out == ran.out


def test_get_and_describe_carry_the_whole_deployment_as_json_and_yaml(
    cell: RunningCell, chat: str
) -> None:
    (listed,) = json.loads(cell.mesh("get", "-o", "json").out)
    slo = {"ttft_s": 30.0, "ttft_tokens_per_s": 512.0, "tpot_s": 5.0, "cold_start": "late"}
    assert listed["spec"]["slo"] == slo
    assert listed["context_tokens_max"] == 256
    assert listed["model"]["architecture"] == "llama"
    assert json.loads(cell.mesh("get", "chat", "-o", "json").out)["spec"] == listed["spec"]
    described = cell.mesh("describe", "chat", "-o", "yaml")
    assert yaml.safe_load(described.out)["spec"] == listed["spec"]


def test_describe_shows_limits_and_model(cell: RunningCell, chat: str) -> None:
    ran = cell.mesh("describe", "chat")
    assert (ran.code, ran.err) == (0, "")
    shown = dict(line.split(maxsplit=1) for line in ran.out.partition("\n\n")[0].splitlines())
    assert shown["ttft_slo_s"] == "max(30, prompt tokens / 512)"
    assert shown["layers"] == "2"


def test_describe_shows_a_node_with_its_instances(cell: RunningCell, chat: str) -> None:
    assert cell.mesh("invoke", "chat", "hello", "--max-tokens", "2").code == 0
    ran = cell.mesh("describe", "cpu0")
    assert (ran.code, ran.err) == (0, "")
    *of_node, loads, shapes, a, b, c, d = [part.split()[0] for part in ran.out.split("\n\n")]
    assert (of_node, loads, shapes) == (["NODE"] * 2, "LOADS_FROM", "SHAPE")
    assert {a, b, c, d} == {"INSTANCE"}
    assert "STALLS  LONGEST_S  LAST_AGO_S" in ran.out
    found = json.loads(cell.mesh("describe", "cpu0", "-o", "json").out)
    assert found["node_id"] == "cpu0"
    (instance,) = [i for i in found["instances"] if i["deployment"] == "chat"]
    assert instance["correction_planned"] > 0
    assert sorted(instance["stalls"]) == ["ago_s", "count", "longest_s"]
    (footprint,) = found["footprints"].values()
    assert footprint["weights_bytes"] == instance["weights_bytes"]
    (times,) = found["load_times"]
    assert times["tier"] == "disk"
    assert times["loads"] >= 1
    assert min(times["fixed_s"], times["bytes_per_s"]) > 0
    assert cell.mesh("describe", "cpu1").code == 1


def test_models_names_each_model_once_with_its_deployments(cell: RunningCell, chat: str) -> None:
    (model,) = json.loads(cell.mesh("models", "-o", "json").out)
    assert model["deployments"] == ["chat"]
    (stored,) = json.loads(cell.mesh("store", "ls", "-o", "json").out)
    assert stored["model_id"] == model["model_id"]
    assert model["model_id"] in cell.mesh("models").out


def test_pull_imports_once_and_says_where(cell: RunningCell, chat: str) -> None:
    ran = cell.mesh("pull", f"file://{cell.model}", "-o", "json")
    assert ran.code == 0
    pulled = json.loads(ran.out)
    assert (Path(pulled["path"]) / "model.json").is_file()
    assert f"path               {pulled['path']}" in cell.mesh("pull", f"file://{cell.model}").out


def test_store_checks_and_clears_but_removes_nothing_that_is_deployed(
    cell: RunningCell, chat: str
) -> None:
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


def test_nodes_and_status_tell_what_there_is(cell: RunningCell, chat: str) -> None:
    (node,) = json.loads(cell.mesh("nodes", "-o", "json").out)
    assert (node["node_id"], node["state"], node["device"]) == ("cpu0", "ready", "cpu")
    assert node["tracked_bytes"] <= node["promised_bytes"] <= node["memory_bytes"]
    kinds, _, books = cell.mesh("nodes").out.partition("\n\n")
    assert kinds.splitlines()[1].split()[:3] == ["cpu0", "ready", "cpu"]
    header, (name, limit_mib, *_) = (line.split() for line in books.splitlines())
    assert header[:2] == ["NODE", "LIMIT_MIB"]
    assert (name, limit_mib) == ("cpu0", f"{node['memory_bytes'] / 2**20:.1f}")
    status = json.loads(cell.mesh("status", "-o", "json").out)
    assert (status["nodes_ready"], status["nodes"], status["deployments"]) == (1, 1, 1)
    assert status["prefetches"]["hit_rate"] == status["prefetches"]["used"] == 0
    numbers = cell.mesh("status").out.partition("\n\n")[0]
    shown = dict(line.split(maxsplit=1) for line in numbers.splitlines())
    assert shown["nodes_ready"] == "1 of 1"
    assert shown["controller"] == cell.address
    assert shown["prefetches"].startswith("0 begun, 0 used, 0 wasted")
    assert shown["state_path"].startswith(str(cell.home))


def test_invoke_prints_the_same_answer_in_every_form(cell: RunningCell, chat: str) -> None:
    asked = ("invoke", "chat", "Tell me", "--max-tokens", "12", "--seed", "1")
    whole = cell.mesh(*asked, "--no-stream")
    streamed = cell.mesh(*asked)
    assert (streamed.code, streamed.err) == (0, "")
    assert whole.out == streamed.out
    ran = cell.mesh(*asked, "-o", "json")
    answer = json.loads(ran.out)
    assert answer["text"] + "\n" == streamed.out
    assert len(answer["token_ids"]) == answer["output_tokens"] <= 12
    assert answer["deployment"] == "chat"
    assert answer["finish_reason"] in ("length", "stop")
    assert answer["ttft_limit_s"] == 30.0
    assert answer["slo_met"] is True


def test_invoke_shows_log_probabilities_of_each_token(cell: RunningCell, chat: str) -> None:
    asked = ("invoke", "chat", "hi", "--max-tokens", "5", "--ignore-eos", "--logprobs", "2")
    penalties = ("--min-p", "0.1", "--presence-penalty", "0.5", "--frequency-penalty", "-1")
    answer = json.loads(cell.mesh(*asked, *penalties, "-o", "json").out)
    assert len(answer["token_ids"]) == len(answer["logprobs"]) == 5
    assert all(one["logprob"] <= 0 and one["top"] for one in answer["logprobs"])
    table = cell.mesh(*asked).out.splitlines()
    assert "LOGPROB" in table[-6]
    refused = cell.mesh(*asked[:-1], "21")
    assert refused.code == 2
    assert "logprobs is 21; it must be from 0 to 20" in refused.err


def test_invoke_reads_prompts_from_everywhere_alike(
    cell: RunningCell, chat: str, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("Grüße", encoding="utf-8")
    file = str(tmp_path / "prompt.txt")
    asked = ("invoke", "chat", "--max-tokens", "4", "-o", "json")
    prompts = [
        cell.mesh(*asked, "Grüße"),
        cell.mesh(*asked, "--file", file),
        cell.mesh(*asked, "-", stdin="Grüße\n".encode()),
        cell.mesh(*asked, stdin="Grüße".encode()),
    ]
    answers = [json.loads(ran.out) for ran in prompts]
    seen = [(answer["prompt_tokens"], answer["text"]) for answer in answers]
    assert len(set(seen)) == 1
    raw = json.loads(cell.mesh(*asked, "--raw", "Grüße").out)
    assert raw["prompt_tokens"] == len("Grüße".encode()) < seen[0][0]


def test_stats_stand_on_stderr(cell: RunningCell, chat: str) -> None:
    ran = cell.mesh("invoke", "chat", "hi", "--max-tokens", "3", "--stats")
    assert ran.code == 0
    (line,) = ran.err.splitlines()
    assert "SLO 30" in line
    assert "TPOT" in line


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (("nobody", "hi"), 1, "nobody"),
        (("chat", "x" * 2000), 1, "256"),
        (("chat", "hi", "--max-tokens", "0"), 2, "max_tokens"),
        (("chat", "hi", "--max-tokens", "-5"), 2, "max_tokens"),
        (("chat", "hi", "--temperature", "-1"), 2, "temperature"),
        (("chat", "hi", "--top-p", "0"), 2, "top_p"),
        (("chat", "hi", "--max-tokens", "200", "--timeout", "0.2"), 1, "0.2 s"),
    ],
)
def test_a_refused_invocation_is_two_lines(
    arguments: tuple[str, ...], code: int, error: str, cell: RunningCell, chat: str
) -> None:
    ran = cell.mesh("invoke", *arguments)
    assert ran.code == code, ran
    assert error in ran.error_lines[0]
    assert ran.error_lines[1]
    assert cell.mesh("invoke", "chat", "still there?", "--max-tokens", "1").code == 0


def test_chat_keeps_its_history_until_it_is_reset(cell: RunningCell, chat: str) -> None:
    """Down a pipe: an answer a line, and nothing of the commands on stdout."""
    lines = b"one\n\n/system be brief\ntwo\n/reset\n/nonsense\none\n/quit\nnever asked\n"
    before = json.loads(cell.mesh("status", "-o", "json").out)["served"]
    ran = cell.mesh("chat", "chat", "--max-tokens", "5", stdin=lines)
    assert ran.code == 0, ran.err
    assert json.loads(cell.mesh("status", "-o", "json").out)["served"] == before + 3
    assert "told so from now on" in ran.err
    assert "forgotten" in ran.err
    assert "/nonsense is no command" in ran.err
    assert "never" not in ran.out


def test_chat_down_a_pipe_ends_at_the_first_question_that_fails(
    cell: RunningCell, chat: str
) -> None:
    ran = cell.mesh("chat", "chat", stdin=b"x" * 2000 + b"\nnext\n")
    assert ran.code == 1
    assert "256" in ran.error_lines[0]
    assert cell.mesh("chat", "nobody").code == 1


def test_scale_changes_only_what_is_given(cell: RunningCell, chat: str) -> None:
    ran = cell.mesh("scale", "chat", "--max", "2", "--keep-alive", "0.5")
    assert (ran.code, ran.err) == (0, "chat: scaled\n")
    (deployment,) = json.loads(cell.mesh("get", "-o", "json").out)
    assert deployment["spec"]["scaling"] == {
        "replicas_min": 0,
        "replicas_max": 2,
        "keep_alive_s": 0.5,
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


def test_a_rollout_is_shown_and_undone(cell: RunningCell) -> None:
    assert cell.mesh("deploy", "-", stdin=cell.manifest("changing")).code == 0
    assert cell.mesh("rollout", "undo", "changing").code == 1
    slower = cell.manifest("changing", "slo: {ttft_s: 9}")
    ran = cell.mesh("deploy", "-", stdin=slower)
    assert ran.err.splitlines()[-1] == "changing: revision 2 serves"
    header, *rows = cell.mesh("rollout", "status", "changing").out.splitlines()
    assert header.split() == ["REVISION", "STATE", "READY", "REQUESTS", "SOURCE", "MESSAGE"]
    assert [row.split()[:2] for row in rows] == [["1", "past"], ["2", "serving"]]
    assert cell.mesh("rollout", "undo", "changing").err == "changing: revision 3 serves\n"
    shown = json.loads(cell.mesh("rollout", "status", "changing", "-o", "json").out)
    assert [one["spec"]["slo"]["ttft_s"] for one in shown] == [2.0, 9.0, 2.0]
    assert cell.mesh("delete", "changing").code == 0


def test_usage_is_shown_by_deployment_and_hour(cell: RunningCell, chat: str) -> None:
    ran = cell.mesh("invoke", chat, "count this", "--max-tokens", "4", "-o", "json")
    assert ran.code == 0, ran.err
    (used,) = [
        one for one in json.loads(cell.mesh("usage", "-o", "json").out) if one["deployment"] == chat
    ]
    assert used["requests"] >= 1
    assert used["output_tokens"] >= 4
    header, *rows = cell.mesh("usage", "--by", "both", "--since", "2h").out.splitlines()
    assert header.split() == [
        *("HOUR", "DEPLOYMENT", "REQUESTS"),
        *("PROMPT_TOKENS", "OUTPUT_TOKENS", "REFUSED"),
    ]
    assert any(row.split()[1] == chat for row in rows)
    head, *lines = cell.mesh("usage", "-o", "csv").out.splitlines()
    assert head == "deployment,requests,prompt_tokens,output_tokens,refused"
    assert any(line.startswith(f"{chat},") for line in lines)
    assert cell.mesh("usage", "--since", "yesterday").code == 2
    assert cell.mesh("usage", "--since", "2999-01-01").out.split()[0] == "DEPLOYMENT"


def test_several_deployments_are_all_tried_and_one_failure_fails_the_command(
    cell: RunningCell, tmp_path: Path
) -> None:
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
def test_a_bad_source_is_two_lines_for_deploy_and_for_pull(
    source: str, error: str, cell: RunningCell
) -> None:
    manifest = cell.manifest("odd").replace(f"file://{cell.model}".encode(), source.encode())
    ran = cell.mesh("deploy", "-", stdin=manifest)
    assert ran.code in (1, 2)
    failure = [line for line in ran.err.splitlines() if not line.startswith("odd: ")]
    assert len(failure) == 2, ran.err
    assert error in failure[0]
    pulled = cell.mesh("pull", source)
    assert pulled.code == ran.code
    assert error in pulled.err


def test_a_drained_node_takes_nothing_new_until_that_is_undone(
    cell: RunningCell, chat: str
) -> None:
    ran = cell.mesh("drain", "cpu0", "--wait", "--timeout", "30")
    assert ran.code == 0, ran.err
    assert ran.err.splitlines()[-1] == "cpu0: empty"
    (node,) = json.loads(cell.mesh("nodes", "-o", "json").out)
    assert (node["state"], node["instances"]) == ("draining", [])
    assert cell.mesh("drain", "cpu0", "--undo").err == "cpu0: takes work again\n"
    assert cell.mesh("invoke", "chat", "hi", "--max-tokens", "1").code == 0
    assert cell.mesh("drain", "nobody").code == 1


def test_logs_tell_what_happened_in_words_and_as_json_lines(cell: RunningCell, chat: str) -> None:
    cell.mesh("invoke", "chat", "hi", "--max-tokens", "1")
    ran = cell.mesh("logs", "-n", "5")
    assert (ran.code, ran.err) == (0, "")
    assert 0 < len(ran.out.splitlines()) <= 5
    events = [json.loads(line) for line in cell.mesh("logs", "-o", "json").out.splitlines()]
    assert all(abs(event["time_unix_s"] - time.time()) < 600 for event in events)
    assert {"kind", "subject", "text"} <= set(events[0])
    about = cell.mesh("logs", "cpu0", "-n", "3", "-o", "json").out.splitlines()
    assert 0 < len(about) <= 3


def test_logs_follow_what_happens(cell: RunningCell, chat: str) -> None:
    """In a process of its own, which ends when nobody reads it any more."""
    environ = {**os.environ, "MESH_CONTROLLER": cell.address}
    err = cell.home / "follow.err"
    with mesh_process("logs", "-f", "-n", "0", environ=environ, err=err) as process:
        assert process.stdout is not None
        lines: list[str] = []
        reading = threading.Thread(target=lines.extend, args=(process.stdout,))
        reading.start()
        # Again and again: what happened before it follows is not its to tell.
        asking = ("invoke", "chat", "hi", "--max-tokens", "1")
        until(lambda: cell.mesh(*asking).code == 0 and bool(lines))
        process.send_signal(2)
        assert process.wait(timeout=10) == 130
        reading.join()
        assert all(line.strip() for line in lines)
    assert err.read_bytes() == b""


def test_requests_are_listed_and_cancelled(cell: RunningCell, chat: str, tmp_path: Path) -> None:
    asking = ("invoke", chat, "count", "--max-tokens", "200", "--controller", cell.address)
    with mesh_process(*asking, environ=os.environ, err=tmp_path / "err") as process:
        until(lambda: chat in cell.mesh("requests").out, 20.0)
        (listed,) = json.loads(cell.mesh("requests", "-o", "json").out)
        assert listed["deployment"] == chat
        ran = cell.mesh("cancel", listed["request_id"], "r0-0")
        assert ran.code == 1
        assert "cancelled" in ran.err
        assert "no open request 'r0-0'" in ran.err
        assert process.wait(20.0) == 1


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
