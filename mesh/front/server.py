"""The composition root of a front: its core, the cells, and a controller's services before them.

Each protocol is the controller's own, on the same gateway; what lies behind that is a core which
picks cells, in the place of one that places requests on nodes. A front keeps nothing: what it knows
it has from its cells. `serve` owns the order in which it begins and ends.
"""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH
from grpc_reflection.v1alpha import reflection

from mesh import __version__
from mesh.controller.allocator import give_back_freed
from mesh.controller.control import Control
from mesh.controller.gateway import Gateway
from mesh.controller.inference import Inference
from mesh.controller.lookup import find_deployment
from mesh.controller.metrics import CellMetrics, Meter
from mesh.controller.open_inference import OpenInference
from mesh.controller.reading import Reading
from mesh.controller.replaying import Replaying
from mesh.controller.server import (
    DRAIN_POLL_S,
    DRAIN_S_MAX,
    SERVICES,
    Access,
    ControllerConfig,
    Health,
    bound_http,
    end_on_signals,
    opened_access,
)
from mesh.controller.tenants import TenantMeter
from mesh.controller.tokenizers import Tokenizers
from mesh.controller.viewed import Viewed
from mesh.controller.watch import CellLog
from mesh.core.front import FrontCore
from mesh.domain.errors import InvalidInput
from mesh.domain.events import ShutdownRequested
from mesh.domain.front import FrontAction, FrontEvent
from mesh.domain.ids import CellName, RequestId
from mesh.domain.request import Request
from mesh.front.calls import FrontCalls
from mesh.front.cells import FrontCells
from mesh.front.operating import FrontOperating
from mesh.report.calls import CallBook
from mesh.report.narrate import Narrator
from mesh.runtime.clock import LoopClock
from mesh.runtime.front_actions import FrontPerformer
from mesh.runtime.host import Host, Recorder
from mesh.runtime.journal import FrontStart, open_journal
from mesh.text.pool import TextPool
from mesh.v1 import control_pb2_grpc, inference_pb2_grpc, open_inference_pb2_grpc
from mesh.wire.channel import bind, server_options
from mesh.wire.serving import Guard

if TYPE_CHECKING:
    from mesh.http.server import HttpServer

LOOKED_S_MAX = 5.0
"""From its start a front waits so long for its cells, before it says that it is ready."""
FRONT_SERVICES = tuple(name for name in SERVICES if name != "mesh.v1.NodeLink")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig(ControllerConfig):
    """How clients are served, as by a controller, and the cells: their controllers' addresses."""

    cells: dict[CellName, tuple[str, ...]] = field(default_factory=dict)


async def serve(
    config: FrontConfig,
    ready: Callable[[str, str | None], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Run a front until `stop` is set (SIGTERM or SIGINT where none is given). `ready` is called
    with its addresses once it has looked at its cells. Raises InvalidInput or Unavailable where it
    cannot start, and what broke its core where that was why it ended.
    """
    ending = asyncio.Event() if stop is None else stop
    with ExitStack() as opened:
        access = opened_access(config, opened)
        health = Health()
        server = grpc.aio.server(options=server_options(), interceptors=[Guard(access.gate)])
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        if stop is None:
            end_on_signals(ending, opened)
        front = Front(config, ending, opened, access, health)
        try:
            address = bind(server, config.listen, config.tls)
            http = bound_http(config, opened)
            await front.start(server, http)
            try:
                logger.info(
                    "mesh %s, a front of %s, serves at %s",
                    __version__,
                    ", ".join(config.cells),
                    address,
                )
                if ready is not None:
                    ready(address, http.address if http else None)
                giving_back = asyncio.create_task(give_back_freed())
                opened.callback(giving_back.cancel)
                await ending.wait()
                await front.drain()
            finally:
                await front.stop(server, http)
                logger.info("stopped")
        finally:
            await server.stop(None)
    if front.failure is not None:
        raise front.failure


class Front:
    """Everything that one front is made of. `opened` closes its files at the very end."""

    def __init__(
        self,
        config: FrontConfig,
        ending: asyncio.Event,
        opened: ExitStack,
        access: Access,
        health: Health,
    ) -> None:
        self.failure: Exception | None = None
        self._config = config
        self._ending = ending
        self._access = access
        self._health = health
        self._opened = opened
        self._stopped = False
        clock = LoopClock(asyncio.get_running_loop())
        core = FrontCore(tuple(config.cells))
        self._cells = cells = FrontCells(config.cells, core=core, clock=clock, post=self._post)
        self._log = CellLog(narrate=Narrator(cells.spec), now_s=clock.now_s)
        meter, book = Meter(known=cells.has), CallBook(cells.spec)
        self._metrics = CellMetrics(meter, lambda: cells.snapshot(clock.now_s()))
        self._tokenizers = Tokenizers(find=cells.text, pool=TextPool())
        self._run = secrets.randbits(48)
        """Tells its requests from those of other fronts, whose keys cells know, too."""
        self._gateway = Gateway(
            cell=cells,
            post=self._post,
            clock=clock,
            tokenizers=self._tokenizers,
            rng=random.Random(),
            epoch=self._run,
            limits=config.gateway,
            tenants=TenantMeter(access.limits, clock),
            adopts=False,
        )
        self._operating = FrontOperating(
            cells, self._gateway.deployed, Replaying(self._gateway, book)
        )
        self._reading = Reading(
            cell=cells,
            book=book,
            cancel=self._gateway.cancel,
            usage=cells.usage,
            log=self._log,
            recent=meter.recent,
            clock=clock,
        )
        self._control = Control(
            cell=cells,
            calls=self._gateway,
            clock=clock,
            operating=self._operating,
            log=self._log,
            texts=cells.text,
            usage=cells.usage,
            report=self._reading.report,
            state_path="",
            starting=tuple,
            hand_over=_hand_over,
        )
        self._viewed = Viewed(
            cell=cells,
            starting=tuple,
            failure=self._tokenizers.failure,
            recent=meter.recent,
            log=self._log,
            clock=clock,
            state_path="",
        )

        def request(request_id: RequestId) -> Request | None:
            found = core.asked_before(request_id)
            return None if found is None else found[0]

        calls = FrontCalls(cells.links, gateway=self._gateway, request=request, post=self._post)
        recorders: list[Recorder] = [self._log, meter, book]
        if config.journal is not None:
            start = FrontStart(version=__version__, cells=tuple(config.cells))
            journal = open_journal(config.journal, start)
            opened.callback(journal.close)
            recorders.append(journal)
        self._host = Host[FrontEvent, FrontAction](
            core=core,
            clock=clock,
            perform=FrontPerformer(clients=self._gateway, calls=calls).perform,
            recorders=recorders,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._close_feed: Callable[[], None] = lambda: None

    async def start(self, server: grpc.aio.Server, http: "HttpServer | None") -> None:
        """Look at the cells, then serve everything on servers that are bound."""
        watch = asyncio.create_task(self._cells.watch())
        watch.add_done_callback(self._watched)
        self._tasks.append(watch)
        try:
            async with asyncio.timeout(LOOKED_S_MAX):
                await self._cells.looked()
        except TimeoutError:
            logger.warning("not all cells answer yet")
        inference_pb2_grpc.add_InferenceServicer_to_server(Inference(self._gateway), server)
        open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(
            OpenInference(self._gateway), server
        )
        control_pb2_grpc.add_ControlServicer_to_server(self._control, server)
        if not self._access.gate.wants_keys:
            names = (*FRONT_SERVICES, HEALTH, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        for name in ("", *FRONT_SERVICES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        await server.start()
        if http is not None:
            self._start_http(http)

    def _start_http(self, http: "HttpServer") -> None:
        from mesh.http.app import application, shared
        from mesh.http.feed import Feed

        config, origins = self._config, frozenset(self._config.http_origins)
        self._tasks.append(asyncio.create_task(self._viewed.sampling()))
        feed = Feed(self._viewed, run=str(self._run), unix_s=time.time)
        self._close_feed = feed.close
        routes = application(
            gateway=self._gateway,
            snapshot=self._gateway.snapshot,
            find=find_deployment,
            metrics=self._metrics.exposition,
            feed=feed,
            operator=self._operating,
            reads=self._reading,
            page=config.page,
            gate=self._access.gate,
            hosts_allowed=frozenset(config.http_hosts_allowed),
            origins=origins,
        )
        http.start(shared(routes, origins))

    async def drain(self) -> None:
        """Let open answers end within `grace_s`, and take no further calls; `MeshClient` goes on at
        another front.
        """
        if self.failure is not None or not self._config.grace_s:
            return
        self._gateway.stop()
        await self._health.enter_graceful_shutdown()
        self._ending.clear()
        try:
            async with asyncio.timeout(self._config.grace_s):
                while self._gateway.is_asked and not self._ending.is_set():  # noqa: ASYNC110
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            logger.info("answers are still open after %g s", self._config.grace_s)
        finally:
            self._ending.set()

    async def stop(self, server: grpc.aio.Server, http: "HttpServer | None") -> None:
        self._gateway.stop()
        await self._health.enter_graceful_shutdown()
        self._post(ShutdownRequested())
        self._log.close()
        self._close_feed()
        drain_s = DRAIN_S_MAX if self.failure is None else 0.0
        await asyncio.gather(server.stop(drain_s), *([http.stop(drain_s)] if http else []))
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._cells.close()
        await self._tokenizers.close()

    def _watched(self, watch: "asyncio.Task[None]") -> None:
        """A front that looks at its cells no more ends: its core has no other clock."""
        if not watch.cancelled() and (fault := watch.exception()) is not None:
            logger.error("the looks at the cells failed", exc_info=fault)
            self.failure = self.failure or RuntimeError(f"the looks at the cells failed: {fault}")
            self._ending.set()

    def _post(self, event: FrontEvent) -> None:
        """Into the core. A front whose core fails ends: the others go on."""
        if self._stopped or self.failure is not None:
            return
        try:
            self._host.post(event)
        except Exception as error:
            logger.exception("the core failed on %s", type(event).__name__)
            self.failure = error
            self._ending.set()


async def _hand_over() -> None:
    raise InvalidInput("a front leads no cell", hint="ask a controller: --controller HOST:PORT")
