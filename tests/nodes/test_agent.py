"""The agent's own life, without a controller: stopping, and what a failing core does to it."""

import asyncio
import socket
from pathlib import Path

import pytest

from mesh.core.node import NodeCore
from mesh.domain.actions import NodeAction
from mesh.domain.ids import NodeId
from mesh.domain.limits import NodeLimits
from mesh.domain.messages import NodeHello
from mesh.domain.node_events import NodeEvent
from mesh.domain.reasons import DeviceKind
from mesh_nodes.agent import STOP_S_MAX, Agent
from tests.support.scripted_engine import ScriptedEngine

HELLO = NodeHello(
    node_id=NodeId("n1"),
    run_id="run-1",
    device=DeviceKind.CPU,
    hardware="test",
    cores=1,
    engine="scripted",
    memory_bytes=1 << 30,
)


def _agent(tmp_path: Path) -> Agent:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    return Agent(
        engine=ScriptedEngine(),
        identity=HELLO,
        limits=NodeLimits(),
        store_path=tmp_path / "store",
        controller=f"127.0.0.1:{port}",
    )


async def test_an_agent_without_a_controller_stops_when_it_is_asked(tmp_path: Path) -> None:
    agent = _agent(tmp_path)
    running = asyncio.create_task(agent.run())
    await asyncio.sleep(0.05)
    assert not running.done(), "it keeps trying"
    agent.stop()
    await asyncio.wait_for(running, 2 * STOP_S_MAX)
    assert agent.clean


async def test_a_stop_before_the_start_counts(tmp_path: Path) -> None:
    agent = _agent(tmp_path)
    agent.stop()
    await asyncio.wait_for(agent.run(), 2 * STOP_S_MAX)
    assert agent.clean


async def test_a_core_that_fails_ends_the_agent_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state is unknown then; the controller gives its requests to another node."""
    told: list[NodeEvent] = []

    def handle(self: NodeCore, event: NodeEvent, now_s: float) -> list[NodeAction]:
        told.append(event)
        raise KeyError("no such instance")

    monkeypatch.setattr(NodeCore, "handle", handle)
    with pytest.raises(KeyError, match="no such instance"):
        await asyncio.wait_for(_agent(tmp_path).run(), 2 * STOP_S_MAX)
    assert len(told) == 1, "nothing more is asked of it"
