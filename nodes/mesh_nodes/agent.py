"""The live node agent: the node core under its host, with threads, a store, a link and a heartbeat.

Owns the life of all of it: what starts before the link opens, and what is stopped in which order.
The composition root (`main`) builds the engine and says where the controller is; any engine that
keeps the protocol will do. One asyncio loop runs all but the engine's calls, what is decided on
their results, and the imports.
"""

import asyncio
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from mesh.core.node.core import NodeCore
from mesh.domain.actions import NodeAction
from mesh.domain.energy import EnergyReading, Power
from mesh.domain.errors import EngineError, MeshError, StorageError
from mesh.domain.ids import ModelId
from mesh.domain.limits import HEARTBEAT_S, NodeLimits
from mesh.domain.messages import InstanceLoaded, NodeHello, NodeReport
from mesh.domain.model import WeightPrecision, held_id
from mesh.domain.node_events import CommandReceived, HeartbeatDue, LinkClosed, LinkOpened, NodeEvent
from mesh.domain.node_rule import NodeRule
from mesh.domain.steps import HeldModel, LoadTier
from mesh.domain.values import replace
from mesh.policy.rules.turns import TurnRule
from mesh.runtime.clock import LoopClock
from mesh.runtime.engine import Engine
from mesh.runtime.host import Host, Recorder
from mesh.runtime.node_actions import NodePerformer
from mesh.text.assets import read_assets
from mesh.wire.credentials import credentials
from mesh.wire.link import NodeLink
from mesh_loader.importing import NO_RULES, ImportRules, import_until
from mesh_loader.store import ModelStore
from mesh_nodes.imports import TriedImports
from mesh_nodes.kept_loads import KeptLoads
from mesh_nodes.kv_stream import KvStream, reachable_host
from mesh_nodes.lanes import Messenger, ThreadLanes, call_on
from mesh_nodes.models import ModelsInUse, NodeModels

STOP_S_MAX = 4.0
"""From the signal to stop to the end of `run`. Below the grace that `mesh up` and systemd give."""

MESSENGER_S_MAX = 0.5
TOLD_S = 2 * HEARTBEAT_S
"""A node that is to stop waits so long before it looks whether it is drained: the controller has
heard of it by then, and sends no load or request any more.
"""
DRAIN_POLL_S = 0.05

ENGINE_CALL_S_MAX = 300.0
"""For an iteration, or any other call beside loads: far beyond the slowest, and beyond what an
engine grants the processes of its own."""

log = logging.getLogger(__name__)


class CarriedLink:
    """The link as the performer's port. The compute thread sends what it decided, too, and must
    not wait; all reports take the same way, so that they keep their order.
    """

    def __init__(
        self, link: NodeLink, messenger: Messenger, loaded: Callable[[InstanceLoaded], None]
    ) -> None:
        """`loaded` is called on the loop's thread, with what is told of loads."""
        self._link = link
        self._messenger = messenger
        self._loaded = loaded

    def send(self, report: NodeReport) -> None:
        self._messenger.post(partial(self._link.send, report))
        if isinstance(report, InstanceLoaded):
            self._messenger.post(partial(self._loaded, report))


class Agent:
    """One node. `identity` is the hello without instances and load times; `resident_bytes` is what
    the node takes of its device's memory now, `nearer` what a load would find nearer than in its
    store, given the folders there, `energy` what its energy counter says. Without `loads` it
    neither tells nor keeps what loads take. `joined` is called at each welcome. With `grace_s` it
    is drained before it stops, for so long at most.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        identity: NodeHello,
        limits: NodeLimits,
        own_rule: TurnRule | None = None,
        power: Power | None = None,
        energy: Callable[[], EnergyReading] = EnergyReading,
        store_path: Path,
        controller: str,
        resident_bytes: Callable[[], int],
        nearer: Callable[[Sequence[Path]], tuple[HeldModel, ...]] = lambda folders: (),
        loads: KeptLoads | None = None,
        imports: ImportRules = NO_RULES,
        recorders: Sequence[Recorder] = (),
        joined: Callable[[], None] = lambda: None,
        grace_s: float = 0.0,
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._store_path = store_path
        self._import = TriedImports(partial(import_until, store_path, rules=imports))
        self._controller = controller
        self._loads = loads
        self._recorders = recorders
        self._joined = joined
        self._grace_s = grace_s
        self._leaving: asyncio.Task[None] | None = None
        """It is drained, and then stops."""
        self._linked = False
        self._in_use = ModelsInUse(store_path)
        self._core = NodeCore(limits=limits, own_rule=own_rule, power=power)
        self._energy = energy
        self._resident_bytes = resident_bytes
        self._nearer = nearer
        self._models: tuple[HeldModel, ...] | None = None
        """At hand when they were last looked at."""
        self.clean = True
        """False: a thread is still in a call of the engine's, or in an import."""
        self._ended = asyncio.Event()
        self._failure: BaseException | None = None
        self._host: Host[NodeEvent, NodeAction]
        self._deciding = threading.Lock()
        """The core decides under this lock, because both the loop and the compute thread post
        events.
        """
        self._loop: asyncio.AbstractEventLoop
        self._kv: KvStream | None = None

    def stop(self) -> None:
        """Wish the end: `run` returns soon, or, the first time, once the node is drained. For the
        loop's thread, as a signal handler is.
        """
        if self._grace_s and self._leaving is None:
            self._leaving = asyncio.get_running_loop().create_task(self._keep(self._drain))
        else:
            self._ended.set()

    async def _drain(self) -> None:
        """Until the controller has had all go that is loaded here, or, where there is none, nothing
        is kept for the next one.
        """
        try:
            async with asyncio.timeout(self._grace_s):
                await asyncio.sleep(TOLD_S)
                while not self._is_drained():  # noqa: ASYNC110
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            log.warning("%s stops: not drained after %g s", self._identity.node_id, self._grace_s)
        self._ended.set()

    def _is_drained(self) -> bool:
        with self._deciding:
            return not (self._core.instances() if self._linked else self._core.requests())

    async def run(self) -> None:
        """Serve until `stop`. Once it ends, `clean` says whether everything did so in time.

        Raises what the controller refused this node with, or what broke the node core.
        """
        loop = self._loop = asyncio.get_running_loop()
        lanes = ThreadLanes(
            loop=loop,
            post=self._post,
            loads_in_process=self._engine.capabilities.loads_in_process,
        )
        models = NodeModels(
            engine=self._engine,
            lanes=lanes,
            loop=loop,
            find=ModelStore(self._store_path).get,
            import_source=self._import,
            read_assets=read_assets,
        )
        link = NodeLink(
            address=self._controller,
            hello=self._hello,
            rng=random.Random(self._identity.run_id),
            on_open=self._opened,
            on_command=lambda command: self._post(CommandReceived(command=command)),
            on_close=self._closed,
        )
        messenger = Messenger(loop)
        performer = NodePerformer(
            engine=self._engine,
            lanes=lanes,
            link=CarriedLink(link, messenger, self._note_load),
            models=models,
            kv=self._open_kv(lanes, loop),
        )
        self._host = Host[NodeEvent, NodeAction](
            core=self._core,
            clock=LoopClock(loop),
            perform=performer.perform,
            recorders=(*self._recorders, self._in_use),
        )
        # Before the first hello: the cell is to plan with it from the start.
        await self._look()
        linking = asyncio.create_task(self._keep(link.run))
        beating = asyncio.create_task(self._keep(partial(self._beat, lanes)))
        looking = asyncio.create_task(self._keep(self._keep_looking))
        await self._ended.wait()
        beating.cancel()
        looking.cancel()
        if self._leaving is not None:
            self._leaving.cancel()
        link.stop()
        self.clean = await self._wind_down(linking, models, lanes)
        messenger.close(MESSENGER_S_MAX)
        self._in_use.close()
        if self._kv is not None:
            self._kv.close()
        if self._failure is not None:
            raise self._failure

    def _open_kv(self, lanes: ThreadLanes, loop: asyncio.AbstractEventLoop) -> KvStream | None:
        """Its end of transfers of KV blocks, at an address that its hello tells; `None` for an
        engine that moves none, and where nothing can listen: requests move by their tokens then.
        """
        kv_format = self._engine.capabilities.kv_format
        if not kv_format:
            return None
        try:
            self._kv = KvStream(
                node_id=self._identity.node_id,
                host=reachable_host(self._controller.split(",")[0]),
                engine=self._engine,
                lanes=lanes,
                loop=loop,
                tls=credentials().tls,
                held=self._bound,
            )
        except (MeshError, OSError) as error:
            log.warning("no KV blocks move to or from this node: %s", error)
            return None
        self._identity = replace(self._identity, kv_address=self._kv.address, kv_format=kv_format)
        return self._kv

    async def _wind_down(
        self, linking: "asyncio.Task[None]", models: NodeModels, lanes: ThreadLanes
    ) -> bool:
        """The link first, so that the cell knows and sends nothing more; the engine last."""
        give_up_s = time.monotonic() + STOP_S_MAX
        await asyncio.wait([linking], timeout=STOP_S_MAX / 4)
        linking.cancel()
        clean = await models.close(give_up_s - time.monotonic())
        left_s = give_up_s - time.monotonic()
        return await asyncio.to_thread(lanes.close, left_s, self._engine.close) and clean

    def _hello(self) -> NodeHello:
        with self._deciding:
            instances, requests = self._core.instances(), self._core.requests()
        rates = () if self._loads is None else self._loads.rates()
        return replace(
            self._identity,
            instances=instances,
            requests=requests,
            load_rates=rates,
            models=self._models,
            leaves=self._leaving is not None,
        )

    def _note_load(self, loaded: InstanceLoaded) -> None:
        if self._loads is not None:
            # It writes a file.
            self._loop.run_in_executor(None, self._loads.note, loaded)

    def _opened(self, rule: NodeRule) -> None:
        self._joined()
        log.info("%s joined the cell at %s", self._identity.node_id, self._controller)
        self._linked = True
        self._post(LinkOpened(rule=rule))

    def _closed(self, reason: str) -> None:
        self._linked = False
        self._post(LinkClosed(reason=reason))

    def _post(self, event: NodeEvent) -> None:
        """Into the core. A core that fails is in no known state: the node ends, and the controller
        places its requests elsewhere, which beats a node that may be wrong.
        """
        with self._deciding:
            if self._failure is not None:
                return
            try:
                self._host.post(event)
            except Exception as error:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        call_on(self._loop, self._ended.set)

    async def _keep(self, work: Callable[[], Awaitable[None]]) -> None:
        """Work that lasts as long as the agent: its failure is the agent's."""
        try:
            await work()
        except Exception as error:
            self._fail(error)

    async def _beat(self, lanes: ThreadLanes) -> None:
        """Raises EngineError when the engine hangs. No call within this process can be broken off,
        so the node ends, and its requests are placed elsewhere.
        """
        beats_late = 0
        told: tuple[HeldModel, ...] | None = None
        while True:
            beats_late = beats_late + 1 if lanes.computing_s() > ENGINE_CALL_S_MAX else 0
            if beats_late > 1:
                # Not with the first: this process itself may have been stopped for as long.
                raise EngineError(
                    f"the engine has not returned from a call for {ENGINE_CALL_S_MAX:.0f} s",
                    hint="the node ends, so that its requests can go on elsewhere; start it again",
                )
            self._bound()
            books = self._engine.memory()
            due = HeartbeatDue(
                rss_bytes=self._resident_bytes(),
                engine_bytes=sum(m.weights_bytes + m.kv_held_bytes for m in books)
                + self._engine.kept_bytes()
                + self._coming_bytes,
                models=None if self._models == told else self._models,
                kv_blocks_cached=tuple(
                    (m.instance_id, m.kv_blocks_cached) for m in books if m.kv_blocks_cached
                ),
                leaves=self._leaving is not None,
                energy=self._energy(),
            )
            told = self._models
            self._post(due)
            await asyncio.sleep(HEARTBEAT_S)

    @property
    def _coming_bytes(self) -> int:
        """What KV blocks take that have come and are not in the engine yet."""
        return 0 if self._kv is None else self._kv.held_bytes

    def _bound(self) -> None:
        """Says what the engine's memory is: cached blocks make room for those that come."""
        base_bytes = max(self._identity.base_bytes, self._core.base_bytes) + self._coming_bytes
        self._engine.bound_memory(max(self._identity.memory_bytes - base_bytes, 0))

    async def _keep_looking(self) -> None:
        """Beside the beats, which no disk may hold up."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self._look()

    async def _look(self) -> None:
        """At the models at hand. A store that cannot be read is believed to be as it was."""
        with suppress(StorageError, OSError):
            self._models = await asyncio.to_thread(self._at_hand)

    def _at_hand(self) -> tuple[HeldModel, ...]:
        folders = ModelStore(self._store_path).folders()
        stored = [
            HeldModel(model_id=held_id(ModelId(folder.name), weights), tier=LoadTier.DISK)
            for folder in folders
            for weights in (None, *WeightPrecision)
        ]
        return *stored, *self._nearer(folders)
