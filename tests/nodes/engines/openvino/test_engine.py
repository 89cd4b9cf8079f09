"""What the engine does, on tiny models whose tokens are known: counts, continuations, failures."""

import gc
import os
import threading
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import openvino as ov
import pytest

from mesh.domain.errors import EngineError, ModelError, OutOfMemory, TornModel, UnsupportedModel
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.model import ComputePrecision, KvPrecision, WeightPrecision
from mesh.domain.reasons import FinishReason
from mesh.domain.request import SamplingParams, TokenBias
from mesh_nodes.engines.openvino.compilation import Compiler, capable
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from mesh_nodes.engines.openvino.instance import Instance
from mesh_nodes.lanes import LOADING_NICE
from tests.nodes.engines.openvino.tiny import (
    CONTEXT_TOKENS_MAX,
    TinyModel,
    reference_logits,
    write_tiny,
)
from tests.nodes.engines.serving import INSTANCE, Outputs, load, request, run

PROMPT = tuple(range(10, 50))


def greedy(max_tokens: int = 16) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def test_greedy_tokens_are_the_reference_models(loaded: OpenVinoEngine, tiny: TinyModel) -> None:
    got = run(loaded, request("r", PROMPT, greedy())).tokens["r"]
    logits = reference_logits(tiny.path, [*PROMPT, *got])
    assert got == logits.argmax(axis=1)[len(PROMPT) - 1 : -1].tolist()


def test_what_a_load_takes_at_least_is_measured_without_one(engine: OpenVinoEngine) -> None:
    assert 0.05 < engine.least_load_s() < 60.0
    assert engine.memory() == ()


def test_without_a_seed_the_requests_id_gives_one(loaded: OpenVinoEngine) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    first = run(loaded, request("a", PROMPT, sampling), request("b", PROMPT, sampling)).tokens
    assert first["a"] != first["b"]
    assert run(loaded, request("a", PROMPT, sampling)).tokens["a"] == first["a"]


def test_a_bias_decides_and_a_stop_that_comes_too_early_is_left_out(loaded: OpenVinoEngine) -> None:
    chosen = SamplingParams(max_tokens=6, logit_bias=(TokenBias(token_id=9, bias=100.0),))
    assert run(loaded, request("r", PROMPT, chosen)).tokens["r"] == [9] * 6
    late = replace(chosen, min_tokens=4)
    outputs = run(loaded, request("r", PROMPT, late, stops=(9,)))
    *before, last = outputs.tokens["r"]
    assert (len(before), last) == (4, 9)
    assert 9 not in before
    assert outputs.finished["r"] is FinishReason.STOP


def test_out_of_blocks_starves_and_a_grow_feeds(engine: OpenVinoEngine, tiny: TinyModel) -> None:
    load(engine, tiny.info, tiny.path, kv_blocks=3)
    engine.submit(INSTANCE, request("a", PROMPT, greedy(60)))
    engine.submit(INSTANCE, request("b", PROMPT, greedy(60)))
    first = engine.step(INSTANCE, 200)
    assert first.prefill_tokens == 40 + 32
    assert first.prefill_left == ((RequestId("b"), 8),)
    second = engine.step(INSTANCE, 200)
    assert second.starved == (RequestId("b"),)
    assert [output.request_id for output in second.outputs] == ["a"]
    assert engine.resize_kv(INSTANCE, 4).kv_blocks == 4
    assert [output.request_id for output in engine.step(INSTANCE, 200).outputs] == ["a", "b"]
    while len((result := engine.step(INSTANCE, 200)).starved) < 2:
        assert result.outputs
    assert not result.outputs
    engine.abort(INSTANCE, RequestId("b"))
    assert [output.request_id for output in engine.step(INSTANCE, 200).outputs] == ["a"]


def test_blocks_are_taken_as_tokens_come(loaded: OpenVinoEngine) -> None:
    loaded.submit(INSTANCE, request("r", PROMPT, greedy(200)))
    used = [loaded.step(INSTANCE, 16).kv_blocks_used for _ in range(30)]
    assert used[:3] == [1, 1, 2]
    assert used[25] == 2, "40 prompt tokens and 23 of the output computed"
    assert used[28] == 3


@pytest.mark.parametrize(
    ("prompt", "output", "reason"),
    [
        ((), (), "no prompt"),
        (range(90), range(6), "all of its"),
        ([5] * 256, (), "no room"),
        ((1, 97), (), "vocabulary"),
        ((-1,), (), "vocabulary"),
    ],
)
def test_a_request_that_cannot_run_is_refused(
    loaded: OpenVinoEngine, prompt: tuple[int, ...], output: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(EngineError, match=reason):
        loaded.submit(INSTANCE, request("r", prompt, greedy(6), output=output))
    assert run(loaded, request("r", PROMPT, greedy())).finished


def test_two_instances_keep_apart(loaded: OpenVinoEngine, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other", "qwen3", seed=5)
    second = InstanceId("i-2")
    alone = run(loaded, request("r", PROMPT, greedy())).tokens["r"]
    load(loaded, other.info, other.path, instance_id=second)
    loaded.submit(second, request("r", PROMPT, greedy()))
    interleaved = run(
        loaded, request("r", PROMPT, greedy()), between=lambda: loaded.step(second, 8)
    )
    assert interleaved.tokens["r"] == alone
    assert [books.instance_id for books in loaded.memory()] == ["i-1", "i-2"]
    loaded.unload(second)
    loaded.unload(second)
    assert [books.instance_id for books in loaded.memory()] == ["i-1"]
    with pytest.raises(EngineError, match="not loaded"):
        loaded.step(second, 8)


@pytest.mark.parametrize("kv", list(KvPrecision))
@pytest.mark.parametrize("precision", list(ComputePrecision))
def test_the_footprint_names_the_size_of_a_block(
    tiny: TinyModel, kv: KvPrecision, precision: ComputePrecision
) -> None:
    """Whatever the plugin makes of what it cannot pair."""
    engine = OpenVinoEngine(threads=1, precision=precision, kv=kv)
    before = engine.footprint(tiny.info)
    after = load(engine, tiny.info, tiny.path, context_tokens_max=256).footprint
    assert after == before.at_context(256)
    assert run(engine, request("r", PROMPT, greedy())).finished
    engine.close()


def test_a_model_may_be_computed_in_another_precision_than_its_node_s(tiny: TinyModel) -> None:
    """Beside itself as the node has it, of which it shares nothing."""
    can = ComputePrecision.BF16 in capable(ov.Core())
    compiler = Compiler(threads=1, weights=WeightPrecision.I8)
    plain, other = (
        compiler.compile(model, tiny.path, CONTEXT_TOKENS_MAX, lambda *_: None)
        for model in (tiny.info, tiny.info.computed_in(ComputePrecision.BF16))
    )
    hints = [
        graph.model.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        for graph in (plain, other)
    ]
    assert hints == ["f32", "bf16" if can else "f32"]
    assert plain is not other


def test_i8_weights_serve_with_and_without_prepared_files(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m")
    tokens = []
    for prepares in (False, True):
        engine = OpenVinoEngine(threads=1, weights=WeightPrecision.I8)
        if prepares:
            engine.prepare(model.info, model.path, lambda *_: None)
        load(engine, model.info, model.path)
        tokens.append(run(engine, request("r", PROMPT, greedy())).tokens["r"])
        engine.close()
    assert tokens[0] == tokens[1]


def test_a_load_beyond_the_available_memory_is_refused_with_both_numbers(tiny: TinyModel) -> None:
    engine = OpenVinoEngine(threads=1, available_bytes=lambda: 80 * 2**20)
    with pytest.raises(OutOfMemory, match=r"takes 8\d\.\d MiB, 80\.0 MiB are available"):
        load(engine, tiny.info, tiny.path, kv_blocks=2000)


def test_a_load_that_fails_late_leaves_nothing_and_the_engine_serves(tmp_path: Path) -> None:
    """A KV range beyond the address space fails after the compile. The error is still held when the
    model's file, which is of no other test, is looked for among the mapped ones."""
    own = write_tiny(tmp_path / "own")
    engine = OpenVinoEngine(threads=1, available_bytes=lambda: 2**62)
    engine.prepare(own.info, own.path, lambda *_: None)
    with pytest.raises(OutOfMemory, match=r"reserved|out of memory") as failed:
        load(engine, own.info, own.path, kv_blocks=2**36)
    assert failed.value.hint
    assert str(own.path) not in Path("/proc/self/maps").read_text()
    assert engine.memory() == ()
    load(engine, own.info, own.path)
    assert str(own.path) in Path("/proc/self/maps").read_text()
    assert run(engine, request("r", PROMPT, greedy())).finished
    engine.close()
    assert str(own.path) not in Path("/proc/self/maps").read_text()


def test_an_instance_that_cannot_warm_up_is_booked_no_more(
    engine: OpenVinoEngine, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are nobody's: else the cached ones of others had to make room for them."""
    pools: list[weakref.ref[object]] = []

    def warm(instance: Instance, *_: object) -> None:
        pools.append(weakref.ref(instance._pool))
        raise RuntimeError("no kernel")

    monkeypatch.setattr(Instance, "_warm", warm)
    with pytest.raises((EngineError, RuntimeError), match="no kernel"):
        load(engine, tiny.info, tiny.path)
    gc.collect()
    assert [pool() for pool in pools] == [None]


def test_one_that_cannot_come_back_may_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of its files, of memory, or of a first run that ends well."""
    available = [1 << 50]
    model = write_tiny(tmp_path / "m")
    engine = OpenVinoEngine(threads=1, available_bytes=lambda: available[0])
    load(engine, model.info, model.path)
    alone = run(engine, request("alone", PROMPT, greedy())).tokens["alone"]
    engine.submit(INSTANCE, request("r", PROMPT, greedy()))
    engine.step(INSTANCE, 8)
    engine.swap(INSTANCE, False)
    assert str(model.path) not in Path("/proc/self/maps").read_text()
    model.path.rename(tmp_path / "away")
    with pytest.raises((EngineError, ModelError)):
        engine.swap(INSTANCE, True)
    (tmp_path / "away").rename(model.path)
    available[0] = 0
    with pytest.raises(OutOfMemory):
        engine.swap(INSTANCE, True)
    available[0] = 1 << 50
    with monkeypatch.context() as patch:
        patch.setattr(Instance, "_warm", fails_in_its_first_run)
        with pytest.raises(EngineError, match="no kernel"):
            engine.swap(INSTANCE, True)
    (books,) = engine.memory()
    assert (books.weights_bytes, books.kv_blocks_used) == (0, 1)
    engine.swap(INSTANCE, True)
    outputs = Outputs()
    while not outputs.finished:
        outputs.take(engine.step(INSTANCE, 64))
    assert outputs.tokens["r"] == alone
    engine.close()


def fails_in_its_first_run(*_: object) -> None:
    raise RuntimeError("no kernel")


def test_another_architecture_is_refused_by_name(engine: OpenVinoEngine, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m")
    config = model.path / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"mamba"'))
    with pytest.raises(UnsupportedModel, match="mamba") as refused:
        load(engine, model.info, model.path)
    assert "llama, qwen2, qwen3" in refused.value.hint


def test_a_torn_file_is_refused_by_name(engine: OpenVinoEngine, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m")
    file = model.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(TornModel, match=r"model\.safetensors"):
        load(engine, model.info, model.path)


def test_no_thread_that_computes_iterations_inherits_the_niceness_of_loads(tmp_path: Path) -> None:
    """Not even after a time without any instance. It could not be taken back."""
    model = write_tiny(tmp_path / "m")
    engine = OpenVinoEngine(threads=2)
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    for _ in range(2):
        loading = threading.Thread(target=load_nicely, args=(engine, model, own + LOADING_NICE))
        loading.start()
        loading.join()
        before_ns = run_ns()
        run(engine, *(request(f"r{n}", PROMPT, greedy(64)) for n in range(4)))
        ran_ns = {thread: ns - before_ns.get(thread, 0) for thread, ns in run_ns().items()}
        engine.unload(INSTANCE)
        nicely_ns = sum(ns for (_, nice), ns in ran_ns.items() if nice > own)
        assert nicely_ns < 0.05 * sum(ran_ns.values())
    engine.close()


def load_nicely(engine: OpenVinoEngine, model: TinyModel, nice: int) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
    load(engine, model.info, model.path)


def run_ns() -> dict[tuple[int, int], int]:
    """How long each thread of this process has run, by its id and niceness."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError, FileNotFoundError):  # it has ended meanwhile
            nice = os.getpriority(os.PRIO_PROCESS, int(task.name))
            found[int(task.name), nice] = int((task / "schedstat").read_text().split()[0])
    return found


@pytest.mark.parametrize("weights", WeightPrecision)
def test_what_no_graph_can_is_refused_early(weights: WeightPrecision, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m", rope_scaling={"rope_type": "yarn", "factor": 4.0})
    engine = OpenVinoEngine(threads=1, weights=weights)
    with pytest.raises(UnsupportedModel, match="yarn"):
        engine.prepare(model.info, model.path, lambda *_: None)
    engine.close()
