"""Engines that embed make transformers' vectors and scores, of encoders and of decoders."""

from pathlib import Path

import numpy as np
import pytest

from mesh.domain.model import Task
from mesh.domain.profile import IterationShape
from mesh.runtime.engine import Engine
from tests.nodes.engines.openvino.embedders import (
    EMBED,
    SCORE,
    cosines,
    embedders,
    imported,
    loaded,
    vectors,
    write_embedder,
)
from tests.nodes.engines.serving import INSTANCE, load


@pytest.fixture
def engine(engine: Engine) -> Engine:
    if not engine.capabilities.embeds:
        pytest.skip("this engine computes text alone")
    return engine


@pytest.mark.parametrize("budget", [24, 200])
@pytest.mark.parametrize("name", EMBED)
def test_embeddings_are_those_of_transformers(
    engine: Engine, tmp_path: Path, name: str, budget: int
) -> None:
    """The prompts are computed beside each other, in chunks where the model can be."""
    loaded(engine, tmp_path, name, Task.EMBED)
    found = vectors(engine, *[case["prompt"] for case in embedders()[name]["cases"]], budget=budget)
    assert min(cosines(found, name)) >= 0.9999
    assert [np.linalg.norm(vector) for vector in found] == pytest.approx([1.0] * 3, abs=1e-5)
    (books,) = engine.memory()
    assert books.kv_blocks_used == 0


@pytest.mark.parametrize("name", [*EMBED, *SCORE])
def test_an_instance_is_measured_and_embeds_all_the_same(
    engine: Engine, tmp_path: Path, name: str
) -> None:
    task = Task.RERANK if name in SCORE else Task.EMBED
    loaded(engine, tmp_path, name, task)
    cases = [case["prompt"] for case in embedders()[name]["cases"]]
    before = vectors(engine, *cases)
    for shape in (
        IterationShape(prefill_tokens=40),
        IterationShape(prefill_tokens=9, prefill_past_tokens=32),
        IterationShape(decode_batch=2, decode_context_tokens=9),
    ):
        assert engine.measure(INSTANCE, shape) > 0
    np.testing.assert_allclose(vectors(engine, *cases), before, atol=1e-6)
    (books,) = engine.memory()
    assert books.kv_blocks_used == 0


@pytest.mark.parametrize("name", SCORE)
def test_scores_are_those_of_transformers(engine: Engine, tmp_path: Path, name: str) -> None:
    loaded(engine, tmp_path, name, Task.RERANK)
    cases = embedders()[name]["cases"]
    found = vectors(engine, *[case["prompt"] for case in cases])
    expected = [case["vector"][0] for case in cases]
    assert [float(vector[0]) for vector in found] == pytest.approx(expected, abs=1e-5)


def test_what_is_not_normalised_keeps_its_length(engine: Engine, tmp_path: Path) -> None:
    folder = write_embedder(tmp_path / "made", "bert", normalised=False)
    stored = imported(tmp_path, folder)
    load(engine, stored.info.serving(Task.EMBED), stored.path)
    (vector,) = vectors(engine, embedders()["bert"]["cases"][0]["prompt"])
    assert abs(np.linalg.norm(vector) - 1) > 0.01


def test_an_encoder_takes_as_many_tokens_as_it_has_positions(
    engine: Engine, tmp_path: Path
) -> None:
    """And what its makers limit it to, where that is less."""
    folder = write_embedder(tmp_path / "made", "xlm-roberta")
    stored = imported(tmp_path, folder)
    assert stored.info.context_tokens_max - 1 == 256 - 1 == 255
    load(engine, stored.info.serving(Task.EMBED), stored.path, context_tokens_max=256)
    (vector,) = vectors(engine, [4] * 255)
    assert np.isfinite(vector).all()
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 128}')
    assert imported(tmp_path, folder).info.context_tokens_max == 129
