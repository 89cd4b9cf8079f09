"""A live cell with HTTP, one deployment and its node."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mesh.controller.gateway import GatewayLimits
from tests.controller.live import FakeNode, LiveCell
from tests.http.edge import edge

CALLS_MAX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    cell: LiveCell
    node: FakeNode
    url: str


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with edge(tmp_path, gateway=GatewayLimits(calls_max=CALLS_MAX)) as http:
        yield Served(cell=http.cell, node=await http.cell.deployed(), url=f"{http.url}/v1")
