"""The choice is made once for each kind of node, by a real trial, and what is asked for holds."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import openvino as ov
import pytest

from mesh.domain.errors import InvalidInput
from mesh.domain.model import ComputePrecision, KvPrecision
from mesh_loader.store import ModelStore
from mesh_nodes.engines.openvino import precision_choice, precision_trial
from mesh_nodes.engines.openvino.architecture import read_architecture
from mesh_nodes.engines.openvino.compilation import capable
from mesh_nodes.engines.openvino.precision_choice import (
    USUAL,
    Say,
    chosen,
    plain,
    shape_of_store,
    tried,
)
from mesh_nodes.engines.openvino.precision_trial import (
    SHAPES,
    TrialJob,
    cut,
    error_of,
    read_timings,
    timings_json,
)
from mesh_nodes.engines.openvino.precisions import (
    PLAIN,
    Precisions,
    Timed,
    candidates,
    choose,
    reason,
)
from mesh_nodes.engines.openvino.shape_blob import cpu_fields
from tests.nodes.engines.openvino.families import families
from tests.nodes.engines.openvino.test_families import COMPUTED, imported
from tests.nodes.engines.openvino.tiny import HIDDEN, TinyModel

CPU_FLAGS = cpu_fields().get("flags", "").split()
JOB = TrialJob(architecture=USUAL, threads=1)
QUICKER = Precisions(compute=ComputePrecision.BF16, kv=KvPrecision.BF16)
FOUND = (
    Timed(precisions=PLAIN, error=0.01, rounds=((1.0, 1.0), (1.1, 1.2))),
    Timed(precisions=QUICKER, error=0.01, rounds=((0.5, 0.5), (0.55, 0.6))),
    Timed(precisions=Precisions(compute=ComputePrecision.F16), error=float("nan")),
)
EVERY = frozenset(ComputePrecision)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[TrialJob]:
    made: list[TrialJob] = []

    def found(job: TrialJob, say: Say) -> tuple[Timed, ...]:
        made.append(job)
        return FOUND

    monkeypatch.setattr(precision_choice, "tried", found)
    monkeypatch.setattr(precision_choice, "capable", lambda core: EVERY)
    return made


def test_a_real_trial_takes_no_more_than_the_plugin_can(tiny: TinyModel) -> None:
    job = TrialJob(architecture=read_architecture(tiny.path), threads=1)
    said: list[tuple[str, float]] = []
    found = tried(job, lambda phase, share: said.append((phase, share)))
    assert said == sorted(said), "it goes forwards"
    assert {phase for phase, _ in said} == {precision_choice.MEASURES}
    assert {0.0, precision_trial.COMPILED_SHARE} < {share for _, share in said}
    assert len(said) > precision_trial.ROUNDS
    assert found[0].precisions == PLAIN
    assert found[0].error > 0.0, "activations of 8 bits"
    rounds = [len(each.rounds) for each in found if each.rounds]
    assert all(count == precision_trial.ROUNDS for count in rounds)
    assert all(len(each.seconds) == len(SHAPES) for each in found if each.seconds)
    if len(found) > 1:
        assert f"in {precision_trial.ROUNDS} rounds)" in reason(found)
    asked = {each.compute for each in candidates(capable(ov.Core()))}
    assert {each.precisions.compute for each in found} == asked


def test_a_trial_of_equals_stays_at_f32(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without bf16 computes in f32 what is compiled for bf16: the times differ by noise."""
    if ComputePrecision.BF16 in capable(ov.Core()):
        pytest.skip("this CPU has bf16")
    both = frozenset({ComputePrecision.F32, ComputePrecision.BF16})
    monkeypatch.setattr(precision_trial, "capable", lambda core: both)
    job = TrialJob(architecture=read_architecture(tiny.path), threads=1, kv=KvPrecision.U8)
    found = precision_trial.tried(job)
    assert len([each for each in found if each.rounds]) == 2
    assert choose(found) == Precisions(kv=KvPrecision.U8), reason(found)


def test_the_second_start_takes_what_was_found(tmp_path: Path, trials: list[TrialJob]) -> None:
    kept = tmp_path / "precisions" / "kind.json"
    first = chosen(JOB, kept)
    assert first.precisions == QUICKER
    assert chosen(JOB, kept) == first, "the reason is kept, too"
    assert trials == [JOB]
    assert [each.name for each in kept.parent.iterdir() if each.suffix == ".json"] == ["kind.json"]


def test_the_reason_says_how_far_rounds_differed(tmp_path: Path, trials: list[TrialJob]) -> None:
    said = str(chosen(JOB, tmp_path / "kind.json"))
    assert re.fullmatch(
        r"bf16, KV bf16: measured 20\d\d-\d\d-\d\d \d\d:\d\d UTC on layers of 1024 by 4096: "
        r"compared with f32, KV f16: bf16, KV bf16 took 0\.50 times as long "
        r"\(0\.50 to 0\.50 in 2 rounds\); f16, KV f16: it gave logits that are no numbers",
        said,
    ), said


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        json.dumps({"any-any": [{"precisions": {}}]}),
        # As releases kept it that also chose the caches by time.
        json.dumps(
            {
                "any-any": [
                    {"precisions": {"compute": "f32", "kv": "f16"}, "error": 0.01, "seconds": [1]},
                    {"precisions": {"compute": "f32", "kv": "u8"}, "error": 0.01, "seconds": [0.5]},
                ]
            }
        ),
        json.dumps({"any-any": {"measured_at": "", "shape": "", "timed": []}}),
        json.dumps({"any-any": {"timed": json.loads(timings_json(FOUND))}}),
        json.dumps(
            {
                "any-any": {
                    "measured_at": "",
                    "shape": "",
                    "timed": json.loads(
                        timings_json((replace(FOUND[0], rounds=((1.0,),)), FOUND[1]))
                    ),
                }
            }
        ),
    ],
)
def test_a_file_that_does_not_say_it_as_this_release_does_is_measured_again(
    tmp_path: Path, trials: list[TrialJob], content: str
) -> None:
    kept = tmp_path / "kind.json"
    kept.write_text(content)
    assert chosen(JOB, kept).precisions == QUICKER
    assert trials == [JOB]
    assert chosen(JOB, kept).precisions == QUICKER
    assert trials == [JOB], "the file is whole now"


def test_what_is_settled_is_not_tried(tmp_path: Path, trials: list[TrialJob]) -> None:
    both = TrialJob(architecture=USUAL, threads=1, compute=ComputePrecision.F32, kv=KvPrecision.F32)
    assert str(chosen(both, tmp_path / "k")) == "f32, KV f32: as asked for"
    assert trials == []


def test_a_cpu_that_multiplies_in_f32_alone_tries_nothing(
    tmp_path: Path, trials: list[TrialJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision_choice, "capable", lambda core: frozenset({ComputePrecision.F32}))
    assert str(chosen(JOB, tmp_path / "k")) == ("f32, KV f16: this CPU multiplies in nothing else")
    assert trials == []


def test_a_trial_that_fails_leaves_what_is_known_to_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(precision_choice, "_CHILD", "mesh_nodes.no_such_module")
    monkeypatch.setattr(precision_choice, "capable", lambda core: EVERY)
    choice = chosen(JOB, tmp_path / "k")
    assert choice.precisions == PLAIN
    assert "nothing could be measured" in choice.why
    assert "No module named" in caplog.text
    assert not (tmp_path / "k").exists(), "the next start tries again"


def test_what_the_cpu_cannot_do_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_choice, "capable", lambda core: frozenset({ComputePrecision.F32}))
    wanted = TrialJob(architecture=USUAL, threads=1, compute=ComputePrecision.BF16)
    with pytest.raises(InvalidInput, match=r"--precision bf16 with --kv auto .* it can f32"):
        chosen(wanted, tmp_path / "k")


def test_a_store_without_models_is_tried_with_a_usual_shape(tmp_path: Path) -> None:
    assert shape_of_store(ModelStore(tmp_path)) == USUAL


@pytest.mark.parametrize("name", COMPUTED)
def test_of_each_family_a_plain_shape_is_tried(tmp_path: Path, name: str) -> None:
    """Layers are alike, and the job comes through whole; what a mixture's tokens take counts."""
    architecture = plain(read_architecture(imported(tmp_path, families()[name]).path))
    assert architecture.intermediate_size > 0
    job = TrialJob(architecture=architecture, threads=1)
    assert TrialJob.from_json(job.to_json()) == job
    assert cut(architecture).layers >= 1


def test_a_wish_and_what_was_found_come_through_the_process_s_ends_whole() -> None:
    job = TrialJob(architecture=USUAL, threads=3, kv=KvPrecision.BF16)
    assert TrialJob.from_json(job.to_json()) == job
    assert read_timings(json.loads(timings_json(FOUND)))[:2] == FOUND[:2]
    with pytest.raises(ValueError, match="no precision was timed"):
        read_timings(json.loads(timings_json(FOUND[2:])))


def test_a_trial_computes_a_few_layers(tiny: TinyModel) -> None:
    small, usual = cut(read_architecture(tiny.path)), cut(USUAL)
    assert small.layers == precision_trial.LAYERS_MAX
    assert small.hidden_size == HIDDEN
    assert 1 <= usual.layers <= precision_trial.LAYERS_MAX


def test_an_error_counts_as_far_as_both_computed_the_same() -> None:
    exact = np.array([[0.0, 2.0], [0.0, 2.0], [0.0, 2.0]], np.float32)
    off = exact + np.array([[0.1], [0.1], [9.0]], np.float32)
    off[1] = [2.1, 1.1]
    assert error_of(exact, exact) == 0.0
    assert 0.5 < error_of(off, exact) < 2.0, "the third followed another token"


@pytest.mark.skipif("amx_bf16" not in CPU_FLAGS, reason="bf16 by AVX-512 is made of AMX's machine")
def test_without_amx_bf16_is_tried_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same processor, kept from AMX: it takes twice as long as f32."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    found = tried(TrialJob(architecture=replace(USUAL, hidden_size=512), threads=1))
    assert any(each.precisions.compute is ComputePrecision.BF16 for each in found if each.rounds)
    assert choose(found).compute is ComputePrecision.F32
