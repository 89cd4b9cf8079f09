"""A live cell with HTTP for each test that asks for one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.http.edge import Edge, edge


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[Edge]:
    async with edge(tmp_path) as http:
        yield http
