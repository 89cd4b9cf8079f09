"""The benchmark's two clients hear the first token and the end of every call."""

import asyncio
from pathlib import Path

import pytest

from bench.http import by_grpc, by_http
from mesh.domain.errors import Unavailable
from mesh.domain.ids import DeploymentName
from tests.controller.live import SPEC
from tests.http.edge import edge

CALLS = [(0.0, 4), (0.01, 1), (0.0, 6)]


async def test_both_hear_every_answer_to_its_end(tmp_path: Path) -> None:
    async with edge(tmp_path) as http:
        await http.cell.deployed()
        assert http.cell.http is not None
        for ask, address in ((by_grpc, http.cell.address), (by_http, http.cell.http)):
            heard = await asyncio.to_thread(ask, address, SPEC.name, CALLS)
            assert len(heard) == len(CALLS)
            assert all(0.0 < one.first_s <= one.last_s for one in heard)
            with pytest.raises(Unavailable, match=r"torn|not answered in full"):
                await asyncio.to_thread(ask, address, DeploymentName("none"), CALLS)
