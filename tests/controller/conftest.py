"""A live controller for all tests of a module, or for one alone that is marked `own_cell`; tests of
HTTP have it, too.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from mesh.v1.open_inference_pb2_grpc import GRPCInferenceServiceStub
from mesh.wire.channel import dial
from tests.controller.live import LiveCell, live_cell


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests with a cell run in its loop."""
    if isinstance(item, pytest.Function) and "cell" in item.fixturenames:
        item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


@pytest_asyncio.fixture(loop_scope="module")
async def own(tmp_path: Path) -> AsyncIterator[LiveCell]:
    async with live_cell(tmp_path, http="127.0.0.1:0") as cell:
        yield cell


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveCell]:
    async with live_cell(tmp_path_factory.mktemp("cell"), http="127.0.0.1:0") as cell:
        yield cell


@pytest_asyncio.fixture(loop_scope="module")
async def shared(serving: LiveCell) -> AsyncIterator[LiveCell]:
    """The module's cell. After the test its nodes and deployments are gone. Processes that tokenise
    are started once for all tests, and what it has learned and counted stays.
    """
    yield serving
    await serving.emptied()


@pytest.fixture
def cell(request: pytest.FixtureRequest) -> LiveCell:
    alone = request.node.get_closest_marker("own_cell")
    found: LiveCell = request.getfixturevalue("own" if alone else "shared")
    return found


@pytest_asyncio.fixture(loop_scope="module")
async def stub(cell: LiveCell) -> AsyncIterator[Any]:
    async with dial(cell.address) as channel:
        yield GRPCInferenceServiceStub(channel)
