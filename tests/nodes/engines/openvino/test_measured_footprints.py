"""What unloads free corrects the books of a shape, in quiet moments, and outlives the engine."""

from pathlib import Path

import pytest

from mesh.domain.ids import InstanceId
from mesh.domain.model import ComputePrecision, KvPrecision, ModelInfo, WeightPrecision
from mesh.memory.footprints import SEEN_MIN
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from mesh_nodes.engines.openvino.footprint import BATCH_MAX, KERNEL_SIZES, Reached, estimate
from mesh_nodes.engines.openvino.measured_footprints import SIZES_MIN, MeasuredFootprints
from tests.nodes.engines.openvino.tiny import HEAD_SIZE, TinyModel
from tests.nodes.engines.serving import load

MIB = 2**20
A, B = InstanceId("a"), InstanceId("b")


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "footprints" / "seen.json"


def footprints(path: Path | None) -> MeasuredFootprints:
    return MeasuredFootprints(weights=WeightPrecision.F16, kv=KvPrecision.F32, path=path)


def whole_life(tokens: int = 512) -> Reached:
    """It has met the largest iteration, so that nothing is reckoned on top."""
    reached = Reached(sizes=set(range(KERNEL_SIZES)))
    reached.note(tokens, BATCH_MAX)
    return reached


def test_a_shape_is_booked_by_what_was_freed_before(kept: Path, tiny: TinyModel) -> None:
    first = estimate(tiny.info, weights=WeightPrecision.F16, kv=KvPrecision.F32)
    mine = footprints(kept)
    for _ in range(SEEN_MIN):
        assert mine.footprint(tiny.info) == first
        mine.note(tiny.info, 9 * MIB, whole_life())
    assert 9 * MIB < mine.footprint(tiny.info).weights_bytes < 10 * MIB < first.weights_bytes
    assert mine.footprint(tiny.info).kv_block_bytes == first.kv_block_bytes
    owns = [made.weights_bytes - made.shared_bytes for made in (first, mine.footprint(tiny.info))]
    assert 2 * MIB < owns[0] == owns[1], "of a further instance: it is the weights that were less"
    assert footprints(kept).footprint(tiny.info) == mine.footprint(tiny.info)


def test_what_an_instance_never_computed_is_reckoned_on_top(tiny: TinyModel) -> None:
    least, most = footprints(None), footprints(None)
    for _ in range(SEEN_MIN):
        least.note(tiny.info, 9 * MIB, Reached(sizes=set(range(SIZES_MIN))))
        most.note(tiny.info, 9 * MIB, whole_life())
    assert least.footprint(tiny.info).weights_bytes > most.footprint(tiny.info).weights_bytes


def test_without_vnni_matrices_are_booked_twice(tiny: TinyModel) -> None:
    """Also after instances that have not yet computed what repacks them."""
    mine = MeasuredFootprints(
        weights=WeightPrecision.F16, kv=KvPrecision.F32, repacks=True, path=None
    )
    again_bytes = tiny.info.parameters - tiny.info.vocabulary_tokens * tiny.info.hidden_size
    plain = footprints(None).footprint(tiny.info)
    stated = mine.footprint(tiny.info)
    assert stated.weights_bytes - plain.weights_bytes == again_bytes
    assert stated.shared_bytes - plain.shared_bytes == again_bytes
    booked: list[int] = []
    for smallest in (65, 1):
        reached = Reached(sizes=set(range(smallest, smallest + KERNEL_SIZES)))
        reached.note(512, BATCH_MAX)
        for _ in range(SEEN_MIN):
            mine.note(tiny.info, 900 * MIB * (1 + len(booked)), reached)
        booked.append(mine.footprint(tiny.info).weights_bytes)
    assert booked[0] == int((900 * MIB + again_bytes) * 1.02) + 1
    assert booked[1] == int(1800 * MIB * 1.02) + 1


def test_nodes_that_share_a_state_folder_lose_nothing(kept: Path, tiny: TinyModel) -> None:
    one, other = footprints(kept), footprints(kept)
    one.note(tiny.info, 9000 * MIB, whole_life())
    other.note(tiny.info, 9 * MIB, whole_life())
    assert footprints(kept).footprint(tiny.info).weights_bytes > 9000 * MIB
    one, other = footprints(kept), footprints(kept)
    other.note(tiny.info, 12000 * MIB, whole_life())
    one.note(tiny.info, 9 * MIB, whole_life())
    assert footprints(kept).footprint(tiny.info).weights_bytes > 12000 * MIB


@pytest.mark.parametrize("content", ["", "[]", '{"a": 3}', '{"a": [-1, 2]}', '{"a": ["b", 2]}'])
def test_a_torn_file_is_as_good_as_none(kept: Path, tiny: TinyModel, content: str) -> None:
    kept.parent.mkdir()
    kept.write_text(content)
    first = estimate(tiny.info, weights=WeightPrecision.F16, kv=KvPrecision.F32)
    assert footprints(kept).footprint(tiny.info) == first


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What an engine's unloads have freed, as far as they count."""
    found: list[int] = []

    def note(_: MeasuredFootprints, model: ModelInfo, freed_bytes: int, reached: Reached) -> None:
        found.append(freed_bytes)

    monkeypatch.setattr(MeasuredFootprints, "note", note)
    return found


def test_an_instance_whose_model_another_one_runs_says_nothing(
    engine: OpenVinoEngine, tiny: TinyModel, noted: list[int]
) -> None:
    load(engine, tiny.info, tiny.path, instance_id=A)
    load(engine, tiny.info, tiny.path, instance_id=B)
    engine.unload(A)
    assert noted == []
    engine.unload(B)
    assert len(noted) == 1


def test_the_rope_tables_of_a_huge_context_are_their_instances_alone(
    engine: OpenVinoEngine, tiny: TinyModel
) -> None:
    """128 MiB: later models of the shape are booked as before."""
    before, tokens = engine.footprint(tiny.info), 2**20
    huge = load(engine, tiny.info, tiny.path, instance_id=A, context_tokens_max=tokens).footprint
    tables_bytes = 2 * 4 * HEAD_SIZE * tokens
    assert huge.weights_bytes == before.weights_bytes + tables_bytes
    assert huge.shared_bytes == before.shared_bytes + tables_bytes
    assert engine.memory()[0].weights_bytes == huge.weights_bytes
    engine.unload(A)
    assert engine.footprint(tiny.info) == before == huge.at_context(0)


def test_an_unload_beside_a_load_says_nothing(
    engine: OpenVinoEngine, tiny: TinyModel, noted: list[int]
) -> None:
    load(engine, tiny.info, tiny.path, instance_id=A)
    gone: list[InstanceId] = []

    def unload_meanwhile(phase: str, share: float) -> None:
        if not gone:
            gone.append(A)
            engine.unload(A)

    load(engine, tiny.info, tiny.path, instance_id=B, progress=unload_meanwhile)
    assert (gone, noted) == ([A], [])


def test_in_f16_weights_of_8_bits_are_held_as_f16(tiny: TinyModel) -> None:
    """And in bf16 as they are."""
    kv = KvPrecision.F16
    plain, bf16, f16 = (
        estimate(tiny.info.computed_in(compute), weights=WeightPrecision.I8, kv=kv).weights_bytes
        for compute in ComputePrecision
    )
    assert plain == bf16
    assert f16 - plain == 4 * tiny.info.parameters
    footprints = MeasuredFootprints(
        weights=WeightPrecision.I8, kv=kv, compute=ComputePrecision.F16, path=None
    )
    assert footprints.footprint(tiny.info).weights_bytes == f16
