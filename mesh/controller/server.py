"""The composition root of the live controller: core, host, registry and services put together.

`serve` owns their lives: what is opened before the port is ours, and the order in which it all ends
again: no new calls, an answer for every open one, the nodes' links, the server, the files.
"""

import asyncio
import logging
import os
import random
import secrets
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH
from grpc_health.v1.health import aio as health  # type: ignore[attr-defined]
from grpc_reflection.v1alpha import reflection

from mesh import __version__
from mesh.controller.allocator import give_back_freed
from mesh.controller.control import Control
from mesh.controller.gateway import Gateway, GatewayLimits
from mesh.controller.inference import Inference
from mesh.controller.keys import KeyBook, KeyDesk
from mesh.controller.lookup import find_deployment
from mesh.controller.metrics import CellMetrics, Meter
from mesh.controller.node_link import NodeLinks
from mesh.controller.open_inference import OpenInference
from mesh.controller.operating import Operating
from mesh.controller.operations import Operations
from mesh.controller.registry import Database, RegistryWrites, SqliteRegistry, make_folder
from mesh.controller.replaying import Replaying
from mesh.controller.tenants import TenantMeter
from mesh.controller.tokenizers import CODECS_MAX, Tokenizers
from mesh.controller.usage import HOURS_KEPT, UsageBook, UsageMeter
from mesh.controller.viewed import Viewed
from mesh.controller.watch import CellLog
from mesh.core.controller.core import ControllerCore
from mesh.domain.access import TenantLimits, TenantName
from mesh.domain.actions import ControllerAction
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import InvalidInput, StandsBy, StorageError, Unavailable
from mesh.domain.events import ControllerEvent, LeaseCheckDue, ShutdownRequested
from mesh.domain.ids import DeploymentName
from mesh.domain.limits import CellLimits
from mesh.domain.revision import public_name
from mesh.domain.source_rules import SourceRules
from mesh.domain.usage import HOUR_S
from mesh.domain.views import OpenBatches
from mesh.policy.registry import DEFAULT_POLICY
from mesh.report.calls import CallBook
from mesh.report.narrate import Narrator
from mesh.runtime.clock import LoopClock
from mesh.runtime.controller_actions import ControllerPerformer, took_long
from mesh.runtime.host import Action, Event, Host, Recorder
from mesh.runtime.journal import ControllerStart, JournalHeader, open_journal
from mesh.runtime.link_life import LOOK_S, CellEpoch
from mesh.runtime.operator import Operator
from mesh.runtime.policies import policy_of
from mesh.runtime.starting import controller_core
from mesh.text.pool import TextPool
from mesh.v1 import (
    control_pb2_grpc,
    inference_pb2_grpc,
    node_link_pb2_grpc,
    open_inference_pb2_grpc,
)
from mesh.wire.access import Gate
from mesh.wire.channel import bind, format_address, parse_address, server_options
from mesh.wire.credentials import Tls
from mesh.wire.leader import WAITS
from mesh.wire.serving import Guard, may_join
from mesh.wire.work_threads import WorkThreads

if TYPE_CHECKING:
    from mesh.controller.shared_files import SharedFiles
    from mesh.controller.tracing import Traces
    from mesh.http.batches import Batches
    from mesh.http.feed import Feed
    from mesh.http.kept_files import KeptFiles
    from mesh.http.server import HttpServer

DRAIN_POLL_S = 0.02
DRAIN_S_MAX = 2.0
"""From the signal to stop to the end of the last call. Well below the grace that `mesh up` gives.
"""
SERVICES = (
    "mesh.v1.Inference",
    "mesh.v1.Control",
    "mesh.v1.NodeLink",
    "inference.GRPCInferenceService",
)

HELD_MAX = 8_192
"""Looks that wait at one time for a standby to lead; others are answered at once."""
HELD_EACH_TURN = 32
"""So many of them are answered in a turn of the loop: who has waited comes at once."""

logger = logging.getLogger(__name__)


class Health(health.HealthServicer):  # type: ignore[misc]
    """Health can be asked for and not watched, for which clients take that of who serves no such
    call: a watcher needs no key, and one that reads nothing would keep a controller from stopping.
    A look marked with WAITS is answered once this controller leads, or after LOOK_S.
    """

    def __init__(self) -> None:
        super().__init__()
        self.why_not: Callable[[Any], str] = lambda context: ""
        """Why the node of a call must not obey this controller; empty where it may."""
        self._leads = False
        self._held: dict[asyncio.Future[None], None] = {}
        """Looks that wait until this controller leads, the oldest first."""

    def lead(self) -> None:
        """This controller takes calls: answer the looks that wait for that."""
        self._leads = True
        for held in [*islice(self._held, HELD_EACH_TURN)]:
            del self._held[held]
            if not held.done():
                held.set_result(None)
        if self._held:
            asyncio.get_running_loop().call_soon(self.lead)

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Any:  # noqa: N802
        if WAITS in (context.invocation_metadata() or ()):
            await self._hold(context)
        if self.why_not(context):
            return health_pb2.HealthCheckResponse(status="NOT_SERVING")
        return await super().Check(request, context)

    async def _hold(self, context: Any) -> None:
        """Wait until this controller leads, as long as its answer comes to the caller in time."""
        if self._leads or len(self._held) >= HELD_MAX:
            return
        held = asyncio.get_running_loop().create_future()
        self._held[held] = None
        try:
            async with asyncio.timeout(min(LOOK_S, (context.time_remaining() or inf) / 2)):
                await held
        except TimeoutError:
            pass
        finally:
            self._held.pop(held, None)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: N802
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "health is not watched here: use Check")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    listen: str
    """HOST:PORT; port 0 takes a free one."""
    http: str | None = None
    """The same of HTTP, where that is to be served."""
    http_hosts_allowed: tuple[str, ...] = ()
    """Names by which it may be asked over the loopback, beside the loopback's; in lower case."""
    http_origins: tuple[str, ...] = ()
    """The origins whose pages may ask the cell, as browsers spell them; `*` stands for all."""
    page: bool = True
    """Whether browsers get one at `/`."""
    home: Path
    """The state folder; the controller's part of it is `controller/`."""
    state: str | None = None
    """The address of the registry in PostgreSQL; `None` for SQLite under `home`."""
    journal: Path | None = None
    policy: str = DEFAULT_POLICY
    limits: CellLimits = field(default_factory=CellLimits)
    gateway: GatewayLimits = field(default_factory=GatewayLimits)
    keys: bool = False
    """Whether each call needs one."""
    tls: Tls | None = None
    """Its certificate, and whose it trusts."""
    sources: SourceRules = field(default_factory=SourceRules)
    """What each role may deploy from."""
    traces: bool = False
    """Whether calls are traced, as the environment's OTEL_* say."""
    grace_s: float = 0.0
    """For answers that are open when it is to end."""


async def serve(
    config: ControllerConfig,
    ready: Callable[[str, str | None], None] | None = None,
    stop: asyncio.Event | None = None,
    stands_by: Callable[[], None] | None = None,
) -> bool:
    """Run a controller until `stop` is set (SIGTERM or SIGINT where none is given). `ready` is
    called with the address once it serves, and with that of HTTP; `stands_by` before, if it stands
    by first. Whether it has handed over as it was asked to, and is to stand by from now on.

    Raises InvalidInput, StorageError, or Unavailable when it cannot start, and whatever broke the
    core when that was why it ended.
    """
    ending = asyncio.Event() if stop is None else stop
    with ExitStack() as opened:
        access = opened_access(config, opened)
        guard, health_ = Guard(access.gate), Health()
        server = grpc.aio.server(options=server_options(), interceptors=[guard])
        health_pb2_grpc.add_HealthServicer_to_server(health_, server)
        if stop is None:
            end_on_signals(ending, opened)
        try:
            address = bind(server, config.listen, config.tls)
            http = bound_http(config, opened)
            database = await _opened_registry(config, address)
            tokenizers = Tokenizers(find=database.tables.text, pool=TextPool())
            try:
                used = _opened_usage(config, opened)
                stood_by = not database.leads.is_set()
                if stood_by:
                    await _begin_to_stand_by(database, guard, access.gate, server, http, health_)
                    if stands_by is not None:
                        stands_by()
                    warming = asyncio.create_task(_keep_warm(tokenizers, database))
                    try:
                        await first_of(ending, database.leads, database.deposed)
                    finally:
                        warming.cancel()
                        await asyncio.gather(warming, return_exceptions=True)
                    if database.failure is not None:
                        raise database.failure
                if ending.is_set():
                    return False
                # The lease is renewed meanwhile.
                start = await asyncio.to_thread(_start_on, database, config)
                core = await asyncio.to_thread(controller_core, start)
                controller = Controller(
                    config, ending, opened, access, database, health_, start, core, used, tokenizers
                )
                await controller.start(server, http, guard if stood_by else None)
                at = http.address if http else None
                logger.info("mesh %s serves at %s", __version__, address)
                if at is not None:
                    logger.info("HTTP is served at http%s://%s", "s" if config.tls else "", at)
                try:
                    if ready is not None:
                        ready(address, at)
                    giving_back = asyncio.create_task(give_back_freed())
                    opened.callback(giving_back.cancel)
                    await first_of(ending, database.deposed)
                    if not database.deposed.is_set():
                        await controller.drain(database.deposed)
                finally:
                    await controller.stop(server, http)
                    logger.info("stopped")
            finally:
                await tokenizers.close()
                await database.end()
        finally:
            await server.stop(None)
    if controller.failure is not None:
        raise controller.failure
    if not ending.is_set() and not database.handed_over:
        raise database.failure or Unavailable(
            "another controller leads the cell now", hint="start this one again: it stands by then"
        )
    return not ending.is_set()


def bound_http(config: ControllerConfig, opened: ExitStack) -> "HttpServer | None":
    """The HTTP server, bound, where one is asked for. It is imported here because its libraries
    would be a third of every controller's start.
    """
    if config.http is None:
        return None
    from mesh.http.server import HttpServer

    http = HttpServer(config.http, config.tls)
    opened.callback(http.close)
    return http


def end_on_signals(ending: asyncio.Event, opened: ExitStack) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
        opened.callback(loop.remove_signal_handler, number)


async def _opened_registry(config: ControllerConfig, address: str) -> Database:
    """Raises StorageError, and InvalidInput for an address that is none."""
    policy_of(config.policy)  # before anything is opened
    if config.state is None:
        return SqliteRegistry(config.home / "controller")
    from mesh.controller.postgres import PostgresRegistry  # with asyncpg, which few have

    make_folder(config.home / "controller")  # for usage and keys
    host, port = parse_address(address)
    everywhere = host in ("0.0.0.0", "::")
    holder = format_address(socket.gethostname(), port) if everywhere else address
    registry = PostgresRegistry(config.state, holder=holder)
    await registry.open()
    return registry


async def _begin_to_stand_by(
    database: Database,
    guard: Guard,
    gate: Gate,
    server: grpc.aio.Server,
    http: "HttpServer | None",
    health_: Health,
) -> None:
    """Answer who asks with where the leader is from now on."""

    def instead(known: bool) -> StandsBy:
        if not known:  # where the leader is, within its network, is for those who have a key
            return StandsBy("this controller stands by", hint="ask the one that leads")
        leader = database.leader()
        return StandsBy(
            f"this controller stands by; {leader or 'none'} leads",
            hint=f"ask {leader}" if leader else "try again in a second",
        )

    guard.instead = instead
    await health_.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    await server.start()
    if http is not None:
        from mesh.http.app import standing_by

        http.start(standing_by(instead, gate))
    logger.info("stands by; %s leads", database.leader() or "none")


async def _keep_warm(tokenizers: Tokenizers, database: Database) -> None:
    """Have the tokenizers of what is deployed built while this one stands by."""
    while True:
        database.changed.clear()
        try:
            tokenizers.warm_all(await asyncio.to_thread(database.tables.models, CODECS_MAX))
        except StorageError as error:
            logger.warning("tokenizers are not built before it leads: %s", error.message)
        await database.changed.wait()


async def first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _start_on(database: Database, config: ControllerConfig) -> ControllerStart:
    """What this start of the controller goes out from."""
    tables = database.tables
    return ControllerStart(
        version=__version__,
        epoch=database.epoch,
        policy=config.policy,
        limits=config.limits,
        deployments=tables.deployments(),
        profiles=tables.profiles(),
        histories=tables.histories(),
        revisions=tables.revisions(),
    )


def _opened_usage(config: ControllerConfig, opened: ExitStack) -> UsageBook:
    book = UsageBook(config.home / "controller")
    opened.callback(book.close)
    book.drop_before(time.time() - HOURS_KEPT * HOUR_S)
    return book


def _opened_traces(config: ControllerConfig, clock: LoopClock, opened: ExitStack) -> "list[Traces]":
    """Raises InvalidInput where the library is not there, or a variable cannot be meant."""
    if not config.traces:
        return []
    try:
        from mesh.controller.trace_export import opened_tracer
        from mesh.controller.tracing import Traces

        tracer = opened_tracer(os.environ, opened)
    except ImportError as error:
        raise InvalidInput(
            f"OTEL_* ask for traces, and {error.name} is not installed",
            hint="pip install 'mesh-serve[otel]', or set OTEL_SDK_DISABLED=true",
        ) from error
    return [Traces(tracer, clock.now_s)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    gate: Gate = field(default_factory=Gate)
    limits: Callable[[TenantName], TenantLimits] = lambda _: TenantLimits()
    keys: KeyDesk | None = None


def opened_access(config: ControllerConfig, opened: ExitStack) -> Access:
    """Raises InvalidInput where keys are wanted, and there is none yet: nobody could ask."""
    mutual = config.tls is not None
    if not config.keys:
        return Access(gate=Gate(mutual=mutual))
    book = KeyBook(config.home / "controller")
    opened.callback(book.close)
    if not book.all_keys():
        raise InvalidInput(
            f"every call at {config.listen} needs a key, and there is none in {book.path}",
            hint="`mesh key create --role admin` makes one; --open lets everybody do everything",
        )
    return Access(
        gate=Gate(book.caller, book.check_acted_for, mutual=mutual),
        limits=book.limits,
        keys=KeyDesk(book.path.parent),
    )


def opened_journal(
    config: ControllerConfig, start: JournalHeader, opened: ExitStack
) -> list[Recorder]:
    if config.journal is None:
        return []
    journal = open_journal(config.journal, start)
    opened.callback(journal.close)
    return [journal]


class Started:
    """A gRPC server that has started, as services are added to one: it takes no handlers by their
    methods any more, which would spare it the look at each service's.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """They are among the generic ones."""


class Served(ABC, Generic[Event, Action]):
    """What a controller and a front have in common: every protocol on one gateway, before a core.
    A subclass makes the parts. `opened` closes its files at the very end.
    """

    services: tuple[str, ...] = SERVICES
    _run: int
    """Tells this run of the process from others."""
    _host: Host[Event, Action]
    _log: CellLog
    _metrics: CellMetrics
    _tokenizers: Tokenizers
    _gateway: Gateway
    _operating: Operator
    _control: Control
    _viewed: Viewed
    _keys: KeyDesk | None = None
    """What operators make and revoke keys in; a front has none, but a copy of its cells' keys."""

    def __init__(
        self,
        config: ControllerConfig,
        ending: asyncio.Event,
        opened: ExitStack,
        access: Access,
        health_: Health,
    ) -> None:
        self.failure: Exception | None = None
        self._config = config
        self._ending = ending
        self._opened = opened
        self._access = access
        self._health = health_
        self._clock = LoopClock(asyncio.get_running_loop())
        self._stopped = False
        self._feed: Feed | None = None
        self._inference: Inference | None = None
        self._batches: Batches | None = None

    async def _serve(
        self, server: grpc.aio.Server, http: "HttpServer | None", started: Guard | None = None
    ) -> None:
        """Serve everything on servers that are bound; `started`: the guard of those that have
        started to answer that this controller stands by.
        """
        handled: Any = Started(server) if started is not None else server
        self._inference = Inference(self._gateway, self._access.gate)
        inference_pb2_grpc.add_InferenceServicer_to_server(self._inference, handled)
        open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(
            OpenInference(self._gateway), handled
        )
        control_pb2_grpc.add_ControlServicer_to_server(self._control, handled)
        if not self._access.gate.wants_keys:
            names = (*self.services, HEALTH, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, handled)
        if started is None:
            await server.start()
        if http is not None:
            await self._start_http(http)
        if started is not None:
            started.instead = None  # before its health says that it leads: nodes come then
        for name in ("", *self.services):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._health.lead()

    async def _start_http(self, http: "HttpServer") -> None:
        from mesh.http.app import application, shared
        from mesh.http.feed import Feed

        config, origins = self._config, frozenset(self._config.http_origins)
        sampling = asyncio.create_task(self._viewed.sampling())
        self._opened.callback(sampling.cancel)
        run = f"{self._run}-{secrets.token_hex(4)}"  # a new state folder begins with run 1, too
        self._feed = Feed(self._viewed, run=run, unix_s=time.time)
        routes = application(
            gateway=self._gateway,
            snapshot=self._gateway.snapshot,
            find=find_deployment,
            metrics=self._metrics.exposition,
            feed=self._feed,
            operator=self._operating,
            reads=self._viewed,
            keys=self._keys,
            batches=self._batches,
            page=config.page,
            gate=self._access.gate,
            hosts_allowed=frozenset(config.http_hosts_allowed),
            origins=origins,
        )
        http.start(shared(routes, origins))

    async def drain(self, *others: asyncio.Event) -> None:
        """Let open answers end within `grace_s`, and take no further calls. It ends early where it
        is asked to end once more, or one of `others` is set.
        """
        grace_s, ends = self._config.grace_s, (self._ending, *others)
        if self.failure is not None or not grace_s:
            return
        self._stop_batches()
        self._gateway.stop()
        await self._health.enter_graceful_shutdown()
        self._ending.clear()
        try:
            async with asyncio.timeout(grace_s):
                while self._gateway.is_asked and not any(e.is_set() for e in ends):  # noqa: ASYNC110
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            logger.info("answers are still open after %g s", grace_s)
        finally:
            self._ending.set()

    async def stop(self, server: grpc.aio.Server, http: "HttpServer | None") -> None:
        """Stops the server, within DRAIN_S_MAX."""
        self._stop_batches()
        self._gateway.stop()
        await self._health.enter_graceful_shutdown()
        self._shut_down()
        self._log.close()
        if self._feed is not None:
            self._feed.close()
        if self._inference is not None:
            self._inference.stop()
        # A core that failed answers nobody: there is nothing to wait for.
        drain_s = DRAIN_S_MAX if self.failure is None else 0.0
        await asyncio.gather(server.stop(drain_s), *([http.stop(drain_s)] if http else []))
        self._stopped = True
        await self._end()
        self._viewed.threads.close()

    @abstractmethod
    def _shut_down(self) -> None:
        """Have the core answer every open call."""

    @abstractmethod
    async def _end(self) -> None:
        """End what only this kind has, once nobody is served any more."""

    def _stop_batches(self) -> None:
        """What they have under way is asked again by the next controller."""
        if self._batches is not None:
            self._batches.stop()

    def _post(self, event: Event) -> None:
        """Into the core. A core that fails is in no known state: the process ends. A controller's
        nodes find it again when it is started anew, and the registry has what was acknowledged.
        """
        if self._stopped or self.failure is not None:
            return
        try:
            self._host.post(event)
        except Exception as error:
            logger.exception("the core failed on %s", type(event).__name__)
            self.failure = error
            self._ending.set()


class Controller(Served[ControllerEvent, ControllerAction]):
    """Everything that one controller is made of."""

    def __init__(
        self,
        config: ControllerConfig,
        ending: asyncio.Event,
        opened: ExitStack,
        access: Access,
        database: Database,
        health_: Health,
        start: ControllerStart,
        core: ControllerCore,
        used: UsageBook,
        tokenizers: Tokenizers,
    ) -> None:
        super().__init__(config, ending, opened, access, health_)
        self._run = start.epoch
        self._start, self._core, tables = start, core, database.tables
        self._writes = RegistryWrites(database)
        self._shared_by = database.shared
        self._shared_files: SharedFiles | None = None
        clock = self._clock
        self._log = CellLog(narrate=Narrator(self._spec), now_s=clock.now_s)
        meter = Meter(known=self._knows)
        self._metrics = CellMetrics(meter, lambda: self._core.snapshot(clock.now_s()))
        usage = UsageMeter(
            used,
            known=self._knows,
            payer=lambda r: self._gateway.payer(r),
            charged=lambda r: self._gateway.charged_before(r),
        )
        self._tokenizers = tokenizers
        self._links = NodeLinks(
            post=self._post,
            epoch=CellEpoch(database.epoch, database.cell),
            leased=config.state is not None,
            later=database.show,
            may_join=partial(may_join, access.gate),
        )
        operations = Operations(post=self._post, epoch=start.epoch)
        traces = _opened_traces(config, clock, opened)
        self._gateway = Gateway(
            cell=self._core,
            post=self._post,
            clock=clock,
            tokenizers=self._tokenizers,
            rng=random.Random(),
            epoch=start.epoch,
            limits=config.gateway,
            tenants=TenantMeter(access.limits, clock),
            traces=next(iter(traces), None),
            starting=self._links.starting,
        )

        book = CallBook(self._spec)
        self._keys = access.keys
        self._operating = Operating(
            operations=operations,
            seen=self._gateway.deployed,
            whole=lambda: self._core.snapshot(clock.now_s()),
            clock=clock,
            limits=access.limits,
            acknowledged=self._amiss,
            starting=self._links.starting,
            sources=config.sources,
            replaying=Replaying(self._gateway, book),
            foreseen=lambda spec: self._core.prospect(spec, clock.now_s()),
            planned=lambda name, calls: self._core.plan(name, calls, clock.now_s()),
            writable=database.check_writable,
        )
        threads = WorkThreads()
        self._viewed = Viewed(
            cell=self._core,
            clock=clock,
            log=self._log,
            recent=meter.recent,
            book=book,
            cancel=self._gateway.cancel,
            used_since=partial(threads.run, usage.since),
            threads=threads,
            failure=self._tokenizers.failure,
            starting=self._links.starting,
            batches=self._open_batches,
            state_path=database.place,
        )
        self._control = Control(
            calls=self._gateway,
            operating=self._operating,
            viewed=self._viewed,
            texts=tables.text,
            hand_over=database.hand_over,
        )
        health_.why_not = self._links.why_not
        performer = ControllerPerformer(
            links=self._links,
            clients=self._gateway,
            operators=operations,
            registry=self._writes,
            clock=clock,
        )
        performer.post = self._post
        self._host = Host[ControllerEvent, ControllerAction](
            core=self._core,
            clock=clock,
            perform=performer.perform,
            recorders=[
                self._log,
                meter,
                book,
                usage,
                *opened_journal(config, start, opened),
                *traces,
            ],
            took_long=took_long,
        )

    async def start(
        self, server: grpc.aio.Server, http: "HttpServer | None", started: Guard | None
    ) -> None:
        """Serve everything; see `_serve`."""
        handled: Any = Started(server) if started is not None else server
        node_link_pb2_grpc.add_NodeLinkServicer_to_server(self._links, handled)
        await self._serve(server, http, started)
        self._post(LeaseCheckDue())
        for deployment in self._start.deployments:
            self._warm(public_name(deployment.spec.name))

    async def _start_http(self, http: "HttpServer") -> None:
        from mesh.http.batches import Batches

        files = await self._opened_files(self._config.home / "controller")
        self._opened.callback(files.close)
        self._batches = Batches(files, self._access.gate.check_acted_for)
        await super()._start_http(http)

    async def _opened_files(self, home: Path) -> "KeptFiles":
        """Raises StorageError."""
        from mesh.http.kept_files import KeptFiles

        if self._shared_by is None:
            return KeptFiles(home)
        from mesh.controller.shared_files import SharedFiles

        self._shared_files = SharedFiles(home, self._shared_by)
        await self._shared_files.begin()
        return self._shared_files

    def _shut_down(self) -> None:
        self._post(ShutdownRequested())
        self._links.stop()

    async def _end(self) -> None:
        if self._shared_files is not None:
            await self._shared_files.end()
        await self._writes.close()

    def _open_batches(self) -> Sequence[OpenBatches]:
        return () if self._batches is None else self._batches.open()

    def _knows(self, name: DeploymentName) -> bool:
        return self._core.deployment(name) is not None

    def _spec(self, name: DeploymentName) -> DeploymentSpec | None:
        found = self._core.deployment(name)
        return None if found is None else found.spec

    async def _amiss(self, name: DeploymentName) -> str:
        """What of a deployment's texts is refused, and why; it begins to build what they need."""
        self._warm(name)
        faults = [await self._tokenizers.fault(model_id) for model_id in self._core.models(name)]
        return "; ".join(fault for fault in faults if fault)

    def _warm(self, name: DeploymentName) -> None:
        for model_id in self._core.models(name):
            self._tokenizers.warm(model_id, name)
