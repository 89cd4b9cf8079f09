"""A PostgreSQL server for all of these tests, and the registries of a cell on either database."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mesh.controller.registry import Database, RegistryWrites, SqliteRegistry
from mesh.controller.server import Health
from mesh.domain.errors import StorageError
from mesh.wire.access import Gate
from mesh.wire.channel import bind
from mesh.wire.leader import WAITS
from mesh.wire.serving import Guard
from tests.support.postgres_server import USER, PostgresServer, binaries

LEAD_S_MAX = 60.0
_CELLS = itertools.count()
Opened = Callable[[], AbstractAsyncContextManager[Database]]


def lacks(what: str) -> NoReturn:
    """A test is skipped, since this machine lacks what it needs. In CI, which has it, it fails."""
    if "CI" in os.environ:
        pytest.fail(what)
    pytest.skip(what)


def postgres(beside: str = "") -> PostgresServer:
    """A server that is not started yet."""
    found = binaries()
    if found is None:
        lacks("no PostgreSQL here: apt-get install postgresql")
    return PostgresServer(found, beside)


@pytest.fixture(scope="session")
def server() -> Iterator[PostgresServer]:
    pytest.importorskip("asyncpg", reason="no asyncpg here: `make test-cluster` has it")
    server = postgres()
    server.start()
    try:
        asyncio.run(create_database(server))
        yield server
    finally:
        server.close()


async def create_database(server: PostgresServer) -> None:
    import asyncpg

    connection = await asyncpg.connect(server.url(database="postgres").partition("?")[0])
    await connection.execute(f"CREATE DATABASE {USER}")
    await connection.close()


@pytest.fixture
def cell() -> str:
    """The name of a cell that nobody has used."""
    return f"cell-{next(_CELLS)}"


@asynccontextmanager
async def leading(url: str, holder: str = "127.0.0.1:7070") -> AsyncIterator[Database]:
    """A registry in PostgreSQL, once it leads."""
    from mesh.controller.postgres import PostgresRegistry

    registry = PostgresRegistry(url, holder=holder)
    await registry.open()
    try:
        async with asyncio.timeout(LEAD_S_MAX):
            await registry.leads.wait()
        yield registry
    finally:
        await registry.end()


@pytest.fixture(params=["sqlite", "postgres"])
def opened(request: pytest.FixtureRequest, tmp_path: Path, cell: str) -> Opened:
    """Opens a cell's registry, as a controller that leads does; again and again the same."""
    if request.param == "postgres":
        url = request.getfixturevalue("server").url(cell)
        return lambda: leading(url)

    @asynccontextmanager
    async def in_file() -> AsyncIterator[Database]:
        registry = SqliteRegistry(tmp_path)
        try:
            yield registry
        finally:
            await registry.end()

    return in_file


class Saying(Health):
    """What says whether it leads, and nothing else; or hangs. It counts who looks, and who waits
    for it to lead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.address, self.hangs = "", False
        self.looks = self.waited = 0

    async def say(self, *, leads: bool) -> None:
        status = "SERVING" if leads else "NOT_SERVING"
        value = health_pb2.HealthCheckResponse.ServingStatus.Value(status)
        for service in ("", "mesh.v1.Inference"):
            await self.set(service, value)
        if leads:
            self.lead()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Any:  # noqa: N802
        self.looks += 1
        self.waited += WAITS in context.invocation_metadata()
        while self.hangs:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return await super().Check(request, context)


@asynccontextmanager
async def saying(gate: Gate | None = None) -> AsyncIterator[Saying]:
    health, server = Saying(), grpc.aio.server(interceptors=[Guard(gate)])
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    health.address = bind(server, "127.0.0.1:0", None)
    await server.start()
    await health.say(leads=False)
    try:
        yield health
    finally:
        health.hangs = False
        await server.stop(None)


async def written(write: Callable[..., None], *what: object) -> None:
    """Write something as the core's performer does. Raises what it is told."""
    told: asyncio.Future[StorageError | None] = asyncio.get_running_loop().create_future()
    write(*what, told.set_result)
    async with asyncio.timeout(LEAD_S_MAX):
        error = await told
    if error is not None:
        raise error


async def within(event: asyncio.Event) -> None:
    async with asyncio.timeout(LEAD_S_MAX):
        await event.wait()


async def until(what: Callable[[], bool]) -> None:
    """Poll until it holds."""
    async with asyncio.timeout(LEAD_S_MAX):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def settled(writes: RegistryWrites) -> None:
    """Everything has been written."""
    await writes.close()
