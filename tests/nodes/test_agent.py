"""The agent's own life, without a controller: stopping, and what a failing core does to it."""

import asyncio
import errno
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from mesh.core.node.core import NodeCore
from mesh.domain.actions import NodeAction, SendReport
from mesh.domain.errors import EngineError
from mesh.domain.ids import InstanceId, ModelId
from mesh.domain.limits import NodeLimits
from mesh.domain.messages import InstanceLoaded, UnloadInstance
from mesh.domain.model import WeightPrecision, held_id
from mesh.domain.node_events import HeartbeatDue, NodeEvent
from mesh.domain.steps import HeldModel, LoadTier
from mesh.runtime.host import Recorder
from mesh_nodes.agent import ENGINE_CALL_S_MAX, Agent
from mesh_nodes.engines.host_memory import own_resident_bytes
from mesh_nodes.kept_loads import KeptLoads
from mesh_nodes.lanes import ThreadLanes
from tests.contract.engine_contract import StoredModel, write_tiny_model
from tests.core.cells import hello
from tests.support.scripted_engine import FOOTPRINT, KV_BLOCK_BYTES, WEIGHTS_BYTES, ScriptedEngine
from tests.support.waiting import until

WAIT_S = 30.0

HELLO = hello(memory_bytes=1 << 30)


def _agent(
    tmp_path: Path,
    engine: ScriptedEngine | None = None,
    recorders: Sequence[Recorder] = (),
    asleep: tuple[HeldModel, ...] = (),
    loads: KeptLoads | None = None,
) -> Agent:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    return Agent(
        engine=engine or ScriptedEngine(),
        identity=HELLO,
        limits=NodeLimits(),
        store_path=tmp_path / "store",
        controller=f"127.0.0.1:{port}",
        resident_bytes=own_resident_bytes,
        recorders=recorders,
        nearer=lambda folders: asleep,
        loads=loads,
    )


async def test_an_agent_without_a_controller_stops_when_it_is_asked(tmp_path: Path) -> None:
    agent = _agent(tmp_path)
    running = asyncio.create_task(agent.run())
    await asyncio.sleep(0.05)
    assert not running.done(), "it keeps trying"
    agent.stop()
    await asyncio.wait_for(running, WAIT_S)
    assert agent.clean


async def test_a_stop_before_the_start_counts(tmp_path: Path) -> None:
    agent = _agent(tmp_path)
    agent.stop()
    await asyncio.wait_for(agent.run(), WAIT_S)
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
        await asyncio.wait_for(_agent(tmp_path).run(), WAIT_S)
    assert len(told) == 1, "nothing more is asked of it"


async def test_what_is_told_of_a_load_is_kept_without_what_was_computed_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = InstanceLoaded(
        instance_id=InstanceId("i1"),
        footprint=FOOTPRINT,
        kv_blocks=1,
        elapsed_s=2.5,
        computed_s=1.25,
    )
    monkeypatch.setattr(NodeCore, "handle", lambda *_: [SendReport(report=told)])
    loads = KeptLoads(tmp_path, "kind", busy_load_factor=1.5)
    agent = _agent(tmp_path, loads=loads)
    running = asyncio.create_task(agent.run())
    await asyncio.to_thread(until, lambda: bool(loads))
    agent.stop()
    await asyncio.wait_for(running, WAIT_S)
    ((_, rate),) = loads.rates()
    assert rate.load_s(FOOTPRINT.weights_bytes) == pytest.approx(2.0)


class Bounded(ScriptedEngine):
    """Notes how much memory it was told to have."""

    bounds: list[int]

    def bound_memory(self, memory_bytes: int) -> None:
        self.bounds = [*getattr(self, "bounds", ()), memory_bytes]
        super().bound_memory(memory_bytes)


class Told:
    """A recorder of heartbeats."""

    def __init__(self) -> None:
        self.beats: list[HeartbeatDue] = []

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        if isinstance(event, HeartbeatDue):
            self.beats.append(event)


async def test_cached_blocks_make_room_for_blocks_that_come_from_another_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh_nodes.agent.HEARTBEAT_S", 0.01)
    engine, told = Bounded(), Told()
    agent = _agent(tmp_path, engine, recorders=[told])
    running = asyncio.create_task(agent.run())
    await asyncio.to_thread(until, lambda: bool(told.beats))
    assert agent._kv is not None

    def is_held(held_bytes: int) -> bool:
        base_bytes = max(HELLO.base_bytes, agent._core.base_bytes)
        bounded = engine.bounds[-1] == HELLO.memory_bytes - base_bytes - held_bytes
        return bounded and told.beats[-1].engine_bytes == held_bytes

    agent._kv._hold(9)
    await asyncio.to_thread(until, lambda: is_held(9))
    agent._kv._hold(-9)
    await asyncio.to_thread(until, lambda: is_held(0))
    agent.stop()
    await asyncio.wait_for(running, WAIT_S)


async def test_an_engine_that_does_not_return_ends_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh_nodes.agent.HEARTBEAT_S", 0.01)
    monkeypatch.setattr("mesh_nodes.agent.ENGINE_CALL_S_MAX", 0.1)
    release = threading.Event()
    monkeypatch.setattr(
        NodeCore, "handle", lambda *_: [UnloadInstance(instance_id=InstanceId("i1"))]
    )
    engine = ScriptedEngine()
    monkeypatch.setattr(engine, "unload", lambda _: release.wait(60))
    agent = _agent(tmp_path, engine)
    with pytest.raises(EngineError, match="has not returned from a call for 0 s"):
        await asyncio.wait_for(agent.run(), WAIT_S)
    assert not agent.clean
    release.set()


async def test_an_agent_that_was_stopped_amid_a_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the stop lasted, the call seems to have; it ends before the next beat."""
    seen_s = [0.0, 2 * ENGINE_CALL_S_MAX]
    monkeypatch.setattr("mesh_nodes.agent.HEARTBEAT_S", 0.01)
    monkeypatch.setattr(ThreadLanes, "computing_s", lambda _: seen_s.pop() if seen_s else 0.0)
    agent = _agent(tmp_path)
    running = asyncio.create_task(agent.run())
    await asyncio.to_thread(until, lambda: not seen_s)
    await asyncio.sleep(0.05)
    assert not running.done()
    agent.stop()
    await asyncio.wait_for(running, WAIT_S)


MODEL_ID = "sha256-0123456789abcdef"


class FirstBeat:
    """A recorder that keeps the first heartbeat."""

    def __init__(self) -> None:
        self.came: asyncio.Future[HeartbeatDue] = asyncio.get_running_loop().create_future()

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        if isinstance(event, HeartbeatDue) and not self.came.done():
            self.came.set_result(event)


async def test_a_heartbeat_has_what_the_process_and_the_engines_books_say(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    info = write_tiny_model(tmp_path / "model")
    order = StoredModel(info=info, path=tmp_path / "model").order(InstanceId("i1"))
    engine.load(order, lambda phase, share: None)
    engine.resize_kv(InstanceId("i1"), 7)
    (tmp_path / "store" / "models" / MODEL_ID).mkdir(parents=True)
    beat = FirstBeat()
    asleep = (HeldModel(model_id=ModelId("m"), tier=LoadTier.HOST, context_tokens_max=64),)
    agent = _agent(tmp_path, engine, recorders=[beat], asleep=asleep)
    running = asyncio.create_task(agent.run())
    due = await asyncio.wait_for(beat.came, WAIT_S)
    stored = [
        HeldModel(model_id=held_id(ModelId(MODEL_ID), weights), tier=LoadTier.DISK)
        for weights in (None, *WeightPrecision)
    ]
    assert due.models == (*stored, *asleep)
    assert due.engine_bytes == WEIGHTS_BYTES + 7 * KV_BLOCK_BYTES
    rss_bytes = psutil.Process().memory_info().rss
    assert rss_bytes / 2 < due.rss_bytes < rss_bytes * 2
    agent.stop()
    await asyncio.wait_for(running, WAIT_S)


async def test_a_store_that_cannot_be_read_does_not_end_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh_nodes.agent.HEARTBEAT_S", 0.01)
    agent = _agent(tmp_path)
    looks = 0

    def fail(folders: Sequence[Path]) -> tuple[HeldModel, ...]:
        nonlocal looks
        looks += 1
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(agent, "_nearer", fail)
    running = asyncio.create_task(agent.run())
    await asyncio.to_thread(until, lambda: looks > 1)
    assert not running.done()
    agent.stop()
    await asyncio.wait_for(running, WAIT_S)
