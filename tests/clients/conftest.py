"""A live cell with HTTP, one deployment and its node; clients that are processes of their own."""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import run as run_command
from typing import Any

import pytest

from mesh.cli.cell import running_cell
from mesh.cli.cell_plan import CellPlan, plan_nodes
from mesh.cli.stopping import Stopping
from mesh.cli.waiting import Goal, wait_for
from mesh.controller.gateway import GatewayLimits
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.ids import DeploymentName
from mesh.domain.messages import SubmitRequest
from mesh.domain.slo import Slo
from mesh.wire.client import MeshClient
from mesh_loader.store import StoredModel
from tests.controller.live import FakeNode, LiveCell
from tests.http.edge import edge

ROOT = Path(__file__).resolve().parents[2]
KSERVE_DOC = (ROOT / "docs" / "kserve.md").read_text(encoding="utf-8")
CALLS_MAX = 4
CLIENT_S_MAX = 60.0
OF_STORE = ("model.json", "digests.json", "model.ggml", "prepared")
"""The parts of a stored model's folder that are not the model."""
READY_S_MAX = 100.0
CALL_S_MAX = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    cell: LiveCell
    node: FakeNode
    url: str

    async def begun(self, asking: Awaitable[Any]) -> Any:
        """Opens a stream and returns it after its first token; more are to come."""
        self.node.held = True
        opening = asyncio.ensure_future(asking)
        order = (await self.node.told(SubmitRequest)).order
        await self.node.answer(order, 0, 1, last=False)
        return await opening


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with edge(tmp_path, gateway=GatewayLimits(calls_max=CALLS_MAX)) as http:
        yield Served(cell=http.cell, node=await http.cell.deployed(), url=f"{http.url}/v1")


@contextmanager
def demo_cell(
    home: Path, stored: StoredModel, names: Sequence[str], template: Path | None = None
) -> Iterator[str]:
    """A cell of real processes that serves the demo model by these names, with the chat `template`
    or its own; its address by HTTP. The model's folder is `home / "model"`.
    """
    model = home / "model"
    shutil.copytree(stored.path, model, ignore=shutil.ignore_patterns(*OF_STORE))
    if template is not None:
        shutil.copy(template, model / "chat_template.jinja")
    plan = CellPlan(
        listen="127.0.0.1:0",
        http="127.0.0.1:0",
        home=home / "cell",
        nodes=plan_nodes(["cpu"]),
        # In each precision the model says something else, and some of it without an end.
        precision="f32",
        kv="f16",
    )
    with Stopping() as stopping, running_cell(plan, stopping) as cell:
        with MeshClient(cell.address) as client:
            for name in map(DeploymentName, names):
                spec = DeploymentSpec(
                    name=name,
                    source=f"file://{model}",
                    slo=Slo(ttft_s=CALL_S_MAX, tpot_s=5.0),
                    scaling=Scaling(replicas_min=1, replicas_max=1),
                )
                client.deploy(spec)
                wait_for(client, name, Goal.READY, READY_S_MAX)
        yield f"http://{cell.http_address}"


async def run_text(
    command: Sequence[str],
    *,
    script: str = "",
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    seconds_max: float = CLIENT_S_MAX,
) -> str:
    """What a client printed; `script` is its standard input."""
    ran = await asyncio.to_thread(
        run_command,
        command,
        input=script,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=seconds_max,
        env={**os.environ, **(env or {})},
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


async def run(command: Sequence[str], *, script: str = "", cwd: Path = ROOT) -> Any:
    """The same, where that is JSON."""
    return json.loads(await run_text(command, script=script, cwd=cwd))
