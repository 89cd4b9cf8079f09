"""Engines over tiny models: one model a session, one engine a test."""

from collections.abc import Iterator

import pytest

from mesh.domain.model import KvPrecision, WeightPrecision
from mesh_nodes.engines.openvino import blob_maker
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from tests.nodes.engines.openvino.tiny import TinyModel, write_tiny
from tests.nodes.engines.serving import load
from tests.support.compiled_once import compiled_once


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


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
