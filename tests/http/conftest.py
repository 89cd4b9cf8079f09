"""A live cell with HTTP for all tests of a module, or for one alone that is marked `own_cell`."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.http.edge import Edge, edge


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests with a cell run in its loop."""
    if isinstance(item, pytest.Function) and "http" in item.fixturenames:
        item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


@pytest_asyncio.fixture(loop_scope="module")
async def own(tmp_path: Path) -> AsyncIterator[Edge]:
    async with edge(tmp_path) as http:
        yield http


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Edge]:
    async with edge(tmp_path_factory.mktemp("cell")) as http:
        yield http


@pytest_asyncio.fixture(loop_scope="module")
async def shared(serving: Edge) -> AsyncIterator[Edge]:
    """Without nodes and deployments: processes that tokenise are started once for all tests."""
    yield serving
    await serving.cell.emptied()


@pytest.fixture
def http(request: pytest.FixtureRequest) -> Edge:
    alone = request.node.get_closest_marker("own_cell")
    found: Edge = request.getfixturevalue("own" if alone else "shared")
    return found
