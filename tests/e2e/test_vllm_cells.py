"""Cells with vLLM nodes: beside an OpenVINO node, and with an engine process that is killed."""

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import requests

from mesh.domain.errors import UnsupportedModel
from mesh.domain.lifecycle import InstanceState, NodeState
from mesh.domain.limits import CellLimits
from mesh.domain.model import Task
from mesh.domain.reasons import FinishReason
from mesh.domain.slo import Slo
from mesh.domain.steps import LoadTier
from tests.e2e.live_cell import LiveCell, Process, free_port
from tests.e2e.test_embeddings import deploy, with_separators
from tests.nodes.engines.openvino.embedders import cosines, embedders, write_embedder
from tests.support.tiny_model import write_tiny_llama

VLLM = ("--engine", "vllm", "--memory", "4GiB")
JOIN_S_MAX = 180.0
"""vLLM's imports take ten seconds on an idle machine, and come before the node joins."""
UNLISTED_S_MAX = 1.0
"""From a kill until the cell knows: a node is told by the kernel, and tells at once."""
TOKENS = 200
PATIENT = Slo(ttft_s=100.0, tpot_s=5.0)
"""What is tested here is not how quick this machine is."""
REQUESTS = CellLimits().batch_max + 8


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both engines have kernels for heads of this size."""
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "vllm", seed=1, head_size=32)


@dataclass
class Serving:
    """A cell with HTTP, and its node."""

    cell: LiveCell
    node: Process
    http: str


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory, store_home: Path) -> Iterator[Serving]:
    """A node for several tests, since it imports vLLM."""
    http = f"127.0.0.1:{free_port()}"
    with closing(LiveCell(tmp_path_factory.mktemp("cell"), store_home)) as cell:
        cell.start_controller("--http", http)
        yield Serving(cell, cell.start_real_node("n1", *VLLM, join_s_max=JOIN_S_MAX), http)


@pytest.fixture
def serving(joined: Serving) -> Iterator[Serving]:
    """The module's cell, with a new node where the test before has ended the node. After the test
    its deployments are deleted and its engine processes have ended.
    """
    cell = joined.cell
    if joined.node.popen.poll() is not None:
        joined.node = cell.start_real_node("n1", *VLLM, join_s_max=JOIN_S_MAX)
        cell.wait_for(
            "the node to be back",
            lambda: any(node.state is NodeState.READY for node in cell.client.nodes()),
            JOIN_S_MAX,
        )
    yield joined
    for deployment in cell.client.list():
        cell.client.delete(deployment.spec.name)
    assert joined.node.popen.poll() is None, cell.logs()
    cell.wait_for("the node to be empty", lambda: not engine_processes(joined.node))


def engine_processes(node: Process) -> list[int]:
    forkservers = psutil.Process(node.popen.pid).children()
    return [child.pid for forkserver in forkservers for child in forkserver.children()]


def test_a_killed_engine_process_costs_its_requests_a_reload_and_no_token(
    serving: Serving, vllm_model: Path
) -> None:
    """The process is killed amid answers, and while it is idle. The books balance: what the cell
    thinks is held is what the next instance holds.
    """
    cell, node = serving.cell, serving.node
    cell.deploy("chat", vllm_model, slo=PATIENT)
    undisturbed = cell.invoke("chat", "to be continued", max_tokens=TOKENS)
    assert undisturbed.finished().output_tokens == TOKENS
    before = cell.node("n1")
    assert before is not None
    answers = [cell.invoke("chat", "to be continued", max_tokens=TOKENS) for _ in range(3)]
    for answer in answers:
        cell.wait_tokens(answer, 5)
    (pid,) = engine_processes(node)
    os.kill(pid, signal.SIGKILL)
    assert all(not answer.ended.is_set() for answer in answers), "the kill came amid the answers"
    for answer in answers:
        assert answer.finished().output_tokens == TOKENS
        assert answer.token_ids == undisturbed.token_ids
        assert answer.text == undisturbed.text
    (pid,) = engine_processes(node)
    os.kill(pid, signal.SIGKILL)
    idle = cell.invoke("chat", "to be continued", max_tokens=TOKENS)
    assert idle.finished().output_tokens == TOKENS
    assert idle.token_ids == undisturbed.token_ids
    assert len(engine_processes(node)) == 1
    after = cell.node("n1")
    assert after is not None
    assert len(after.instances) == len(before.instances) == 1
    assert after.instances[0].weights_bytes == before.instances[0].weights_bytes


def test_an_idle_instance_whose_process_is_killed_is_missed_at_once(
    serving: Serving, vllm_model: Path
) -> None:
    """And another one loaded, where the deployment wants one at any time."""
    cell, node = serving.cell, serving.node
    cell.deploy("chat", vllm_model, replicas_min=1, slo=PATIENT)

    def ready() -> list[str]:
        found = cell.node("n1")
        held = found.instances if found is not None else ()
        return [i.instance_id for i in held if i.state is InstanceState.READY]

    (first,) = cell.wait_for("the first instance", ready, JOIN_S_MAX)
    (pid,) = engine_processes(node)
    os.kill(pid, signal.SIGKILL)
    cell.wait_for("it to be unlisted", lambda: first not in ready(), UNLISTED_S_MAX)
    (second,) = cell.wait_for("another one", ready, JOIN_S_MAX)
    assert second != first
    answer = cell.invoke("chat", "still there?", max_tokens=5)
    assert answer.finished().output_tokens == 5
    (_,) = engine_processes(node)


def test_a_cell_of_vllm_nodes_embeds_and_ranks(serving: Serving, tmp_path: Path) -> None:
    cell = serving.cell

    def asked(path: str, **body: Any) -> Any:
        answer = requests.post(f"http://{serving.http}{path}", json=body, timeout=JOIN_S_MAX)
        assert answer.status_code == 200, answer.text
        return answer.json()

    for name in ("bert", "qwen3"):
        deploy(cell, name, write_embedder(tmp_path / name, name), Task.EMBED)
        cases = embedders()[name]["cases"]
        told = asked("/v1/embeddings", model=name, input=[case["prompt"] for case in cases])
        found = [np.array(one["embedding"]) for one in told["data"]]
        assert min(cosines(found, name)) >= 0.9999
    folder = with_separators(write_embedder(tmp_path / "scores", "bert-scores"))
    with pytest.raises(UnsupportedModel, match="task rerank is what it can do"):
        deploy(cell, "scores", folder, Task.EMBED)
    deploy(cell, "scores", folder, Task.RERANK)
    ranked = asked("/v1/rerank", model="scores", query="why?", documents=["a text", "another"])
    scores = [one["relevance_score"] for one in ranked["results"]]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)


def test_a_second_turn_computes_only_what_is_new_and_the_cell_counts_on_it(
    serving: Serving, vllm_model: Path
) -> None:
    """The controller has been told what is there by the time the instance is idle."""
    cell = serving.cell
    cell.deploy("chat", vllm_model, replicas_min=1, slo=PATIENT)
    system = "You answer in as few words as there can be. " * 3
    first = cell.invoke("chat", system, max_tokens=8).finished()
    assert (first.cached_prompt_tokens, first.output_tokens) == (0, 8)

    def cached() -> int:
        found = cell.node("n1")
        return sum(i.kv_blocks_cached for i in found.instances) if found is not None else 0

    blocks = cell.wait_for("cached blocks in the node's report", cached)
    second = cell.invoke("chat", system + "And now?", max_tokens=8).finished()
    assert second.cached_prompt_tokens == blocks * 32 >= 96


def test_both_engines_serve_one_deployment_and_a_request_moves_between_them(
    cell: LiveCell, vllm_model: Path
) -> None:
    """More requests than one iteration of an instance may carry; then one of the nodes dies."""
    cell.start_controller()
    openvino = cell.start_real_node("ov", "--engine", "openvino")
    cell.start_real_node("vllm", *VLLM, join_s_max=JOIN_S_MAX)
    cell.deploy("chat", vllm_model, replicas_min=2, slo=PATIENT)

    def batches() -> list[int]:
        """The batches of the instances that serve, one on each node."""
        nodes = [node for name in ("ov", "vllm") if (node := cell.node(name))]
        ready = [i.batch for n in nodes for i in n.instances if i.state is InstanceState.READY]
        return ready if len(ready) == 2 else []

    cell.wait_for("an instance on each node", batches, JOIN_S_MAX)
    answers = [cell.invoke("chat", f"question {n}", max_tokens=TOKENS) for n in range(REQUESTS)]
    cell.wait_for("both engines to compute", lambda: all(batches() or [0]))
    openvino.kill()
    for answer in answers:
        finished = answer.finished()
        assert (finished.reason, finished.output_tokens) == (FinishReason.LENGTH, TOKENS)
    assert cell.node("ov") is None


def test_an_idle_model_sleeps_and_the_next_request_wakes_it(
    cell: LiveCell, vllm_model: Path
) -> None:
    """As often as it likes; and if it was killed in its sleep, its weights are there yet."""
    cell.start_controller()
    node = cell.start_real_node(
        "n1", *VLLM, join_s_max=JOIN_S_MAX, module="tests.support.sleeping_node"
    )
    cell.deploy("chat", vllm_model, slo=PATIENT, keep_alive_s=0.2)
    answers = []
    for tier in (LoadTier.DISK, LoadTier.HOST, LoadTier.HOST, LoadTier.HOST):
        answers.append(cell.invoke("chat", "to be continued", max_tokens=TOKENS))
        cell.wait_tokens(answers[-1], 1)
        found = cell.deployment("chat")
        assert found is not None
        assert [instance.tier for instance in found.instances] == [tier]
        assert answers[-1].finished().output_tokens == TOKENS
        cell.wait_for("the model to sleep", lambda: asleep(cell))
        cell.wait_for("the instance to be gone", lambda: cell.instance_count("chat") == 0)
        if len(answers) == 3:
            (pid,) = engine_processes(node)
            os.kill(pid, signal.SIGKILL)
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    assert len({answer.text for answer in answers}) == 1
    left = cell.node("n1")
    assert left is not None
    assert left.promised_bytes == left.tracked_bytes == 0


def asleep(cell: LiveCell) -> int:
    """Models that sleep on the node, as the cell knows it."""
    node = cell.node("n1")
    assert node is not None
    return len(node.asleep)
