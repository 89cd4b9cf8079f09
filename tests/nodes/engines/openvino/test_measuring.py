"""What is particular to measuring with OpenVINO; tests/contract says what a measure is."""

from dataclasses import replace

import pytest

from mesh.domain.errors import EngineError
from mesh.domain.ids import InstanceId
from mesh.domain.model import KvPrecision
from mesh.domain.profile import IterationShape
from mesh.domain.request import SamplingParams
from mesh_nodes.engines.openvino.batch import BatchInputs
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from mesh_nodes.engines.openvino.sequence import sequences_of
from tests.nodes.engines.openvino.tiny import TinyModel
from tests.nodes.engines.serving import INSTANCE, load, request, run

PROMPT = tuple(range(10, 50))
GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)
MIXED = IterationShape(
    decode_batch=3, decode_context_tokens=100, prefill_tokens=20, prefill_past_tokens=50
)


def test_sequences_compute_the_shape_and_nothing_else() -> None:
    made = sequences_of(MIXED, vocabulary_tokens=97)
    assert [(s.decoding, s.computed, s.left) for s in made] == [(True, 99, 1)] * 3 + [
        (False, 50, 20)
    ]
    assert [s.append(5)[1] for s in made] == [None] * 4, "none ends with the token it yields"


def test_of_the_tokens_that_are_computed_no_two_are_alike() -> None:
    """A mixture would give like tokens to the same experts, which would take less time than any
    others.
    """
    made = sequences_of(MIXED, vocabulary_tokens=97)
    computed = [token for s in made for token in s.tokens(s.left)]
    assert len(computed) == 23
    assert len(set(computed)) == 23


@pytest.mark.parametrize("kv", list(KvPrecision))
def test_a_cache_that_was_measured_in_is_as_fresh(tiny: TinyModel, kv: KvPrecision) -> None:
    """What backs the blocks is a finite number in every precision, and never attended to."""
    engine = OpenVinoEngine(threads=1, kv=kv)
    load(engine, tiny.info, tiny.path, kv_blocks=16)
    fresh = run(engine, request("r", PROMPT, GREEDY)).tokens["r"]
    engine.unload(INSTANCE)
    load(engine, tiny.info, tiny.path, kv_blocks=16)
    engine.measure(INSTANCE, IterationShape(decode_batch=8, decode_context_tokens=64))
    assert run(engine, request("r", PROMPT, GREEDY)).tokens["r"] == fresh
    engine.close()


def test_a_measure_that_fails_gives_its_blocks_back_and_running_requests_go_on(
    loaded: OpenVinoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the plugin is not well")

    alone = run(loaded, request("alone", PROMPT, GREEDY)).tokens["alone"]
    broken = 0

    def break_one() -> None:
        nonlocal broken
        before = loaded.memory()
        with monkeypatch.context() as patched:
            patched.setattr(BatchInputs, "bind", fail)
            with pytest.raises(EngineError, match="not well"):
                loaded.measure(INSTANCE, MIXED)
        books = [replace(line, kv_held_bytes=0) for line in (*before, *loaded.memory())]
        assert books[0] == books[1]
        broken += 1

    assert run(loaded, request("r", PROMPT, GREEDY), between=break_one).tokens["r"] == alone
    assert broken == len(alone)
    whole = IterationShape(decode_batch=8, decode_context_tokens=256)
    assert loaded.measure(INSTANCE, whole) > 0, "all 64 blocks are to be had again"


def test_one_instance_is_measured_beside_another(loaded: OpenVinoEngine, tiny: TinyModel) -> None:
    second = InstanceId("i-2")
    load(loaded, tiny.info, tiny.path, instance_id=second)
    alone = run(loaded, request("r", PROMPT, GREEDY)).tokens["r"]
    beside = run(
        loaded,
        request("r", PROMPT, GREEDY),
        between=lambda: loaded.measure(second, MIXED),
    )
    assert beside.tokens["r"] == alone
