"""Loads without a compile: what is imported computes what would have been compiled, or is dropped.

The blobs are of tiny models of all three kinds, made from one model and used by another.
"""

import gc
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mesh.domain.errors import EngineError
from mesh.domain.ids import InstanceId
from mesh.domain.model import ComputePrecision, KvPrecision, WeightPrecision, stored_id
from mesh.domain.request import SamplingParams
from mesh.domain.steps import LoadTier
from mesh_nodes.engines.openvino import blob_maker, exported, own_graphs, shape_blob
from mesh_nodes.engines.openvino.architecture import read_architecture
from mesh_nodes.engines.openvino.blob_folder import BlobFolder
from mesh_nodes.engines.openvino.blob_maker import BlobJob, make_blob
from mesh_nodes.engines.openvino.compilation import CompiledGraph, Compiler
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from mesh_nodes.engines.openvino.precisions import PLAIN, Precisions
from mesh_nodes.engines.openvino.probe import probe_logits
from mesh_nodes.engines.openvino.shape_blob import ShapeBlob, cpu_fields
from tests.nodes.engines.openvino.preparing import prepare_here
from tests.nodes.engines.openvino.tiny import CONTEXT_TOKENS_MAX, VOCABULARY, TinyModel, write_tiny
from tests.nodes.engines.serving import INSTANCE, Outputs, load, request, run
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("blobs_soon")
OTHER, THIRD = InstanceId("i-2"), InstanceId("i-3")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama"},
    "llama tied, scaled": {"kind": "llama", "tied": True, "rope_scaling": LLAMA3},
    "qwen2": {"kind": "qwen2"},
    "qwen3 tied": {"kind": "qwen3", "tied": True},
}
PRECISIONS = (
    PLAIN,
    Precisions(kv=KvPrecision.U8),
    # Where the CPU has it not, it is f32 once more.
    Precisions(compute=ComputePrecision.BF16, kv=KvPrecision.BF16),
)


def compiler(
    blobs: Path | None = None,
    *,
    precisions: Precisions = PLAIN,
    threads: int = 1,
    weights: WeightPrecision = WeightPrecision.I8,
) -> Compiler:
    folder = None if blobs is None else BlobFolder(blobs)
    return Compiler(threads=threads, weights=weights, precisions=precisions, blobs=folder)


def prepared(
    folder: Path, weights: WeightPrecision = WeightPrecision.I8, **shape: Any
) -> TinyModel:
    model = write_tiny(folder, **shape)
    prepare_here(model.path, weights)
    return model


def compiled(
    by: Compiler, model: TinyModel, context_tokens_max: int = CONTEXT_TOKENS_MAX
) -> CompiledGraph:
    return by.compile(model.info, model.path, context_tokens_max, lambda *_: None)


def logits(graph: CompiledGraph) -> Any:
    return probe_logits(graph, vocabulary_tokens=VOCABULARY, context_tokens_max=CONTEXT_TOKENS_MAX)


def job(
    model: TinyModel,
    folder: Path,
    precisions: Precisions = PLAIN,
    weights: WeightPrecision = WeightPrecision.I8,
) -> BlobJob:
    by = compiler(precisions=precisions, weights=weights)
    layout = by.layout(model.path)
    assert layout is not None
    return BlobJob(
        key=by.blob_key(read_architecture(model.path), CONTEXT_TOKENS_MAX, layout),
        folder=str(folder),
        model_path=str(model.path),
        context_tokens_max=CONTEXT_TOKENS_MAX,
        threads=1,
        weights=weights,
        precisions=precisions,
    )


def make(wanted: BlobJob) -> None:
    with BlobFolder(Path(wanted.folder)).scratch() as scratch:
        make_blob(wanted, scratch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return prepared(tmp_path_factory.mktemp("models") / "m", kind="llama")


@pytest.fixture(scope="module")
def made(model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model's blob, for copies."""
    folder = tmp_path_factory.mktemp("blobs")
    make(job(model, folder))
    return folder


@pytest.fixture
def blob(made: Path, tmp_path: Path) -> Path:
    """The model's blob in a folder of the test's own."""
    (only,) = shutil.copytree(made, tmp_path / "blobs").iterdir()
    return only


@pytest.mark.parametrize(
    ("shape", "precisions"),
    [*(("llama", precisions) for precisions in PRECISIONS), *((name, PLAIN) for name in SHAPES)][
        1:
    ],
    ids=str,
)
def test_another_model_of_the_shape_computes_bit_by_bit_the_same(
    shape: str, precisions: Precisions, tmp_path: Path
) -> None:
    first = prepared(tmp_path / "first", seed=0, **SHAPES[shape])
    second = prepared(tmp_path / "second", seed=1, **SHAPES[shape])
    try:
        make(job(first, tmp_path / "blobs", precisions))
    except EngineError as error:
        if precisions.compute is ComputePrecision.BF16 and "amx_bf16" in cpu_fields().get(
            "flags", ""
        ):
            pytest.skip(f"no blob is kept, as nobody has seen with AMX yet: {error}")
        raise
    plain = compiler(precisions=precisions)
    imported = compiled(compiler(tmp_path / "blobs", precisions=precisions), second)
    expected = compiled(plain, second)
    assert (imported.imported, expected.imported) == (True, False)
    assert np.array_equal(logits(imported), logits(expected))
    assert not np.array_equal(logits(imported), logits(compiled(plain, first)))


def test_weights_are_read_ahead_until_the_first_run_is_over_or_nobody_wants_them(
    model: TinyModel, blob: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def read_ahead(path: Path) -> Callable[[], None]:
        events.append(path.name)
        return lambda: events.append("over")

    monkeypatch.setattr(shape_blob, "read_ahead", read_ahead)
    by = compiler(blob.parent)
    layout = by.layout(model.path)
    assert layout is not None
    graph = compiled(by, model)
    assert (graph.imported, events) == (True, [layout.path.name])
    with graph.first_run():
        logits(graph)
    assert events == [layout.path.name, "over"]
    events.clear()
    bound = BlobFolder(blob.parent).bind(blob.stem, layout)
    assert bound is not None
    del bound
    gc.collect()
    assert events == [layout.path.name, "over"]


def test_the_second_load_is_an_import_of_same_tokens(model: TinyModel, tmp_path: Path) -> None:
    engine = OpenVinoEngine(threads=1, blobs_path=tmp_path / "blobs")
    phases: list[str] = []

    tiers: list[LoadTier] = []

    def tokens() -> list[int]:
        phases.clear()
        loaded = load(
            engine, model.info, model.path, progress=lambda phase, _: phases.append(phase)
        )
        tiers.append(loaded.tier)
        got = run(engine, request("r", range(10, 60))).tokens["r"]
        engine.unload(INSTANCE)
        return got

    assert engine.prepared([model.path]) == ()
    first = tokens()
    assert "compile" in phases
    assert engine.blobs_made(60.0)
    held, as_is = engine.prepared([model.path])
    assert (held.model_id, held.tier) == (model.path.name, LoadTier.PREPARED)
    assert as_is.model_id == f"{model.path.name}+i8", "the same, for who says so"
    assert held.context_tokens_max == CONTEXT_TOKENS_MAX
    assert [path.suffix for path in (tmp_path / "blobs").iterdir()] == [".blob"]
    assert tokens() == first
    assert "import compiled" in phases
    assert "compile" not in phases
    engine.close()
    # A node that is started again finds what an earlier one made.
    engine = OpenVinoEngine(threads=1, blobs_path=tmp_path / "blobs")
    unprepared = write_tiny(tmp_path / "unprepared", seed=3)
    same_shape = prepared(tmp_path / "same-shape", seed=4)
    told = engine.prepared([same_shape.path, model.path, unprepared.path])
    found = list(dict.fromkeys(stored_id(each.model_id) for each in told))
    assert found == ["same-shape", model.path.name]
    assert tokens() == first
    assert "import compiled" in phases
    assert tiers == [LoadTier.DISK, LoadTier.PREPARED, LoadTier.PREPARED]
    (only,) = (tmp_path / "blobs").iterdir()
    only.unlink()
    assert engine.prepared([same_shape.path, model.path]) == ()
    engine.close()


def test_loads_of_a_shape_whose_blob_is_being_made_wait_for_it(
    model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One compile and one blob; the node tells of those behind the first that they import."""
    monkeypatch.setattr(blob_maker, "WAIT_COMPILES_MAX", 1e6)
    engine = OpenVinoEngine(threads=1, blobs_path=tmp_path / "blobs")
    others = [prepared(tmp_path / name, kind="llama", seed=7) for name in ("a", "b")]
    stored = [model.path, others[1].path]
    phases: list[str] = []
    told: list[set[str]] = []

    def note(phase: str, share: float) -> None:
        phases.append(phase)
        if phase == "wait for the compile":
            waiting.start()

    def look() -> None:
        """As the node's thread that looks at the models at hand does."""
        until(lambda: bool(engine.prepared(stored)))
        told.append({stored_id(held.model_id) for held in engine.prepared(stored)})

    waiting = threading.Thread(target=look)
    tiers = [load(engine, model.info, model.path).tier]
    for number, other in enumerate(others):
        name = InstanceId(f"i-{number + 2}")
        tiers.append(load(engine, other.info, other.path, instance_id=name, progress=note).tier)
    waiting.join()
    assert tiers == [LoadTier.DISK, LoadTier.DISK, LoadTier.PREPARED]
    assert phases.count("wait for the compile") == 1
    assert phases.count("import compiled") == 2
    assert "compile" not in phases
    assert told == [{model.path.name, "b"}]
    engine.close()


def test_instances_of_a_model_share_what_was_compiled(
    engine: OpenVinoEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """While another comes and goes in another thread, one's tokens stay what they are; the last to
    go takes the model along, which is of no other test."""
    own = write_tiny(tmp_path / "own")
    assert load(engine, own.info, own.path).tier is LoadTier.DISK
    alone = run(engine, request("r", range(10, 60), SamplingParams(max_tokens=150))).tokens["r"]
    other = InstanceId("i-2")
    tiers = []

    def come_and_go() -> None:
        for _ in range(30):
            tiers.append(load(engine, own.info, own.path, instance_id=other).tier)
            engine.unload(other)

    with caplog.at_level(logging.INFO):
        loading = threading.Thread(target=come_and_go)
        loading.start()
        while loading.is_alive():
            again = run(engine, request("r", range(10, 60), SamplingParams(max_tokens=150)))
            assert again.tokens["r"] == alone
        loading.join()
    assert tiers == [LoadTier.HOST] * 30
    assert caplog.text.count("shared with another instance") == 30
    load(engine, own.info, own.path, instance_id=other)
    engine.unload(INSTANCE)
    engine.submit(other, request("r", range(10, 60), SamplingParams(max_tokens=1)))
    assert engine.step(other, 64).outputs[0].token_ids == (alone[0],)
    assert str(own.path) in Path("/proc/self/maps").read_text()
    engine.unload(other)
    assert str(own.path) not in Path("/proc/self/maps").read_text()


@pytest.fixture
def alternating(
    model: TinyModel, blob: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OpenVinoEngine]:
    """Two instances of one model, one of which has a compiled model of its own."""
    monkeypatch.setattr(own_graphs, "SWITCHES", 4)
    engine = OpenVinoEngine(threads=1, blobs_path=blob.parent)
    for name in (INSTANCE, OTHER):
        load(engine, model.info, model.path, instance_id=name)
    alone = alternated(engine)
    assert shared(engine) == [True], "nobody has said how much memory there is"
    engine.bound_memory(1 << 40)
    assert alternated(engine) == alone
    until(lambda: shared(engine) == [True, False])
    assert alternated(engine) == alone
    yield engine
    engine.close()


def test_a_node_that_rests_makes_compiled_models_of_their_own(model: TinyModel, blob: Path) -> None:
    engine = OpenVinoEngine(threads=1, blobs_path=blob.parent)
    names = [INSTANCE, OTHER, THIRD]
    for name in names:
        load(engine, model.info, model.path, instance_id=name)
    alone = alternated(engine)
    engine.bound_memory(1 << 40)
    assert shared(engine) == [True], "it has computed a moment ago"

    def beat() -> bool:
        engine.bound_memory(1 << 40)
        return len(shared(engine)) == len(names)

    until(beat)
    assert sorted(shared(engine)) == [False, False, True]
    assert alternated(engine) == alone
    engine.close()


def alternated(engine: OpenVinoEngine) -> dict[str, list[int]]:
    """The tokens of one request beside two of the other instance, an iteration each in turn."""
    outputs, asked = Outputs(), {INSTANCE: ["r"], OTHER: ["s", "t"]}
    for instance_id, names in asked.items():
        for name in names:
            engine.submit(instance_id, request(name, range(10, 20 + 2 * ord(name) % 9)))
    while len(outputs.finished) < 3:
        for instance_id in asked:
            outputs.take(engine.step(instance_id, 64))
    return outputs.tokens


def shared(engine: OpenVinoEngine) -> list[bool]:
    """For each compiled model, whether a further instance would share it."""
    loaded = engine._loaded()
    graphs = {instance.graph: instance.order for instance in loaded}
    return [engine._compiler.shared(order) is graph for graph, order in graphs.items()][::-1]


def weights_bytes(engine: OpenVinoEngine) -> list[int]:
    return [books.weights_bytes for books in engine.memory()]


def test_a_compiled_model_of_ones_own_is_booked_and_goes_first(
    alternating: OpenVinoEngine, model: TinyModel
) -> None:
    whole = alternating.footprint(model.info).at_context(CONTEXT_TOKENS_MAX)
    own_bytes = whole.weights_bytes - whole.shared_bytes
    assert weights_bytes(alternating) == [whole.weights_bytes] * 2
    # What is booked grows by a further instance's own part: that much is not there.
    booked_bytes = 2 * whole.instance_bytes(64)
    alternating.bound_memory(booked_bytes)
    assert len(shared(alternating)) == 2
    load(alternating, model.info, model.path, instance_id=THIRD, kv_blocks=1)
    assert shared(alternating) == [True]
    assert weights_bytes(alternating) == [whole.weights_bytes, own_bytes, own_bytes]
    alternated(alternating)


def test_less_memory_takes_a_compiled_model_of_ones_own(
    alternating: OpenVinoEngine, model: TinyModel
) -> None:
    def shares_again() -> bool:
        """The bound is told again and again, as with heartbeats."""
        alternating.bound_memory(alternating.footprint(model.info).instance_bytes(64))
        return shared(alternating) == [True]

    until(shares_again)
    alternated(alternating)
    assert shared(alternating) == [True]


def test_a_compiled_model_of_ones_own_is_shared_when_that_of_the_others_goes(
    alternating: OpenVinoEngine, model: TinyModel
) -> None:
    """Whichever instance goes: the books have the weights once as long as there is one."""
    alternating.unload(INSTANCE)
    assert shared(alternating) == [True]
    third = load(alternating, model.info, model.path, instance_id=THIRD)
    assert third.tier is LoadTier.HOST
    assert len(shared(alternating)) == 1


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flipped_at(place: Callable[[int], int]) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[place(len(content))] ^= 1
        path.write_bytes(content)

    return flip


def of_another_version(path: Path) -> None:
    """With a checksum of its own: OpenVINO itself has to refuse it."""
    content = path.read_bytes()
    preface, head_and_graph = content[:4096], content[4096:]
    sizes = json.loads(preface)
    head = head_and_graph[: sizes["head_bytes"]].replace(b";ov=20", b";ov=19", 1)
    graph = head_and_graph[sizes["head_bytes"] :]
    changed = ShapeBlob(head=head, graph=graph, weights_bytes=sizes["weights_bytes"])
    changed.write(path, sizes["key"])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": truncated,
    "empty": empty,
    "flipped in the first page": flipped_at(lambda _: 20),
    "flipped in the constants": flipped_at(lambda _: 5000),
    "flipped in the graph": flipped_at(lambda size: size - 100),
    "of another OpenVINO": of_another_version,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_blob_is_dropped_and_the_model_compiled(
    damage: Callable[[Path], None], model: TinyModel, blob: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert compiled(compiler(blob.parent), model).imported
    damage(blob)
    with caplog.at_level(logging.WARNING):
        graph = compiled(compiler(blob.parent), model)
    assert not graph.imported
    assert not blob.exists()
    assert blob.name in caplog.text
    assert np.array_equal(logits(graph), logits(compiled(compiler(), model)))


def test_a_blob_that_is_written_to_stays_and_is_compiled(model: TinyModel, blob: Path) -> None:
    """So would one whose weights somebody has open for writing: nothing is known against it."""
    with blob.open("ab"):
        assert not compiled(compiler(blob.parent), model).imported
    assert compiled(compiler(blob.parent), model).imported


def test_a_blob_of_anothers_name_is_dropped(model: TinyModel, blob: Path, tmp_path: Path) -> None:
    """Though it is sound in itself."""
    other = prepared(tmp_path / "other", kind="qwen3")
    place = blob.with_stem(job(other, blob.parent).key)
    blob.rename(place)
    assert not compiled(compiler(blob.parent), other).imported
    assert not place.exists()


def test_a_blob_outlives_its_removal_while_it_is_used(model: TinyModel, blob: Path) -> None:
    graph = compiled(compiler(blob.parent), model)
    blob.unlink()
    assert np.array_equal(logits(graph), logits(compiled(compiler(), model)))


def test_what_computes_something_else_is_not_kept(
    model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here its norms have another epsilon than those that were compiled."""

    def wrong(*given: Any) -> ShapeBlob:
        right = exported.without_weights(*given)
        graph = right.graph.replace(b'epsilon="9', b'epsilon="1')
        assert graph != right.graph
        return ShapeBlob(head=right.head, graph=graph, weights_bytes=right.weights_bytes)

    monkeypatch.setattr(blob_maker, "without_weights", wrong)
    with pytest.raises(EngineError, match="imported and compiled differ"):
        make(job(model, tmp_path / "blobs"))
    assert list((tmp_path / "blobs").iterdir()) == []
