"""The engine benchmark's arithmetic, and that a contender that breaks says so in time."""

import json
from pathlib import Path

import pytest

from bench.engine.contenders import ENTRIES, timed
from bench.engine.models import Models
from bench.engine.report import Rates, print_report, ratios
from bench.engine.roofline import Roofline
from bench.engine.trial import Trial, print_trial
from bench.engine.workload import CONCURRENCIES, PROMPT_TOKENS, prompts
from bench.peer import Peer
from mesh.domain.errors import Unavailable
from mesh.domain.ids import ModelId
from mesh.domain.model import ComputePrecision, KvPrecision, ModelFormat, ModelInfo
from mesh_loader.store import StoredModel
from mesh_nodes.engines.openvino.precision_choice import USUAL
from mesh_nodes.engines.openvino.precision_trial import SHAPES, cut
from mesh_nodes.engines.openvino.precisions import PLAIN, Precisions, Timed

RATES: Rates = {
    "mesh": {1: [50.0, 70.0, 60.0], 8: [100.0], 16: [99.0, 101.0]},
    "openvino-genai": {1: [40.0, 40.0, 400.0], 8: [80.0], 16: [125.0]},
    "llama.cpp": {1: [75.0, 10.0, 75.0], 8: [50.0], 16: [90.0]},
}


def test_the_ratio_is_of_medians_and_to_the_better_peer() -> None:
    assert ratios(RATES) == {1: 60 / 75, 8: 100 / 80, 16: 100 / 125}


def test_without_a_peer_there_is_no_ratio() -> None:
    assert ratios({"mesh": RATES["mesh"]}) == {}


def test_the_last_line_is_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    without_genai = {name: RATES[name] for name in ("mesh", "llama.cpp")}
    print_report(without_genai, 0.01, ["openvino-genai"], {"chosen": "f32, KV f16"})
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1]) == {
        "ratio_to_best": {"1": 0.8, "8": 2.0, "16": 1.111},
        "tokens_per_s": {
            "mesh": {"1": 60.0, "8": 100.0, "16": 100.0},
            "llama.cpp": {"1": 75.0, "8": 50.0, "16": 90.0},
        },
        "missing": ["openvino-genai"],
        "precisions": {"chosen": "f32, KV f16"},
    }
    assert any("openvino-genai" in line and "not installed" in line for line in lines)


def test_prompts_are_the_same_for_all_and_new_every_time() -> None:
    first = prompts(max(CONCURRENCIES), 49152, seed=1)
    assert first == prompts(max(CONCURRENCIES), 49152, seed=1)
    assert {len(prompt) for prompt in first} == {PROMPT_TOKENS}
    assert len({tuple(prompt[:4]) for prompt in first + prompts(16, 49152, seed=2)}) == 32
    assert all(0 <= token < 49152 for prompt in first for token in prompt)


def test_a_contender_without_its_model_is_reported(tmp_path: Path) -> None:
    info = ModelInfo(
        model_id=ModelId("sha256-0000000000000000"),
        source="absent",
        format=ModelFormat.SAFETENSORS,
        architecture="llama",
        context_tokens_max=512,
        vocabulary_tokens=512,
        layers=1,
        hidden_size=64,
        attention_heads=1,
        kv_heads=1,
        head_size=64,
        parameters=1000,
        disk_bytes=2000,
        stop_token_ids=(),
    )
    absent = tmp_path / "absent"
    models = Models(stored=StoredModel(path=absent, info=info), q8_gguf=absent, genai_ir=absent)
    name = ENTRIES[0].name
    with Peer(name, timed, name, models) as peer, pytest.raises(Unavailable, match="mesh: "):
        peer.wait_ready()


BF16 = Precisions(compute=ComputePrecision.BF16, kv=KvPrecision.BF16)
LAYERS = cut(USUAL)


def roofline(*flags: str) -> Roofline:
    return Roofline(bytes_per_s=1e10, flags=frozenset(flags), cycles_per_s=1e9)


def test_one_decode_is_bound_by_the_memory_and_a_prefill_by_the_cores() -> None:
    """Of what precision's arithmetic the processor has."""
    machine = roofline("avx512f", "avx512_vnni", "amx_bf16")
    decode, prefill = (
        [machine.least_s(LAYERS, shape, precisions) for precisions in (PLAIN, BF16)]
        for shape in (SHAPES[0], SHAPES[2])
    )
    assert decode[0] == decode[1]
    assert prefill[0] == pytest.approx(8 * prefill[1])
    before = roofline("avx512f").least_s(LAYERS, SHAPES[2], PLAIN)
    assert before == pytest.approx(4 * prefill[0])


def test_a_trial_says_of_each_candidate_what_it_took_and_its_share(
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = roofline("avx512_vnni")
    seconds = tuple(2 * machine.least_s(LAYERS, shape, PLAIN) for shape in SHAPES)
    timed = (
        Timed(precisions=PLAIN, error=0.01, seconds=seconds),
        Timed(precisions=BF16, error=float("nan")),
    )
    trial = Trial(architecture=LAYERS, timed=timed, roofline=machine)
    (share,) = trial.figures()["candidates"].values()  # type: ignore[attr-defined]
    assert share["roofline_share"] == [0.5] * len(SHAPES)
    print_trial(trial)
    lines = capsys.readouterr().out.splitlines()
    assert any("f32, KV f16 *" in line and "(50 %)" in line for line in lines)
    assert any("bf16" in line and "too far off" in line for line in lines)
