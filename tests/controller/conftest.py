"""A live controller for each test that asks for one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.controller.live import LiveCell, live_cell


@pytest.fixture
async def cell(tmp_path: Path) -> AsyncIterator[LiveCell]:
    async with live_cell(tmp_path) as cell:
        yield cell
