"""A real Prometheus scrapes a live cell: every panel and rule of the files evaluates to numbers.

Debian's package has both programs; `make test-prometheus` fetches it.
"""

import asyncio
import json
import math
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from mesh.domain.ids import DeploymentName
from mesh.domain.messages import LoadFailed, LoadInstance, SubmitRequest, TokensReport
from mesh.domain.reasons import FinishReason
from mesh.domain.request import RequestOrder, RequestTokens
from tests.controller.live import HELLO, SPEC, WAIT_S_MAX, FakeNode
from tests.e2e.live_cell import free_port
from tests.http.edge import Edge, edge
from tests.test_deploy_files import DEPLOY

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
pytestmark = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None, reason="prometheus is not installed"
)
RULES = DEPLOY / "prometheus" / "mesh-rules.yaml"
SCRAPE_S = 1
DATA_S_MAX = 45.0
BROKEN, OTHER = DeploymentName("broken"), DeploymentName("other")


class Node(FakeNode):
    """Cannot load the one deployment."""

    async def loaded(self, command: LoadInstance) -> None:
        if command.deployment == BROKEN:
            failed = LoadFailed(instance_id=command.instance_id, error="EngineError", message="no")
            await self.send(failed)
        else:
            await super().loaded(command)


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    async def get(self, path: str, **parameters: str) -> Any:
        def ask() -> Any:
            return requests.get(self.url + path, params=parameters, timeout=WAIT_S_MAX).json()

        return (await asyncio.to_thread(ask))["data"]

    async def evaluates(self, expression: str) -> bool:
        """To a number at least; what has not happened yet is none, or NaN."""
        found = (await self.get("/api/v1/query", query=expression))["result"]
        return any(math.isfinite(float(one["value"][1])) for one in found)


@asynccontextmanager
async def scraping(http: Edge, folder: Path) -> AsyncIterator[Prometheus]:
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "mesh", "static_configs": [{"targets": [http.cell.http]}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        str(PROMETHEUS),
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stderr=asyncio.subprocess.DEVNULL,
    )
    found = Prometheus(f"http://127.0.0.1:{port}")
    try:
        async with asyncio.timeout(WAIT_S_MAX):
            while True:
                try:
                    await found.get("/api/v1/status/buildinfo")
                    break
                except requests.ConnectionError:
                    await asyncio.sleep(0.1)
        yield found
    finally:
        process.terminate()
        await process.wait()


async def traffic(http: Edge, node: FakeNode) -> None:
    """Calls without end, of which one in four is refused and one in eight runs for a while, and
    loads.
    """
    for number in count():
        await http.complete([97] * (3 if number % 4 else 5000), max_tokens=4)
        if number % 8 == 0:
            order, asked = await held(http, node)
            await asyncio.sleep(1.5 * SCRAPE_S)
            await node.answer(order, 0, 4, last=True)
            await asked
            await http.cell.ask(http.cell.client.load, OTHER)
            await http.cell.ask(http.cell.client.unload, OTHER)


async def held(http: Edge, node: FakeNode) -> tuple[RequestOrder, "asyncio.Task[Any]"]:
    """A call that its node leaves unanswered, and what it was told of it."""
    node.held = True
    before = len(node.commands)
    asked = asyncio.create_task(http.complete([97], max_tokens=4))
    orders: list[RequestOrder] = []
    async with asyncio.timeout(WAIT_S_MAX):
        while not orders:
            await asyncio.sleep(0.01)
            orders = [c.order for c in node.commands[before:] if isinstance(c, SubmitRequest)]
    node.held = False
    return orders[0], asked


async def failed(http: Edge, node: FakeNode) -> None:
    """A load that fails, and an answer that its engine gives up."""
    broken = {"model": BROKEN, "prompt": "x", "max_tokens": 1}
    assert not (await http.post("/v1/completions", broken)).ok
    order, asked = await held(http, node)
    output = RequestTokens(
        request_id=order.request.request_id,
        attempt=order.attempt,
        first_index=0,
        token_ids=(),
        finish=FinishReason.FAILED,
    )
    await node.send(TokensReport(instance_id=node.instance_id, outputs=(output,)))
    assert not (await asked).ok


@asynccontextmanager
async def busy_cell(folder: Path) -> AsyncIterator[Edge]:
    """With something of everything: answers, refusals, failures, loads."""
    async with edge(folder / "home") as http:
        node = Node(http.cell.address, HELLO)
        http.cell.nodes.append(await node.join())
        for name in (SPEC.name, BROKEN, OTHER):
            spec = replace(SPEC, name=name)
            assert (await http.cell.ask(http.cell.client.deploy, spec)).message == "deployed"
        await http.complete([97], max_tokens=2)
        await failed(http, node)
        calling = asyncio.create_task(traffic(http, node))
        try:
            yield http
            assert not calling.done(), calling.exception()
        finally:
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)


def panels() -> dict[str, str]:
    """Expressions by where they stand."""
    found = json.loads((DEPLOY / "grafana" / "mesh.json").read_text())["panels"]
    return {
        f"{panel['title']} {number}": target["expr"]
        for panel in found
        for number, target in enumerate(panel["targets"])
    }


def rules() -> dict[str, str]:
    """What each compares, whether it is so or not; of what must not be absent, the thing itself."""
    found = yaml.safe_load(RULES.read_text())["groups"]
    plain = {rule["alert"]: rule["expr"] for group in found for rule in group["rules"]}
    return {
        name: re.sub(r"([<>])", r"\1 bool", re.sub(r"^absent\((.*)\)$", r"\1", expression))
        for name, expression in plain.items()
    }


async def test_every_panel_and_rule_evaluates_to_numbers(tmp_path: Path) -> None:
    async with busy_cell(tmp_path) as http, scraping(http, tmp_path) as prometheus:
        waiting = panels() | rules()
        assert len(waiting) > 20
        until_s = asyncio.get_running_loop().time() + DATA_S_MAX
        while waiting and asyncio.get_running_loop().time() < until_s:
            await asyncio.sleep(SCRAPE_S)
            waiting = {
                name: expression
                for name, expression in waiting.items()
                if not await prometheus.evaluates(expression)
            }
        assert not waiting
        groups = (await prometheus.get("/api/v1/rules"))["groups"]
        states = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
    assert states == dict.fromkeys(rules(), "ok")


async def test_promtool_finds_nothing_in_what_is_meshs_own(tmp_path: Path) -> None:
    """vLLM's names have colons, which it does not like."""
    async with busy_cell(tmp_path) as http:
        text = (await http.get("/metrics")).text
    ours = [line for line in text.splitlines() if re.match(r"(# \w+ )?mesh_", line)]
    assert len(ours) > 50
    assert promtool("check", "metrics", said="\n".join([*ours, ""])) == (0, "")


def test_promtool_takes_the_rules() -> None:
    code, output = promtool("check", "rules", str(RULES))
    assert code == 0, output


def promtool(*arguments: str, said: str = "") -> tuple[int, str]:
    """Its exit code, and all that it wrote."""
    ran = subprocess.run(
        [str(PROMTOOL), *arguments],
        input=said,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_S_MAX,
        check=False,
    )
    return ran.returncode, ran.stdout
