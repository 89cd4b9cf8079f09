"""A live cell with HTTP, one deployment and its node; clients that are processes of their own."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import run as run_command
from typing import Any

import pytest

from mesh.controller.gateway import GatewayLimits
from tests.controller.live import FakeNode, LiveCell
from tests.http.edge import edge

ROOT = Path(__file__).resolve().parents[2]
KSERVE_DOC = (ROOT / "docs" / "kserve.md").read_text(encoding="utf-8")
CALLS_MAX = 4
CLIENT_S_MAX = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    cell: LiveCell
    node: FakeNode
    url: str


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with edge(tmp_path, gateway=GatewayLimits(calls_max=CALLS_MAX)) as http:
        yield Served(cell=http.cell, node=await http.cell.deployed(), url=f"{http.url}/v1")


async def run_text(command: Sequence[str], *, script: str = "", cwd: Path = ROOT) -> str:
    """What a client printed; `script` is its standard input."""
    ran = await asyncio.to_thread(
        run_command,
        command,
        input=script,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=CLIENT_S_MAX,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


async def run(command: Sequence[str], *, script: str = "", cwd: Path = ROOT) -> Any:
    """The same, where that is JSON."""
    return json.loads(await run_text(command, script=script, cwd=cwd))
