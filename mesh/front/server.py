"""The composition root of a front: its core, the cells, and a controller's services before them.

Each protocol is the controller's own, on the same gateway; what lies behind that is a core which
picks cells, in the place of one that places requests on nodes. A front keeps nothing: what it knows
it has from its cells. `serve` owns the order in which it begins and ends.
"""

import asyncio
import logging
import random
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2_grpc

from mesh import __version__
from mesh.controller.allocator import give_back_freed
from mesh.controller.control import Control
from mesh.controller.gateway import Gateway
from mesh.controller.metrics import CellMetrics, Meter
from mesh.controller.replaying import Replaying
from mesh.controller.server import (
    SERVICES,
    Access,
    ControllerConfig,
    Health,
    Served,
    bound_http,
    end_on_signals,
    opened_access,
    opened_journal,
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
from mesh.runtime.front_actions import FrontPerformer
from mesh.runtime.host import Host
from mesh.runtime.journal import FrontStart
from mesh.text.pool import TextPool
from mesh.wire.channel import bind, server_options
from mesh.wire.serving import Guard
from mesh.wire.work_threads import WorkThreads

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


class Front(Served[FrontEvent, FrontAction]):
    """Everything that one front is made of."""

    services = FRONT_SERVICES

    def __init__(
        self,
        config: FrontConfig,
        ending: asyncio.Event,
        opened: ExitStack,
        access: Access,
        health: Health,
    ) -> None:
        super().__init__(config, ending, opened, access, health)
        clock = self._clock
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
        threads = WorkThreads()
        self._viewed = Viewed(
            cell=cells,
            clock=clock,
            log=self._log,
            recent=meter.recent,
            book=book,
            cancel=self._gateway.cancel,
            used_since=partial(cells.usage, threads),
            threads=threads,
            failure=self._tokenizers.failure,
        )
        self._control = Control(
            calls=self._gateway,
            operating=self._operating,
            viewed=self._viewed,
            texts=cells.text,
            hand_over=_hand_over,
        )

        def request(request_id: RequestId) -> Request | None:
            found = core.asked_before(request_id)
            return None if found is None else found[0]

        self._calls = calls = FrontCalls(
            cells.links, gateway=self._gateway, request=request, post=self._post
        )
        start = FrontStart(version=__version__, cells=tuple(config.cells))
        self._host = Host[FrontEvent, FrontAction](
            core=core,
            clock=clock,
            perform=FrontPerformer(clients=self._gateway, calls=calls).perform,
            recorders=[self._log, meter, book, *opened_journal(config, start, opened)],
        )
        self._watch: asyncio.Task[None] | None = None

    async def start(self, server: grpc.aio.Server, http: "HttpServer | None") -> None:
        """Look at the cells, then serve everything on servers that are bound."""
        self._watch = asyncio.create_task(self._cells.watch())
        self._watch.add_done_callback(self._watched)
        try:
            async with asyncio.timeout(LOOKED_S_MAX):
                await self._cells.looked()
        except TimeoutError:
            logger.warning("not all cells answer yet")
        await self._serve(server, http)

    def _shut_down(self) -> None:
        self._post(ShutdownRequested())

    async def _end(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        self._calls.close()
        await self._cells.close()
        await self._tokenizers.close()

    def _watched(self, watch: "asyncio.Task[None]") -> None:
        """A front that looks at its cells no more ends: its core has no other clock."""
        if not watch.cancelled() and (fault := watch.exception()) is not None:
            logger.error("the looks at the cells failed", exc_info=fault)
            self.failure = self.failure or RuntimeError(f"the looks at the cells failed: {fault}")
            self._ending.set()


async def _hand_over() -> None:
    raise InvalidInput("a front leads no cell", hint="ask a controller: --controller HOST:PORT")
