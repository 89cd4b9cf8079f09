"""The node agent as users run it, engine and all, on a tiny model; its journal replays."""

import re
import time
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from mesh.cli.verbs.showing import describe
from mesh.compute.load_times import PRIORS
from mesh.domain.ids import DeploymentName, NodeId
from mesh.domain.limits import HEARTBEAT_S
from mesh.domain.reasons import FinishReason
from mesh.domain.steps import LoadTier
from mesh.domain.views import InstanceSnapshot, LoadTimesView, NodeSnapshot, PrefetchView
from mesh.evaluation.replaying import replay_journal
from mesh_nodes.engines.openvino.compilation import capable
from mesh_nodes.engines.openvino.precision_choice import TRIAL_S_MAX
from mesh_nodes.engines.openvino.precisions import candidates
from tests.e2e.live_cell import LiveCell
from tests.support.tiny_model import write_tiny_llama

CLIENTS = 4
BLOB_S_MAX = 100.0
SOON = "tests.support.soon_node"


def uneven_model(folder: Path) -> Path:
    """One of which a blob can be made: OpenVINO would leave out norms that are all 1."""
    path = write_tiny_llama(folder, seed=5) / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if "norm" in name]:
        tensors[name] = np.linspace(0.9, 1.1, len(tensors[name]), dtype=np.float16)
    save_file(tensors, path)
    return folder


def test_a_real_node_serves_and_both_journals_replay_to_the_same_decisions(
    cell: LiveCell, tiny_model: Path, store_home: Path
) -> None:
    cell.journals = True
    controller = cell.start_controller()
    by_the_clock = ("--precision", "auto", "--kv", "auto")
    node = cell.start_real_node("cpu0", *by_the_clock, join_s_max=TRIAL_S_MAX)
    described = CliRunner().invoke(describe, ["cpu0", "--controller", cell.address])
    assert re.search(r"^precision +(f32|bf16|f16), KV (f16|bf16): \w+", described.output, re.M)
    cell.deploy("chat", tiny_model, keep_alive_s=0.2)
    answers = [cell.invoke("chat", f"question {n}", max_tokens=24) for n in range(CLIENTS)]
    for answer in answers:
        finished = answer.finished()
        assert (finished.reason, finished.output_tokens) == (FinishReason.LENGTH, 24)
    again = cell.invoke("chat", "question 0", max_tokens=24)
    again.finished()
    alone = cell.invoke("chat", "question 0", max_tokens=24)
    alone.finished()
    assert alone.token_ids == again.token_ids
    cell.wait_for("the idle instance to go", lambda: cell.instance_count("chat") == 0)
    assert node.terminate() == 0
    cell.wait_for("the node to be gone", lambda: not cell.client.nodes())
    assert controller.terminate() == 0

    kept = [each.read_text() for each in (store_home / "precisions").glob("cpu_*.json")]
    measured = len(candidates(capable(ov.Core()))) > 1
    assert ["rounds" in text for text in kept] == [True] * measured, (
        "it is there for the next start"
    )

    of_node = replay_journal(node.journal)
    assert (of_node.core, of_node.other) == ("node", None)
    assert of_node.events > 24

    of_controller = replay_journal(controller.journal)
    assert (of_controller.core, of_controller.other) == ("controller", None)
    assert of_controller.requests is not None
    assert of_controller.requests.finished == of_controller.requests.requests == CLIENTS + 2
    assert of_controller.requests.output_tokens == (CLIENTS + 2) * 24


def test_expected_loads_follow_what_spares_a_compile(cell: LiveCell, tmp_path: Path) -> None:
    """The first load of a shape compiles and has a blob made; the second is an import, and known to
    be one.
    """
    home = tmp_path / "own"
    cell.start_controller()
    cell.start_real_node("cpu0", "--home", str(home), module=SOON)
    cell.deploy("chat", uneven_model(tmp_path / "tiny"), keep_alive_s=0.2)

    def loaded() -> InstanceSnapshot:
        cell.invoke("chat", "hello", max_tokens=2).finished()
        deployed = cell.deployment("chat")
        assert deployed is not None
        (instance,) = deployed.instances
        return instance

    def blobs() -> int:
        return len(list((home / "store" / "compiled").glob("*.blob")))

    compiled = loaded()
    assert compiled.tier is LoadTier.DISK
    cell.wait_for("the blob", blobs, BLOB_S_MAX)
    cell.wait_for("the idle instance to go", lambda: cell.instance_count("chat") == 0)
    time.sleep(2 * HEARTBEAT_S)  # until the node has looked, and has told
    imported = loaded()
    assert imported.tier is LoadTier.PREPARED
    assert imported.load_expected_s < compiled.load_expected_s
    cell.wait_for("the idle instance to go", lambda: cell.instance_count("chat") == 0)
    again = loaded()
    assert again.load_expected_s == pytest.approx(imported.load_s, rel=0.5)


def test_a_model_is_loaded_again_before_it_is_called(cell: LiveCell, tmp_path: Path) -> None:
    """It has gone from memory meanwhile; what spares its compile is there."""
    cell.journals = True
    home = tmp_path / "own"
    controller = cell.start_controller("--parked-s", "600")
    cell.start_real_node("cpu0", "--home", str(home), module=SOON)
    cell.deploy("chat", uneven_model(tmp_path / "tiny"))
    for _ in range(8):  # so that it is expected to be called again
        first = cell.invoke("chat", "hello", max_tokens=8)
        first.finished()
    cell.wait_for("the blob", lambda: list((home / "store/compiled").glob("*.blob")), BLOB_S_MAX)
    cell.client.drain(NodeId("cpu0"))
    cell.wait_for("the instance to go", lambda: cell.instance_count("chat") == 0)
    time.sleep(2 * HEARTBEAT_S)  # until the node has looked, and has told
    assert cell.client.status().prefetches == PrefetchView(loads=1, felt=1), "it takes nothing new"
    cell.client.drain(NodeId("cpu0"), undo=True)

    def fetched() -> InstanceSnapshot | None:
        deployed = cell.deployment("chat")
        return next((i for i in deployed.instances if i.tier), None) if deployed else None

    ahead = cell.wait_for("the prefetch", fetched)
    assert (ahead.tier, ahead.kv_blocks) == (LoadTier.PREPARED, 1)
    again = cell.invoke("chat", "hello", max_tokens=8)
    again.finished()
    assert again.token_ids == first.token_ids
    assert cell.client.status().prefetches == PrefetchView(begun=1, used=1, loads=2, felt=1)
    deployed = cell.deployment("chat")
    assert deployed is not None
    assert [i.instance_id for i in deployed.instances] == [ahead.instance_id], "no load more"
    assert controller.terminate() == 0
    assert replay_journal(controller.journal).other is None


def test_a_node_states_what_loads_take_and_after_a_crash_what_they_have_taken(
    cell: LiveCell, tiny_model: Path, tmp_path: Path
) -> None:
    """Its controller is another one by then, which has seen none of them."""

    def from_disk() -> LoadTimesView:
        node = cell.node("cpu0")
        assert node is not None
        (times,) = node.load_times
        assert times.tier is LoadTier.DISK
        return times

    home = ("--home", str(tmp_path / "own"))
    controller = cell.start_controller()
    node = cell.start_real_node("cpu0", *home)
    measured = from_disk()
    assert measured.loads == 0
    assert measured.fixed_s != PRIORS[LoadTier.DISK].fixed_s
    cell.deploy("chat", tiny_model)
    cell.invoke("chat", "hello", max_tokens=2).finished()
    assert from_disk().loads == 1
    deployed = cell.deployment("chat")
    assert deployed is not None
    (instance,) = deployed.instances
    node.kill()
    assert controller.terminate() == 0
    cell.start_controller()
    cell.start_real_node("cpu0", *home)
    kept = from_disk()
    assert kept.loads == 0
    stated_s = kept.fixed_s + instance.weights_bytes / kept.bytes_per_s
    assert 0.2 * instance.load_s < stated_s <= instance.load_s


def test_a_further_instance_is_booked_what_is_its_own(cell: LiveCell, tiny_model: Path) -> None:
    """Also by a controller that comes to know both at once, and until the last has gone."""
    first_controller = cell.start_controller()
    cell.start_real_node("cpu0")
    promised_bytes: list[int] = []
    for name in ("chat", "twin"):
        cell.deploy(name, tiny_model, keep_alive_s=600.0)
        cell.invoke(name, "who shares?", max_tokens=8).finished()
        node = settled(cell, len(promised_bytes) + 1)
        promised_bytes.append(node.promised_bytes)
    first, second = node.instances
    ((_, footprint),) = node.footprints
    assert (first.tier, second.tier) == (LoadTier.DISK, LoadTier.HOST)
    assert first.weights_bytes == footprint.weights_bytes
    assert second.weights_bytes == footprint.weights_bytes - footprint.shared_bytes
    assert second.weights_bytes < footprint.weights_bytes / 10
    assert promised_bytes[1] - promised_bytes[0] == second.weights_bytes + second.kv_bytes
    first_controller.kill()
    cell.start_controller()
    assert settled(cell, 2).promised_bytes == promised_bytes[1]
    for left, name in ((1, "chat"), (0, "twin")):
        cell.client.delete(DeploymentName(name))
        node = settled(cell, left)
        assert node.promised_bytes == sum(i.weights_bytes + i.kv_bytes for i in node.instances)


def settled(cell: LiveCell, instances: int) -> NodeSnapshot:
    """The node, once it has so many instances and nothing is under way."""

    def found() -> NodeSnapshot | None:
        node = cell.node("cpu0")
        there = node is not None and len(node.instances) == instances and not node.operations
        parked = node is None or all(i.batch == 0 for i in node.instances)
        return node if there and parked else None

    return cell.wait_for(f"{instances} instances, at rest", found)
