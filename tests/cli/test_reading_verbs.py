"""Verbs that show a real cell: what they print in each form, and how they end."""

import json
import os
import re
import threading
import time
from typing import Any

import yaml

from tests.cli.conftest import RunningCell
from tests.cli.running import mesh_process
from tests.support.waiting import until


def test_get_lists_deployments_in_aligned_columns(cell: RunningCell, chat: str) -> None:
    ran = cell.mesh("get")
    assert (ran.code, ran.err) == (0, "")
    header, *rows = ran.out.splitlines()
    assert header.split()[:4] == ["NAME", "STATE", "READY", "RUNNING"]
    assert [row.split()[:2] for row in rows] == [["chat", "ready"]]
    assert rows[0].split()[-1] == f"file://{cell.model}"
    assert cell.mesh("get", "chat").out == ran.out


def test_get_and_describe_are_the_same_as_json_and_yaml(cell: RunningCell, chat: str) -> None:
    (listed,) = json.loads(cell.mesh("get", "-o", "json").out)
    slo = {"ttft_s": 30.0, "ttft_tokens_per_s": 512.0, "tpot_s": 5.0, "cold_start": "late"}
    assert listed["spec"]["slo"] == slo | {"name": "", "price": 1.0, "best_effort": False}
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
    assert (of_node, loads, shapes) == (["NODE", "energy", "NODE"], "LOADS_FROM", "SHAPE")
    assert {a, b, c, d} == {"INSTANCE"}
    assert "STALLS  LONGEST_S  LAST_AGO_S" in ran.out
    found = json.loads(cell.mesh("describe", "cpu0", "-o", "json").out)
    assert found["node_id"] == "cpu0"
    (instance,) = [i for i in found["instances"] if i["deployment"] == "chat"]
    assert instance["correction_planned"] > 0
    assert sorted(instance["stalls"]) == ["ago_s", "count", "longest_s"]
    sizes_bytes = [each["weights_bytes"] for each in found["footprints"].values()]
    assert instance["weights_bytes"] in sizes_bytes  # other tests' models are told, too
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
    assert status["classes"] == {}, "it has none"
    assert status["prefetches"]["hit_rate"] == status["prefetches"]["used"] == 0
    numbers = cell.mesh("status").out.partition("\n\n")[0]
    shown = dict(line.split(maxsplit=1) for line in numbers.splitlines())
    assert shown["nodes_ready"] == "1 of 1"
    assert shown["controller"] == cell.address
    assert shown["prefetches"].startswith("0 begun, 0 used, 0 wasted")
    assert shown["state_path"].startswith(str(cell.home))


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
        *("PROMPT_TOKENS", "OUTPUT_TOKENS", "REFUSED", "ENERGY_J"),
    ]
    assert any(row.split()[1] == chat for row in rows)
    head, *lines = cell.mesh("usage", "-o", "csv").out.splitlines()
    assert head == "deployment,requests,prompt_tokens,output_tokens,refused,energy_j"
    assert any(line.startswith(f"{chat},") for line in lines)
    assert cell.mesh("usage", "--since", "yesterday").code == 2
    until(lambda: bool(_used(cell, chat)["energy_j"]))
    assert cell.mesh("usage", "--since", "2999-01-01").out.split()[0] == "DEPLOYMENT"


def _used(cell: RunningCell, name: str) -> dict[str, Any]:
    found = json.loads(cell.mesh("usage", "-o", "json").out)
    return next(one for one in found if one["deployment"] == name)


def test_joules_are_shown_of_the_cell_of_deployments_and_of_nodes(
    cell: RunningCell, chat: str
) -> None:
    assert cell.mesh("invoke", chat, "hello", "--max-tokens", "4").code == 0
    until(lambda: bool(_energy(cell, "describe", chat)["j_per_request"]))
    charged, whole = _energy(cell, "describe", chat), _energy(cell, "status")
    assert charged["idle_j"] is None
    assert charged["j_per_output_token"] < charged["busy_j"] <= whole["busy_j"]
    assert whole["idle_j"] > 0
    assert _energy(cell, "describe", "cpu0")["sources"] == whole["sources"]
    for shown in ("status",), ("describe", chat), ("describe", "cpu0"):
        said = re.search(r"^energy +(.*)$", cell.mesh(*shown).out, re.M)
        assert said is not None
        assert re.search(r"J computing, .* J an output token.*\((by \w+)\)$", said[1]), said[1]


def _energy(cell: RunningCell, *verb: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(cell.mesh(*verb, "-o", "json").out)["energy"]
    return found


def test_logs_tell_what_happened_in_words_and_as_json_lines(cell: RunningCell, chat: str) -> None:
    cell.mesh("invoke", "chat", "hi", "--max-tokens", "1")
    ran = cell.mesh("logs", "-n", "5")
    assert (ran.code, ran.err) == (0, "")
    assert 0 < len(ran.out.splitlines()) <= 5
    events = [json.loads(line) for line in cell.mesh("logs", "-o", "json").out.splitlines()]
    assert all(abs(event["time_unix_s"] - time.time()) < 600 for event in events)
    assert {"kind", "subject", "text"} <= set(events[0])
    first = events[0]["number"]
    assert [event["number"] for event in events] == [*range(first, first + len(events))]
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
