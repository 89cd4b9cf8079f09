"""A live cell with HTTP for each test that asks for one, or one for all tests of a module."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.http.edge import Edge, edge


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests of a shared cell run in its loop."""
    if isinstance(item, pytest.Function) and "shared" in item.fixturenames:
        item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[Edge]:
    async with edge(tmp_path) as http:
        yield http


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Edge]:
    async with edge(tmp_path_factory.mktemp("cell")) as http:
        yield http


@pytest_asyncio.fixture(loop_scope="module")
async def shared(serving: Edge) -> AsyncIterator[Edge]:
    """The cell of the module, without nodes and deployments: processes that tokenise are started
    once for all of its tests.
    """
    yield serving
    await serving.cell.emptied()
