"""A live controller for each test that asks for one."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mesh.v1.open_inference_pb2_grpc import GRPCInferenceServiceStub
from mesh.wire.channel import dial
from tests.controller.live import LiveCell, live_cell


@pytest.fixture
async def cell(tmp_path: Path) -> AsyncIterator[LiveCell]:
    async with live_cell(tmp_path) as cell:
        yield cell


@pytest.fixture
async def stub(cell: LiveCell) -> AsyncIterator[Any]:
    async with dial(cell.address) as channel:
        yield GRPCInferenceServiceStub(channel)
