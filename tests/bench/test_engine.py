"""The engine benchmark's arithmetic, and that a contender that breaks says so in time."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench.engine import Measured, Roofline, Seconds, Trial, report, trial_table
from bench.engine_contenders import ENTRIES, GREEDY, PREFILL, WORKS, shortened, timed
from bench.engine_models import I4, I8, Models, _in_four_bits
from bench.harness import Report
from bench.peer import Peer
from mesh.domain.errors import Unavailable
from mesh.domain.model import ComputePrecision, KvPrecision
from mesh_loader.store import StoredModel
from mesh_nodes.engines.openvino.precision_choice import USUAL
from mesh_nodes.engines.openvino.precision_trial import SHAPES, cut
from mesh_nodes.engines.openvino.precisions import PLAIN, Precisions, Timed
from tests.support.profiles import MODEL

SECONDS = {
    "mesh": {"greedy 1": [1.0, 3.0, 2.0], "first token": [0.5, 0.4, 0.6], "sampled 8": [5.0]},
    "openvino-genai": {"greedy 1": [4.0, 4.0, 0.1], "first token": [1.0], "sampled 8": [4.0]},
    "llama.cpp": {"greedy 1": [3.0, 90.0, 3.0], "first token": [1.0], "sampled 8": [8.0]},
}


def measured(eight: Seconds, four: Seconds | None = None) -> Measured:
    def of_all(by_engine: Seconds) -> Seconds:
        names = [work.name for work in WORKS]
        return {e: {n: by_work.get(n, []) for n in names} for e, by_work in by_engine.items()}

    seconds = {I8: of_all(eight)} | ({I4: of_all(four)} if four else {})
    precisions = {"chosen": "f32, KV f16"}
    return Measured(
        name="135M", works=WORKS, seconds=seconds, idle_share=0.0, precisions=precisions
    )


def test_the_ratio_is_of_medians_and_to_the_better_peer() -> None:
    """mesh's medians are 2 s alone and 5 s sampled, the better peers' 3 s and 4 s."""
    found = measured(SECONDS)
    assert found.ratio(I8, "greedy 1") == pytest.approx(3 / 2)
    assert found.ratio(I8, "sampled 8") == pytest.approx(4 / 5)
    assert found.ratio(I8, "greedy 16") is None


def test_without_a_peer_there_is_no_ratio() -> None:
    assert measured({"mesh": SECONDS["mesh"]}).ratio(I8, "greedy 1") is None


def test_a_token_in_four_bits_is_compared_without_the_prompt() -> None:
    quicker = {"greedy 1": [1.25], "first token": [0.5]}
    figures = measured(SECONDS, {"mesh": quicker}).figures()
    assert figures["i4_decode_ratio"] == pytest.approx(0.75 / 1.5)
    assert measured(SECONDS).figures()["i4_decode_ratio"] is None


def test_the_last_line_is_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    found = measured({name: SECONDS[name] for name in ("mesh", "llama.cpp")})
    report([found], ["openvino-genai"]).end()
    lines = capsys.readouterr().out.splitlines()
    figures = json.loads(lines[-1])
    assert figures["ratio_to_best"] == {"1": 1.5, "8": None, "16": None}
    assert figures["sampled_ratio"] == 1.6
    assert figures["tokens_per_s"]["i8"]["greedy 1"] == {"mesh": 32.0, "llama.cpp": 21.3}
    assert figures["precisions"] == {"chosen": "f32, KV f16"}
    assert figures["missing"] == ["openvino-genai"]
    assert set(figures["models"]) == {"135M"}
    assert any("openvino-genai" in line and "not installed" in line for line in lines)


def test_prompts_are_the_same_for_all_and_new_every_time() -> None:
    work = GREEDY[16]
    first = work.prompts(49152, seed=1)
    assert first == work.prompts(49152, seed=1)
    assert {len(prompt) for prompt in first} == {work.prompt_tokens}
    assert len({tuple(prompt[:4]) for prompt in first + work.prompts(49152, seed=2)}) == 32
    assert all(0 <= token < 49152 for prompt in first for token in prompt)


def test_of_a_prefill_alone_the_rate_is_that_of_its_prompt() -> None:
    assert PREFILL.counted_tokens == 2048
    assert GREEDY[8].counted_tokens == 8 * 64
    assert shortened(GREEDY[8], 16).counted_tokens == 8 * 16


def test_4_bits_for_a_peer_are_the_weights_to_half_a_step() -> None:
    """And the embedding has 8; a row that no group divides, too."""
    import openvino as ov

    draw = np.random.default_rng(0)
    values = draw.standard_normal((40, 192)).astype(np.float32)

    def computed(name: str, matrix: np.ndarray) -> np.ndarray:
        model = ov.Model([ov.opset13.result(_in_four_bits(name, matrix))], [], "packed")
        return np.array(ov.compile_model(model, "CPU")([])[0], np.float32)

    step = (values.max() - values.min()) / 15
    assert np.abs(computed("layers.0.mlp", values) - values).max() < 0.6 * step
    for name, matrix in (("embed_tokens", values), ("layers.0.mlp", values[:, :190])):
        assert np.abs(computed(name, matrix) - matrix).max() < np.abs(matrix).max() / 100


def test_a_contender_without_its_model_is_reported(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    models = Models(stored=StoredModel(path=absent, info=MODEL), gguf=absent, genai_ir=absent)
    name = ENTRIES[0].name
    with Peer(name, timed, name, models) as peer, pytest.raises(Unavailable, match="mesh: "):
        peer.wait_ready()


BF16 = Precisions(compute=ComputePrecision.BF16, kv=KvPrecision.BF16)
LAYERS = cut(USUAL)


def roofline(*flags: str) -> Roofline:
    return Roofline(bytes_per_s=1e10, flags=frozenset(flags), cycles_per_s=1e9)


def test_one_decode_is_bound_by_the_memory_and_a_prefill_by_the_cores() -> None:
    """The bound depends on the precisions whose arithmetic the processor has."""
    machine = roofline("avx512f", "avx512_vnni", "amx_bf16")
    decode, prefill = (
        [machine.least_s(LAYERS, shape, precisions) for precisions in (PLAIN, BF16)]
        for shape in (SHAPES[0], SHAPES[2])
    )
    assert decode[0] == decode[1]
    assert prefill[0] == pytest.approx(8 * prefill[1])
    before = roofline("avx512f").least_s(LAYERS, SHAPES[2], PLAIN)
    assert before == pytest.approx(4 * prefill[0])


def test_a_trial_says_of_each_candidate_what_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    machine = roofline("avx512_vnni")
    seconds = tuple(2 * machine.least_s(LAYERS, shape, PLAIN) for shape in SHAPES)
    timed = (
        Timed(precisions=PLAIN, error=0.01, rounds=(seconds,)),
        Timed(precisions=BF16, error=float("nan")),
    )
    trial = Trial(architecture=LAYERS, timed=timed, roofline=machine)
    (share,) = trial.figures()["candidates"].values()  # type: ignore[attr-defined]
    assert share["roofline_share"] == [0.5] * len(SHAPES)
    Report(figures={}, shown=[trial_table(trial)]).end()
    lines = capsys.readouterr().out.splitlines()
    assert any("f32, KV f16 *" in line and "(50 %)" in line for line in lines)
    assert any("bf16" in line and "too far off" in line for line in lines)
