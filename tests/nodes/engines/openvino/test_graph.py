"""The graph computes what the architecture says, for every kind that it builds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mesh.domain.ids import RequestId
from mesh.domain.model import KvPrecision, WeightPrecision
from mesh.domain.request import SamplingParams
from mesh.runtime.engine import EngineRequest
from mesh_nodes.engines.openvino import graph
from mesh_nodes.engines.openvino.architecture import read_architecture
from mesh_nodes.engines.openvino.batch import BatchInputs, Work
from mesh_nodes.engines.openvino.checkpoint import Checkpoint
from mesh_nodes.engines.openvino.compilation import Compiler
from mesh_nodes.engines.openvino.kv_cache import ElasticKvCache
from mesh_nodes.engines.openvino.precisions import Precisions
from mesh_nodes.engines.openvino.rope import rope_tables
from mesh_nodes.engines.openvino.sequence import Sequence
from mesh_nodes.engines.openvino.weights import graph_weights
from tests.nodes.engines.openvino.pools import pool_of
from tests.nodes.engines.openvino.tiny import (
    CONTEXT_TOKENS_MAX,
    VOCABULARY,
    TinyModel,
    reference_logits,
    write_tiny,
)

CHUNKS = (5, 1, 40, 1, 1, 22)
"""Prefill in one piece, in chunks that cross blocks, and decodes between them."""
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def computed_logits(
    model: TinyModel, tokens: list[int], weights: WeightPrecision, kv: KvPrecision
) -> dict[int, Any]:
    """Logits after the last token of each chunk, by that token's place."""
    compiler = Compiler(threads=1, weights=weights, precisions=Precisions(kv=kv))
    compiled = compiler.compile(model.info, model.path, CONTEXT_TOKENS_MAX, lambda *_: None)
    request = compiled.model.create_infer_request()
    blocks = -(-len(tokens) // 32)
    cache = ElasticKvCache(compiled.model, request, range_blocks=blocks)
    inputs, pool = BatchInputs(compiled.model, request), pool_of(blocks, cache)
    sequence = Sequence(
        EngineRequest(
            request_id=RequestId("r"),
            prompt_tokens=tuple(tokens),
            sampling=SamplingParams(),
        ),
        context_tokens_max=CONTEXT_TOKENS_MAX,
        vocabulary_tokens=VOCABULARY,
    )
    logits = {}
    for count in CHUNKS:
        assert sequence.reserve(count, pool) == count
        sequence.length = sequence.computed + count  # so that the chunk's last token yields
        inputs.bind([Work(sequence, count)])
        request.infer(share_outputs=True)
        sequence.computed += count
        logits[sequence.computed - 1] = request.get_output_tensor(0).data.reshape(-1).copy()
    return logits


@pytest.mark.parametrize(
    ("kind", "tied", "rope_scaling"),
    [
        ("llama", False, None),
        ("llama", True, LLAMA3),
        ("llama", False, {"rope_type": "linear", "factor": 4.0}),
        ("qwen2", True, None),
        ("qwen3", False, None),
    ],
)
def test_logits_equal_an_independent_computation(
    tmp_path: Path, kind: str, tied: bool, rope_scaling: dict[str, Any] | None
) -> None:
    model = write_tiny(tmp_path / kind, kind, tied=tied, rope_scaling=rope_scaling)
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, sum(CHUNKS)).tolist()
    expected = reference_logits(model.path, tokens)
    logits = computed_logits(model, tokens, WeightPrecision.F16, KvPrecision.F32)
    for place, row in logits.items():
        np.testing.assert_allclose(row, expected[place], atol=2e-3, rtol=1e-3)


def test_llama3_scaling_matters_in_that_comparison(tmp_path: Path) -> None:
    """Else the comparison above could not see it."""
    plain = write_tiny(tmp_path / "plain")
    scaled = write_tiny(tmp_path / "scaled", rope_scaling=LLAMA3)
    tokens = list(range(60))
    difference = reference_logits(plain.path, tokens) - reference_logits(scaled.path, tokens)
    assert np.abs(difference[-1]).max() > 0.05


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_i8_weights_stay_close(tmp_path: Path, kind: str) -> None:
    """Quantised weights and activations move logits by less than a tenth of their spread."""
    model = write_tiny(tmp_path / kind, kind)
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, sum(CHUNKS)).tolist()
    expected = reference_logits(model.path, tokens)
    logits = computed_logits(model, tokens, WeightPrecision.I8, KvPrecision.F16)
    for place, row in logits.items():
        assert np.std(row - expected[place]) < 0.1 * np.std(expected[place])


def test_rope_tables_of_any_length_are_not_copied_into_the_graph(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy holds the interpreter's lock: seconds for a context of millions, and the node's link
    breaks meanwhile.
    """
    made: list[Any] = []

    def tables(*asked: Any) -> tuple[Any, Any]:
        made.extend(rope_tables(*asked))
        return made[-2], made[-1]

    monkeypatch.setattr(graph, "rope_tables", tables)
    architecture = read_architecture(tiny.path)
    weights = dict(graph_weights(architecture, Checkpoint(tiny.path), WeightPrecision.F16))
    ops = graph.build_graph(architecture, weights, CONTEXT_TOKENS_MAX).get_ops()
    held = {op.get_friendly_name(): op for op in ops}
    for name, table in zip((graph.COSINE, graph.SINE), made, strict=True):
        assert np.shares_memory(held[name].data, table.data)
