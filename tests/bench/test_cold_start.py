"""From a request to its first token: where the seconds went, the ratios, and the models."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from bench.cold_start import TARGETS, Measured, figures, report
from bench.cold_start_cell import (
    PROMPT,
    Called,
    Engine,
    Part,
    Rates,
    Start,
    Tier,
    bring,
    forget,
    parts_s,
    rates,
)
from bench.gguf_files import write_random
from mesh.domain.actions import NodeAction, StartStep
from mesh.domain.errors import StorageError
from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.messages import InstanceLoaded, LoadProgress, SubmitRequest
from mesh.domain.model import Footprint
from mesh.domain.node_events import CommandReceived, NodeEvent, StepFinished
from mesh.domain.request import Request, RequestOrder, SamplingParams
from mesh.domain.slo import Slo
from mesh.runtime.journal import Decision
from mesh_loader import page_cache
from mesh_loader.gguf_import import plan_gguf
from tests.core.cells import load_instance, step_result
from tests.loader.tiny_gguf import byte_tokenizer, write_tiny_gguf
from tests.support.tiny_model import LlamaShape

FIRST = DeploymentName("first")
NEW, OTHER = InstanceId("new"), InstanceId("other")
STEP = StartStep(instance_id=NEW, prefill=256)


def decided(now_s: float, event: NodeEvent, *actions: NodeAction) -> Decision:
    return Decision(now_s=now_s, event=event, actions=actions)


def load_command() -> CommandReceived:
    return CommandReceived(command=load_instance(instance_id=NEW, deployment=FIRST))


def progressed(phase: str) -> LoadProgress:
    return LoadProgress(instance_id=NEW, phase=phase, share=0.5)


def loaded() -> InstanceLoaded:
    footprint = Footprint(weights_bytes=1, kv_block_bytes=1, block_tokens=32)
    return InstanceLoaded(instance_id=NEW, footprint=footprint, kv_blocks=8, elapsed_s=1.0)


def submitted() -> CommandReceived:
    request = Request(
        request_id=RequestId("r"),
        deployment=FIRST,
        prompt_tokens=PROMPT,
        sampling=SamplingParams(max_tokens=2),
    )
    order = RequestOrder(request=request, attempt=1, slo=Slo(), age_s=1.0, due_in_s=1.0)
    return CommandReceived(command=SubmitRequest(instance_id=NEW, order=order))


def stepped(instance_id: InstanceId) -> StepFinished:
    result = step_result(prefill_tokens=len(PROMPT), elapsed_s=0.1)
    return StepFinished(instance_id=instance_id, result=result)


def called(tier: Tier, sent_s: float, first_s: float) -> Called:
    return Called(deployment=FIRST, tier=tier, sent_s=sent_s, first_s=first_s)


def test_the_parts_of_a_start_come_to_its_time() -> None:
    decisions = [
        *(decided(9.0, load_command()), decided(10.01, load_command())),
        decided(10.02, progressed("read weights")),
        *(decided(10.11, progressed("import compiled")), decided(10.31, progressed("warm up"))),
        *(decided(10.61, loaded()), decided(10.62, stepped(OTHER)), decided(10.63, submitted())),
        *(decided(10.64, progressed("loaded"), STEP), decided(10.72, stepped(NEW), STEP)),
        decided(10.80, stepped(NEW)),
    ]
    found = parts_s(called(Tier.CACHED, 10.0, 10.73), decisions)
    assert found == {
        Part.QUEUE: pytest.approx(0.01),
        Part.READ: pytest.approx(0.10),
        Part.GRAPH: pytest.approx(0.20),
        Part.FIRST_RUN: pytest.approx(0.30),
        Part.HAND_OVER: pytest.approx(0.03),
        Part.PREFILL: pytest.approx(0.08),
        Part.WIRE: pytest.approx(0.01),
    }


def test_a_call_of_what_is_loaded_has_no_parts_of_a_load() -> None:
    decisions = [decided(5.01, submitted(), STEP), decided(5.04, stepped(NEW))]
    assert parts_s(called(Tier.WARM, 5.0, 5.05), decisions) == {
        Part.QUEUE: pytest.approx(0.01),
        Part.HAND_OVER: 0.0,
        Part.PREFILL: pytest.approx(0.03),
        Part.WIRE: pytest.approx(0.01),
    }


def test_a_shared_model_is_read_until_it_runs() -> None:
    decisions = [
        decided(5.01, load_command()),
        decided(5.02, progressed("warm up")),
        decided(5.05, loaded()),
    ]
    found = parts_s(called(Tier.HOST, 5.0, 5.1), decisions)
    assert found[Part.READ] == pytest.approx(0.01)
    assert found[Part.FIRST_RUN] == pytest.approx(0.03)
    assert Part.GRAPH not in found


TTFTS_S = {
    (Engine.MESH, Tier.WARM): 0.1,
    (Engine.MESH, Tier.RESIDENT): 0.12,
    (Engine.MESH, Tier.HOST): 0.2,
    (Engine.MESH, Tier.CACHED): 0.5,
    (Engine.MESH, Tier.STORED): 0.9,
    (Engine.MESH, Tier.COMPILED): 2.1,
    (Engine.MESH, Tier.COMPILED_STORED): 4.1,
    (Engine.GENAI, Tier.WARM): 0.05,
    (Engine.GENAI, Tier.CACHED): 1.05,
    (Engine.LLAMA_CPP, Tier.WARM): 0.1,
    (Engine.LLAMA_CPP, Tier.CACHED): 0.5,
}


def measured(*without: Engine) -> Measured:
    """Each engine and tier has three starts, one of them far off."""
    found = [
        Start(engine=engine, tier=tier, ttft_s=ttft_s * factor)
        for (engine, tier), ttft_s in TTFTS_S.items()
        for factor in (1.0, 1.0, 3.0)
        if engine not in without
    ]
    return Measured(
        name="made up",
        weights_bytes=1000,
        rates=Rates(memcpy=10_000.0, disk=5_000.0),
        starts=found,
    )


def test_ratios_are_of_what_is_added_to_the_engines_own_warm_token() -> None:
    found = figures(measured())
    assert found == {
        "resident_added_ms": pytest.approx(20.0),
        "host_ratio_to_compile": pytest.approx(0.1 / 2.0),
        "host_floor_ratio": pytest.approx(1.0),
        "host_ratio_to_best_peer": pytest.approx(0.1 / 0.4),
        "cached_ratio_to_compile": pytest.approx(0.4 / 2.0),
        "cached_floor_ratio": pytest.approx(4.0),
        "cached_ratio_to_best_peer": pytest.approx(0.4 / 0.4),
        "disk_ratio_to_compile": pytest.approx(0.8 / 4.0),
        "disk_floor_ratio": pytest.approx(0.8 / 0.2),
        "disk_ratio_to_best_peer": None,
    }
    assert missed(measured()) == set()


def missed(of: Measured) -> set[str]:
    return {line.partition(" is ")[0] for line in report([of], [], None).missed()}


def test_a_peer_that_is_missing_is_no_target_missed() -> None:
    alone = measured(Engine.GENAI, Engine.LLAMA_CPP)
    assert figures(alone)["host_ratio_to_best_peer"] is None
    assert "host_ratio_to_best_peer" not in missed(alone)


def test_starts_of_our_own_that_are_missing_are_targets_missed() -> None:
    assert missed(measured(Engine.MESH)) == set(TARGETS) - {"host_ratio_to_best_peer"}


def test_the_last_line_is_of_the_first_model_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    report([measured(Engine.GENAI)], ["openvino-genai"], "no driver").end()
    out = capsys.readouterr().out
    told = json.loads(out.splitlines()[-1])
    assert told["resident_added_ms"] == pytest.approx(20.0)
    assert told["models"][0]["ttft_s"]["llama.cpp"] == {"warm": 0.1, "cached": 0.5}
    assert (told["missing"], told["gpu"]) == (["openvino-genai"], "missing")
    assert "gpu: missing, no driver" in out


def test_a_random_model_is_one_that_mesh_imports(tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocabulary.gguf"
    write_tiny_gguf(vocabulary)
    shape = LlamaShape(hidden=64, intermediate=96, layers=3, heads=4, kv_heads=2, head_size=16)
    write_random(tmp_path / "random.gguf", shape, vocabulary=vocabulary)
    plan = plan_gguf(tmp_path / "random.gguf")
    assert (plan.config["num_hidden_layers"], plan.config["hidden_size"]) == (3, 64)
    (tmp_path / "stored").mkdir()
    layer = 64 * (64 + 2 * 32 + 64 + 3 * 96) + 2 * 64
    tokens = len(byte_tokenizer().tokens)
    parameters = plan.write(tmp_path / "stored", lambda phase, share: None)
    assert parameters == 3 * layer + 64 * tokens + 64


def test_files_come_into_the_page_cache_and_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(16 << 20))
    bring(tmp_path)
    assert page_cache.cached_share(path) == 1.0
    page_cache.forget(path)
    # A look has the system read on, so that the next one finds more.
    in_memory = page_cache.cached_share(path) > 0.1
    with pytest.raises(StorageError) if in_memory else nullcontext():
        forget(tmp_path)
    found = rates(path)
    assert min(found.memcpy, found.disk) > 0.0
