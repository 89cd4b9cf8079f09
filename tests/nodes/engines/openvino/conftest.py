"""Engines over tiny models: one model a session, one engine a test."""

import json
from collections.abc import Iterator

import pytest

from mesh.domain.model import KvPrecision, WeightPrecision
from mesh.domain.values import replace
from mesh_loader.store import StoredModel
from mesh_nodes.engines.openvino import blob_maker
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from tests.nodes.engines.openvino.tiny import TinyModel, write_tiny
from tests.nodes.engines.serving import load
from tests.support.compiled_once import compiled_once

LAYERS = 6
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def shallow(smollm2_model: StoredModel, tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    """The first layers of the demo model, for what does not depend on their number."""
    folder, info = tmp_path_factory.mktemp("shallow"), smollm2_model.info
    for name in ("model.safetensors", *TEXT_FILES):
        (folder / name).symlink_to(smollm2_model.path / name)
    config = json.loads((smollm2_model.path / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    of_layers = info.parameters - (info.vocabulary_tokens + 1) * info.hidden_size
    parameters = info.parameters - of_layers * (info.layers - LAYERS) // info.layers
    return StoredModel(path=folder, info=replace(info, layers=LAYERS, parameters=parameters))


@pytest.fixture(scope="module")
def blobs_soon() -> Iterator[None]:
    """Blobs are made with the priority of a test. Below all others they would be waited for until
    tests leave a core to them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blob_maker, "NICE", 0)
        patch.setattr(blob_maker, "WAITED_NICE", 0)
        yield


@pytest.fixture
def engine() -> Iterator[OpenVinoEngine]:
    """Exact, so that tokens do not depend on the batch; nothing is loaded."""
    engine = OpenVinoEngine(threads=1, weights=WeightPrecision.F16, kv=KvPrecision.F32)
    yield engine
    engine.close()


@pytest.fixture
def loaded(engine: OpenVinoEngine, tiny: TinyModel) -> OpenVinoEngine:
    """The same with the tiny model: 64 blocks, 256 tokens of context, batches of 8."""
    with compiled_once(tiny.path):
        load(engine, tiny.info, tiny.path)
    return engine
