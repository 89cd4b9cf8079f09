"""What counters tell of operators, and what the copy that counts may take."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.domain.errors import EngineError, OutOfMemory
from mesh.domain.model import ModelFormat, WeightPrecision
from mesh.domain.operators import DENSE, MIXTURE, Role
from mesh.domain.profile import IterationShape
from mesh.domain.request import SamplingParams
from mesh_nodes.engines.openvino import counting
from mesh_nodes.engines.openvino.compilation import Compiler
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from tests.contract.engine_contract import StoredModel
from tests.nodes.engines.openvino.families import families
from tests.nodes.engines.openvino.test_families import COMPUTED, ROUNDED, imported
from tests.nodes.engines.serving import INSTANCE, request, run
from tests.support.depth import DEEP
from tests.support.profiles import MODEL

PROMPT = tuple(range(10, 50))
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
DECODE = IterationShape(decode_batch=4, decode_context_tokens=60)
PREFILL = IterationShape(prefill_tokens=32, prefill_past_tokens=32)
MEMORY_BYTES = 2**30


@pytest.fixture
def counting_engine(loaded: OpenVinoEngine) -> OpenVinoEngine:
    loaded.bound_memory(MEMORY_BYTES)
    return loaded


def test_operators_of_an_iteration_take_no_longer_than_it(counting_engine: OpenVinoEngine) -> None:
    """Counters are means of all iterations, from which those of one are told."""
    totals = dict.fromkeys(Role, 0.0)
    for shape in (DECODE, PREFILL) * 20:
        counted = counting_engine.count_operators(INSTANCE, shape)
        for name, seconds in counted.operators:
            totals[Role(name)] += seconds
        assert sum(seconds for _, seconds in counted.operators) < 1.5 * counted.elapsed_s
    assert totals[Role.GATE_UP] > 0
    assert totals[Role.ATTENTION] > 0
    assert {role for role, seconds in totals.items() if seconds} <= DENSE


def test_requests_run_as_before_beside_what_is_counted(counting_engine: OpenVinoEngine) -> None:
    alone = run(counting_engine, request("alone", PROMPT, GREEDY)).tokens["alone"]

    def count() -> None:
        counting_engine.count_operators(INSTANCE, PREFILL)

    assert run(counting_engine, request("r", PROMPT, GREEDY), between=count).tokens["r"] == alone


def test_the_copy_is_booked_while_it_is_there_and_goes_when_it_is_not_used(
    counting_engine: OpenVinoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (before,) = counting_engine.memory()
    counting_engine.count_operators(INSTANCE, DECODE)
    (counted,) = counting_engine.memory()
    assert counted.weights_bytes > before.weights_bytes
    counting_engine.bound_memory(MEMORY_BYTES)
    assert counting_engine.memory() == (counted,), "it has just counted"
    monkeypatch.setattr(counting, "UNUSED_S", 0.0)
    counting_engine.bound_memory(MEMORY_BYTES)
    assert counting_engine.memory()[0].weights_bytes == before.weights_bytes
    counting_engine.count_operators(INSTANCE, DECODE)
    counting_engine.unload(INSTANCE)
    assert counting_engine.memory() == ()


def test_what_is_counted_is_computed_by_so_many_cores(counting_engine: OpenVinoEngine) -> None:
    copies = []
    for cores in (1, 1, None):
        counting_engine.count_operators(INSTANCE, DECODE, cores)
        copy = counting_engine._counters._copy
        assert copy is not None
        threads = copy.bound.graph.model.get_property("INFERENCE_NUM_THREADS")
        assert threads == (cores or counting_engine._threads)
        copies.append(copy)
    assert copies[0] is copies[1]


def test_without_memory_for_the_copy_nothing_is_counted(counting_engine: OpenVinoEngine) -> None:
    counting_engine.bound_memory(1)
    with pytest.raises(OutOfMemory):
        counting_engine.count_operators(INSTANCE, DECODE)
    assert counting_engine.measure(INSTANCE, DECODE) > 0


def test_of_an_exported_graph_no_operators_are_known(engine: OpenVinoEngine) -> None:
    exported = replace(MODEL, format=ModelFormat.OPENVINO_IR)
    with pytest.raises(EngineError, match="an exported graph, of which no operators are counted"):
        engine._compiler.counted(StoredModel(path=Path(), info=exported).order(INSTANCE))


@pytest.mark.parametrize("name", COMPUTED if DEEP else ROUNDED)
def test_whatever_a_decoder_computes_has_the_role_of_an_operator(tmp_path: Path, name: str) -> None:
    stored = imported(tmp_path, families()[name])
    compiler = Compiler(threads=1, weights=WeightPrecision.F16)
    order = StoredModel(path=stored.path, info=stored.info).order(INSTANCE)
    graph = compiler.counted(order)
    known, roles = counting.roles_of(graph.model), defaultdict[Role, set[str]](set)
    for operation in graph.model.get_runtime_model().get_ops():
        kind = operation.get_rt_info()["layerType"].astype(str)
        if role := known.get(operation.get_friendly_name()):
            roles[role].add(kind)
        else:
            assert kind in ("Input", "Output", "Const", "Convert", "Reshape"), kind
    assert roles[Role.ATTENTION] >= {"PagedAttention"}
    assert roles[Role.NORM] >= {"RMS"}
    of_experts = stored.info.mixture is not None
    wanted = (MIXTURE if of_experts else DENSE) - {Role.KV_WRITE, Role.ACTIVATION, Role.RESIDUAL}
    assert wanted <= set(roles), "the plugin fuses what is left out into others"
    assert ("GatherMatmul" in roles[Role.EXPERTS]) == of_experts
