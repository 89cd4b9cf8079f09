"""One fixture decides which engine a test drives; the suite runs once for each of `ENGINES`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from mesh.domain.ids import InstanceId
from mesh.runtime.engine import Engine
from tests.contract.driving import Driver
from tests.contract.engine_contract import BATCH_MAX, ENGINES, EngineUnderTest, StoredModel

LoadInstance = Callable[..., Driver]
_ALIKE = ("iterations", "measuring", "requests", "sampling", "turns", "vectors")
WITHOUT_KV = [f"test_{it}" for it in _ALIKE]
"""Modules whose tests do not depend on how a KV cache is resized, beyond the random walks."""
COMPILE = ("test_loading", "test_swaps")
"""Modules in which each load compiles; others test what an instance does once it is there."""
COLLECTED = [engine for engine in ENGINES if engine.available or not engine.optional]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not (item.path.stem in WITHOUT_KV and kv_alone(item))]


def kv_alone(item: pytest.Item) -> bool:
    engine = getattr(getattr(item, "callspec", None), "params", {}).get("under_test")
    return isinstance(engine, EngineUnderTest) and engine.kv_alone


@pytest.fixture(scope="session", params=COLLECTED, ids=lambda engine: engine.name)
def under_test(request: pytest.FixtureRequest) -> EngineUnderTest:
    engine: EngineUnderTest = request.param
    if not engine.available:
        pytest.skip(f"{engine.needs} is not installed")
    return engine


@pytest.fixture(scope="session")
def model(under_test: EngineUnderTest, tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    path = tmp_path_factory.mktemp(under_test.name) / "model"
    return StoredModel(info=under_test.write_model(path), path=path)


@pytest.fixture
def engine(
    under_test: EngineUnderTest, model: StoredModel, request: pytest.FixtureRequest
) -> Iterator[Engine]:
    with ExitStack() as stack:
        if under_test.needs == "openvino" and request.path.stem not in COMPILE:
            from tests.support.compiled_once import compiled_once

            stack.enter_context(compiled_once(model.path))
        engine = under_test.make()
        yield engine
        engine.close()


@pytest.fixture
def load(under_test: EngineUnderTest, engine: Engine, model: StoredModel) -> LoadInstance:
    """Loads an instance: `load("i-1", kv_blocks=…, context_tokens_max=…, batch_max=…)`."""

    def load(instance_id: str = "i-1", **limits: int) -> Driver:
        order = model.order(InstanceId(instance_id), **limits)
        spare = under_test.spare_blocks_per_request
        return Driver(engine, order, spare_blocks=spare)

    return load


@pytest.fixture
def driver(load: LoadInstance) -> Driver:
    """An instance with 64 blocks, 256 tokens of context and batches of BATCH_MAX."""
    driver = load()
    assert driver.order.batch_max == BATCH_MAX
    return driver
