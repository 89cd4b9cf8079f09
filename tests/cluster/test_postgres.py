"""What a registry in PostgreSQL does when the database, the network or another controller fails."""

import asyncio
import gc
import os
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from mesh.controller.registry import (
    SCHEMA,
    Database,
    RegistryWrites,
    Statements,
    Tables,
    stored,
)
from mesh.domain.errors import InvalidInput, StorageError, Unavailable
from mesh.domain.history import OutputHistory
from mesh.domain.ids import DeploymentName
from mesh.runtime.lease import LEASE_S
from tests.cluster.conftest import LEAD_S_MAX, leading, settled, until, within, written
from tests.controller.test_registry import TEXT, deployment
from tests.support.postgres_server import PostgresServer

asyncpg = pytest.importorskip("asyncpg")
from mesh.controller.postgres import PostgresRegistry  # noqa: E402
from mesh.controller.postgres_lease import (  # noqa: E402
    _SESSION_LOCK,
    _SETTINGS,
    OPEN_S_MAX,
    Place,
)

REFUSED_S_MAX = 1.5
"""An operator hears within a second; the machine of a test may be busy."""
HISTORY = OutputHistory(mean_tokens=9.0, count=5)


async def make_schema_7(url: str) -> None:
    await asked(url, "ALTER TABLE histories DROP COLUMN classes")
    await asked(url, "ALTER TABLE starts DROP COLUMN cell")
    await asked(url, "UPDATE schema_version SET version = 7")


def names(database: Database) -> list[str]:
    return [one.spec.name for one in database.tables.deployments()]


@asynccontextmanager
async def standby(url: str, holder: str = "127.0.0.1:7071") -> AsyncIterator[PostgresRegistry]:
    registry = PostgresRegistry(url, holder=holder)
    await registry.open()
    try:
        yield registry
    finally:
        await registry.end()


async def asked(url: str, sql: str) -> object:
    connection = await asyncpg.connect(Place(url).dsn)
    try:
        await connection.execute(f'SET search_path = "{Place(url).cell}"')
        return await connection.fetchval(sql)
    finally:
        await connection.close()


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes take as long as a busy machine needs, so that what refuses them is something else."""
    for of in ("postgres", "postgres_lease"):
        monkeypatch.setattr(f"mesh.controller.{of}.WRITE_S_MAX", LEAD_S_MAX)


def test_an_address_that_cannot_be_meant_is_told() -> None:
    for url, what in (
        ("mysql://x/y", "'mysql' is no kind of database"),
        ("postgresql://h:x/y", "cannot be read"),
        ("postgresql://h/y?cell=No_Label", "the cell's name 'No_Label' is no DNS label"),
        ("postgresql://h1:5432,h2:x/y", "cannot be read"),
        ("//me:secret@h/y", "'h/y' is no kind of database"),
        *((f"postgresql://me:sec{sign}ret@h/y", "part of a user or a password") for sign in "/?#@"),
    ):
        with pytest.raises(InvalidInput, match=what) as told:
            Place(url)
        assert "sec" not in told.value.message + told.value.hint
    several = Place("postgresql://me:a%40b@h1:5432,h2:5433/y")
    assert several.shown == "postgresql://h1:5432,h2:5433/y?cell=mesh"
    place = Place("postgresql://me:secret@h:5433/y?cell=b&sslmode=require")
    assert place.shown == "postgresql://h:5433/y?cell=b"
    assert place.dsn == "postgresql://me:secret@h:5433/y?sslmode=require"


async def test_what_keeps_it_from_opening_is_told_without_the_password(
    server: PostgresServer, cell: str
) -> None:
    wrong = server.url(cell, password="quite wrong")
    with pytest.raises(StorageError, match="password authentication failed") as told:
        await PostgresRegistry(wrong, holder="a").open()
    assert "PGPASSWORD" in told.value.hint
    assert "quite" not in told.value.message
    with pytest.raises(StorageError, match='database "nowhere" does not exist') as told:
        await PostgresRegistry(server.url(cell, database="nowhere"), holder="a").open()
    assert "createdb" in told.value.hint
    closed = server.url(cell).replace(str(server.port), "1")
    with pytest.raises(StorageError, match="cannot open the registry"):
        await PostgresRegistry(closed, holder="a").open()
    for asked, said, hint in (
        ("sslmode=bogus", "must be one of", "see what --state says"),
        ("sslmode=verify-full", "root certificate file", "see what --state says"),
        ("sslmode=verify-ca&sslrootcert=/none", "No such file", "see what --state says"),
        ("sslmode=require", "rejected SSL", "see that the database runs"),
    ):
        with pytest.raises(StorageError, match=said) as told:
            await PostgresRegistry(f"{server.url(cell)}&{asked}", holder="a").open()
        assert hint in told.value.hint
        assert "\n" not in told.value.message


async def test_a_connection_that_is_given_up_as_it_comes_about_leaves_no_error_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    registry = PostgresRegistry(f"postgresql://127.0.0.1:{port}/mesh", holder="a")
    for turns in range(12):
        connecting = asyncio.create_task(registry._connect(LEAD_S_MAX))
        for _ in range(turns):
            await asyncio.sleep(0)
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        await asyncio.sleep(0)
        gc.collect()
    silent.close()
    await registry.end()
    assert caplog.messages == []


async def test_of_several_servers_the_one_that_takes_writes_is_used(
    server: PostgresServer, cell: str
) -> None:
    url = server.url(cell).replace("@", "@127.0.0.1:1,")
    async with leading(url) as database:
        assert database.leads.is_set()


async def test_a_database_that_is_no_place_for_a_cell_is_told(
    server: PostgresServer, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.url(cell)
    create = "CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0"
    await asked(url, create)
    with pytest.raises(StorageError, match="has the encoding LATIN1") as told:
        await PostgresRegistry(server.url(cell, database="latin"), holder="a").open()
    assert "createdb -E UTF8" in told.value.hint
    await asked(url, "ALTER ROLE mesh SET default_transaction_read_only = on")
    with pytest.raises(StorageError, match="read_write") as told:
        await PostgresRegistry(url, holder="a").open()
    assert "the server that takes writes" in told.value.hint
    connection = await asyncpg.connect(Place(url).dsn)
    await connection.execute("SET default_transaction_read_only = off")
    await connection.execute("ALTER ROLE mesh RESET default_transaction_read_only")
    await connection.close()

    # As behind PgBouncer, which has been told to ignore what it does not know.
    connect = asyncpg.connect
    dropping = lambda *args, server_settings, **how: connect(*args, **how)  # noqa: E731
    monkeypatch.setattr(asyncpg, "connect", dropping)
    with pytest.raises(StorageError, match="is in the schema public") as told:
        await PostgresRegistry(url, holder="a").open()
    assert "PgBouncer" in told.value.hint
    monkeypatch.undo()

    # As behind one that gives its sessions, of the right schema, to whoever asks next.
    session = await connect(Place(url).dsn)

    async def given(*_: object, **__: object) -> Mock:
        return Mock(wraps=session, terminate=lambda: None)

    monkeypatch.setattr(asyncpg, "connect", given)
    with pytest.raises(StorageError, match="share a session") as told:
        await PostgresRegistry(url, holder="a").open()
    assert "PgBouncer" in told.value.hint
    monkeypatch.undo()
    await session.close()
    assert await asked(url, "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == 0
    async with leading(url):
        pass


async def test_a_later_schema_is_refused_and_an_earlier_one_loses_nothing(
    server: PostgresServer, cell: str
) -> None:
    url = server.url(cell)
    async with leading(url) as database:
        await written(RegistryWrites(database).store, deployment(), TEXT, None)
    await asked(url, f"UPDATE schema_version SET version = {SCHEMA + 1}")
    with pytest.raises(StorageError, match=f"has schema {SCHEMA + 1}; this mesh knows up to"):
        await PostgresRegistry(url, holder="a").open()
    await make_schema_7(url)
    async with leading(url) as database:
        assert names(database) == ["chat"]
        writes = RegistryWrites(database)
        writes.store_history(DeploymentName("chat"), HISTORY)
        await settled(writes)
        assert database.tables.histories() == {DeploymentName("chat"): HISTORY}
    assert await asked(url, "SELECT version FROM schema_version") == SCHEMA


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("DELETE FROM lease", "lease has 0 rows, not 1"),
        ("DELETE FROM starts", "starts has 0 rows, not 1"),
        ("DELETE FROM schema_version", "schema_version has 0 rows, not 1"),
        ("INSERT INTO lease SELECT * FROM lease", "lease has 2 rows, not 1"),
        ("DROP TABLE profiles", 'relation "profiles" does not exist'),
        ("ALTER TABLE deployments DROP COLUMN body", "deployments.body"),
        ("ALTER TABLE deployments ADD COLUMN more INT", "no column named more"),
        ("UPDATE deployments SET body = '{'", "holds no valid deployment under 'chat'"),
    ],
)
async def test_tables_that_are_not_as_they_were_made_are_told(
    server: PostgresServer, cell: str, damage: str, said: str
) -> None:
    url = server.url(cell)
    async with leading(url) as database:
        writes = RegistryWrites(database)
        await written(writes.store, deployment(), TEXT, None)
    await asked(url, damage)
    with pytest.raises(StorageError, match=said) as told:
        async with leading(url) as database:
            database.tables.deployments()
    assert "restore the cell's schema" in told.value.hint


async def test_a_second_cell_of_the_name_stands_by_and_follows_what_is_written(
    server: PostgresServer, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.controller.postgres.REFRESH_S", 0.0)
    url = server.url(cell)
    async with leading(url, "one:7070") as leader, standby(url, "two:7070") as second:
        await written(RegistryWrites(leader).store, deployment(), TEXT, None)
        await until(lambda: names(second) == ["chat"])
        assert second.leader() == "one:7070"
        assert not second.leads.is_set()
        with pytest.raises(Unavailable):
            second.check_writable()
        async with leading(server.url(f"{cell}-other")) as other:
            assert names(other) == []
        await asyncio.sleep(2 * LEASE_S)
        assert not second.leads.is_set()


async def test_the_next_one_leads_after_a_leader_steps_down(
    server: PostgresServer, cell: str
) -> None:
    url = server.url(cell)
    async with standby(url, "one:7070") as first, standby(url, "two:7070") as second:
        await until(lambda: first.leads.is_set() or second.leads.is_set())
        leader, other = (first, second) if first.leads.is_set() else (second, first)
        await written(RegistryWrites(leader).store, deployment(), TEXT, None)
        await leader.step_down()
        await within(other.leads)
        assert other.epoch > leader.epoch
        assert names(other) == ["chat"]
        assert leader.deposed.is_set()


@pytest.mark.usefixtures("unhurried")
async def test_a_leader_that_was_frozen_writes_nothing_and_hears_of_it(
    server: PostgresServer, cell: str
) -> None:
    url = server.url(cell)
    async with leading(url) as leader:
        assert isinstance(leader, PostgresRegistry)
        # As after SIGSTOP: it renews nothing, and believes that it leads.
        for task in leader._tasks:
            task.cancel()
        async with standby(url) as second:
            await within(second.leads)
            assert second.epoch > leader.epoch
            leader.lease.renewed(time.monotonic())
            with pytest.raises(StorageError, match=f"leads the cell now: epoch {second.epoch}"):
                await leader.commit(stored(deployment(), TEXT))
            assert leader.deposed.is_set()
            await written(RegistryWrites(second).store, deployment("b"), TEXT, None)
    async with leading(url) as third:
        assert names(third) == ["b"]


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_database_that_is_away_costs_writes_alone(
    server: PostgresServer, cell: str, *, hangs: bool
) -> None:
    """They are refused at once, what nobody waits for is kept, and nobody else leads after it."""
    url, chat = server.url(cell), DeploymentName("chat")
    async with leading(url) as leader, standby(url) as second:
        writes = RegistryWrites(leader)
        await written(writes.store, deployment(), TEXT, None)
        server.hang(stopped=True) if hangs else server.stop()
        try:
            for _ in range(3):
                begun_s = time.monotonic()
                with pytest.raises(StorageError, match="registry"):
                    await written(writes.store, deployment("b"), TEXT, None)
                assert time.monotonic() - begun_s < REFUSED_S_MAX
                await asyncio.sleep(LEASE_S / 2)
            with pytest.raises(Unavailable, match="takes no writes of this controller now"):
                leader.check_writable()
            writes.store_history(chat, HISTORY)
            assert leader.tables.text(deployment().model.model_id) == TEXT
        finally:
            server.hang(stopped=False) if hangs else server.start()
        await until(lambda: leader.tables.histories() == {chat: HISTORY})
        await written(writes.store, deployment("c"), TEXT, None)
        assert not leader.deposed.is_set()
        assert not second.leads.is_set()
    async with leading(url) as third:
        assert (names(third), third.tables.histories()) == (["c", "chat"], {chat: HISTORY})


async def test_a_database_that_is_read_only_for_a_while_costs_writes_alone(
    server: PostgresServer, cell: str
) -> None:
    """As of several hosts none takes writes until one of them is promoted."""
    url, chat = server.url(cell), DeploymentName("chat")

    async def read_only(state: str) -> None:
        await asked(url, f"ALTER SYSTEM SET default_transaction_read_only = {state}")
        await asked(url, "SELECT pg_reload_conf()")
        others = "pid <> pg_backend_pid() AND application_name = 'mesh'"
        await asked(url, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")

    async with leading(url) as leader:
        writes = RegistryWrites(leader)
        await written(writes.store, deployment(), TEXT, None)
        await read_only("on")
        try:
            writes.store_history(chat, HISTORY)
            await asyncio.sleep(2 * LEASE_S)
            assert leader.tables.histories() == {}
            assert not leader.deposed.is_set()
        finally:
            await read_only("off")
        await until(lambda: leader.tables.histories() == {chat: HISTORY})
        assert not leader.deposed.is_set()


async def test_a_leader_that_loses_its_session_lock_alone_leads_on(
    server: PostgresServer, cell: str
) -> None:
    async with standby(server.url(cell), "one:7070") as leader:
        await within(leader.leads)
        async with standby(server.url(cell), "two:7070") as second:
            await until(lambda: second.lease.row is not None)
            for _ in range(3):
                await until_so(lambda: _waiting(leader))
                leader._session.terminate()
                await asyncio.sleep(LEASE_S)
                assert not second.leads.is_set()
                assert not leader.deposed.is_set()
                await written(RegistryWrites(leader).store, deployment(), TEXT, None)


async def test_a_leader_hands_over_to_one_that_stands_by_and_to_nobody_else(
    server: PostgresServer, cell: str
) -> None:
    url = server.url(cell)
    async with standby(url, "one:7070") as leader:
        await within(leader.leads)
        with pytest.raises(Unavailable, match="no controller stands by"):
            await leader.hand_over()
        assert not leader.deposed.is_set()
        async with standby(url, "two:7070") as second:
            await until_so(lambda: _waiting(leader))
            begun_s = time.monotonic()
            await leader.hand_over()
            await within(second.leads)
            took_s = time.monotonic() - begun_s
            assert leader.handed_over
            assert second.epoch > leader.epoch
            assert took_s < LEASE_S, "as quick as its session lock, and not as its lease"
            with pytest.raises(StorageError):
                await leader.commit(stored(deployment(), TEXT))


async def _waiting(leader: PostgresRegistry) -> bool:
    """Whether another one waits for the leader's session lock."""
    async with leader.asked("ask") as connection:
        return await leader._locks(connection, _SESSION_LOCK, leader.epoch, granted=False) > 0


async def until_so(what: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LEAD_S_MAX):
        while not await what():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_one_that_stands_by_reads_keys_once_something_was_written(
    server: PostgresServer, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a connection that it makes for that; whether anything was, it asks on the one it has."""
    monkeypatch.setattr("mesh.controller.postgres.REFRESH_S", 0.0)
    url = server.url(cell)
    async with leading(url) as leader, standby(url) as second:
        reads, read = [0], second._read

        async def counted() -> object:
            reads[0] += 1
            return await read()

        monkeypatch.setattr(second, "_read", counted)
        await asyncio.sleep(2 * LEASE_S)
        assert reads == [0]
        await written(RegistryWrites(leader).store, deployment(), TEXT, None)
        await until(lambda: names(second) == ["chat"])
        assert reads == [1]


async def test_one_that_stands_by_goes_on_where_no_new_connection_can_be_made(
    server: PostgresServer, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.controller.postgres.REFRESH_S", 0.0)
    cutter, url = Cutter(server.port), server.url(cell)
    port = await cutter.start()
    through = url.replace(str(server.port), str(port))
    async with leading(url) as leader, standby(through) as second:
        await until(lambda: second.lease.row is not None)
        cutter.refuses = True
        await asyncio.sleep(LEASE_S)
        await written(RegistryWrites(leader).store, deployment(), TEXT, None)
        assert second.failure is None
        cutter.refuses = False
        await until(lambda: names(second) == ["chat"])
        await leader.end()
        await within(second.leads)
    await cutter.stop()


async def test_one_that_stands_by_watches_the_leader_while_it_reads_what_that_has_written(
    server: PostgresServer, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as reading may take: its connection comes about only after the takeover."""
    monkeypatch.setattr("mesh.controller.postgres.REFRESH_S", 0.0)
    cutter, url = Cutter(server.port), server.url(cell)
    port = await cutter.start()
    through = url.replace(str(server.port), str(port))
    async with AsyncExitStack() as stack:
        leader = await stack.enter_async_context(standby(url))
        await within(leader.leads)
        second = await stack.enter_async_context(standby(through))
        await until_so(lambda: _waiting(leader))
        cutter.hangs = True
        await written(RegistryWrites(leader).store, deployment(), TEXT, None)
        await until(lambda: cutter.hanging > 0)
        begun_s = time.monotonic()
        await leader.end()
        await within(second.leads)
        assert time.monotonic() - begun_s < OPEN_S_MAX / 2
        assert names(second) == ["chat"]
    await cutter.stop()


class Cutter:
    """Stands between a controller and its database, and cuts a connection as it commits: with the
    COMMIT sent on, or not. It may refuse new connections, or leave them without an answer, and cut
    all of them with the first.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.cuts = 0
        self.sends = True
        self.refuses = False
        self.hangs = False
        self.hanging = 0
        self.darkens = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _serve(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self.refuses:
            back.transport.abort()
            return
        self._tasks.add(task)
        if self.hangs:
            self.hanging += 1
            with suppress(asyncio.CancelledError):
                await client.read()
            back.transport.abort()
            return
        answers, to = await asyncio.open_connection("127.0.0.1", self._port)
        answering = asyncio.create_task(self._copy(answers, back))
        try:
            while data := await client.read(1 << 16):
                cut = self.cuts > 0 and b"COMMIT" in data
                if cut:
                    self.cuts -= 1
                    self.refuses = self.darkens
                    answering.cancel()
                if not cut or self.sends:
                    to.write(data)
                    await to.drain()
                if cut:
                    await asyncio.sleep(0.05)
                    for other in self._tasks - {task} if self.darkens else ():
                        other.cancel()
                    return
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            answering.cancel()
            back.transport.abort()
            to.transport.abort()
            self._tasks.discard(task)

    async def _copy(self, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(1 << 16):
                to.write(data)
                await to.drain()


@pytest.mark.parametrize("arrives", [True, False])
async def test_a_connection_that_is_cut_in_a_commit_leaves_no_doubt(
    server: PostgresServer, cell: str, *, arrives: bool
) -> None:
    cutter = Cutter(server.port)
    port = await cutter.start()
    url = server.url(cell).replace(str(server.port), str(port))
    try:
        async with leading(url) as leader:
            writes = RegistryWrites(leader)
            await written(writes.store, deployment(), TEXT, None)
            cutter.sends, cutter.cuts = arrives, 2
            await written(writes.store, deployment("b"), TEXT, None)
            assert cutter.cuts == 0
            await written(writes.remove, DeploymentName("chat"))
            assert names(leader) == ["b"]
    finally:
        await cutter.stop()
    async with leading(server.url(cell)) as database:
        assert names(database) == ["b"]


@pytest.mark.parametrize("another", [False, True])
async def test_a_commit_in_doubt_keeps_nobody_waiting_and_its_end_is_told(
    server: PostgresServer, cell: str, *, another: bool
) -> None:
    cutter, url = Cutter(server.port), server.url(cell)
    port = await cutter.start()
    through = url.replace(str(server.port), str(port))
    try:
        async with leading(through) as leader:
            writes = RegistryWrites(leader)
            cutter.darkens, cutter.cuts = True, 1
            doubtful = asyncio.create_task(written(writes.store, deployment("b"), TEXT, None))
            await until(lambda: cutter.refuses)
            async with asyncio.timeout(2 * LEASE_S + REFUSED_S_MAX):
                with pytest.raises(StorageError, match="takes no writes of this controller now"):
                    await written(writes.store, deployment("c"), TEXT, None)
            assert not doubtful.done()
            if another:
                async with leading(url) as second:
                    assert names(second) == ["b"]
                    cutter.refuses = False
                    with pytest.raises(StorageError, match="it is not known whether"):
                        await doubtful
            else:
                cutter.refuses = False
                await doubtful
                assert names(leader) == ["b"]
    finally:
        await cutter.stop()


async def test_a_doubt_that_lasts_ends(
    server: PostgresServer, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.controller.postgres.DOUBT_S_MAX", 0.5)
    cutter = Cutter(server.port)
    port = await cutter.start()
    try:
        async with leading(server.url(cell).replace(str(server.port), str(port))) as leader:
            writes, cutter.cuts = RegistryWrites(leader), 1 << 30
            with pytest.raises(StorageError, match="it is not known whether"):
                await written(writes.store, deployment(), TEXT, None)
            cutter.cuts = 0
            await written(writes.store, deployment("b"), TEXT, None)
    finally:
        await cutter.stop()


async def test_after_a_restore_of_the_database_no_two_lead_with_one_epoch(
    server: PostgresServer, cell: str
) -> None:
    url = server.url(cell)
    async with leading(url) as first:
        await first.end()
    async with leading(url) as leader, standby(url) as second:
        await until(lambda: second.lease.epoch == leader.epoch)
        epoch = leader.epoch - 1
        starts = f"WITH earlier AS (UPDATE starts SET epoch = {epoch})"
        await asked(url, f"{starts} UPDATE lease SET epoch = {epoch}, holder = 'old'")
        await within(leader.deposed)
        with pytest.raises(StorageError):
            await leader.commit(stored(deployment(), TEXT))
        await within(second.leads)
        assert second.epoch > leader.epoch
        await written(RegistryWrites(second).store, deployment("b"), TEXT, None)


async def test_what_is_learned_outlives_what_a_database_refuses_for_a_moment(
    server: PostgresServer, cell: str
) -> None:
    url, chat = server.url(cell), DeploymentName("chat")
    async with leading(url) as leader:
        writes = RegistryWrites(leader)
        await written(writes.store, deployment(), TEXT, None)
        full = "RAISE EXCEPTION 'too many clients' USING ERRCODE = '53300'"
        body = f"RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {full}; END $$"
        await asked(url, f"CREATE FUNCTION full_now() {body}")
        on = "BEFORE INSERT ON histories EXECUTE FUNCTION full_now()"
        await asked(url, f"CREATE TRIGGER full_now {on}")
        writes.store_history(chat, HISTORY)
        await asyncio.sleep(0.5)
        await asked(url, "DROP TRIGGER full_now ON histories")
        async with asyncio.timeout(10):
            await until(lambda: leader.tables.histories() == {chat: HISTORY})


async def test_one_that_stands_by_holds_its_own_sign_though_the_frozen_leaders_lasts(
    server: PostgresServer, cell: str
) -> None:
    url = server.url(cell)
    async with leading(url) as leader, standby(url) as second:
        assert isinstance(leader, PostgresRegistry)
        # As after SIGSTOP: it renews nothing, and its sessions last.
        leader._tasks[0].cancel()
        await within(second.leads)
        locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted"
        at = f"classid = hashtext('mesh {cell}')::oid AND objid = {second.epoch}::oid"
        async with asyncio.timeout(10):
            while await asked(url, f"{locks} AND {at}") != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_a_write_that_is_cancelled_leaves_nothing_in_the_way_of_stepping_down(
    server: PostgresServer, cell: str
) -> None:
    url = server.url(cell)
    async with leading(url) as leader:
        assert isinstance(leader, PostgresRegistry)
        blocker = await asyncpg.connect(Place(url).dsn)
        await blocker.execute(f'BEGIN; LOCK TABLE "{cell}".texts')
        write = asyncio.create_task(leader.commit(stored(deployment(), TEXT)))
        await asyncio.sleep(0.2)
        write.cancel()
        await asyncio.gather(write, return_exceptions=True)
        await leader.step_down()
        assert await asked(url, "SELECT until = '-infinity' FROM lease")
        await blocker.close()


async def test_one_that_takes_the_lease_has_time_for_the_copy_of_an_earlier_mesh(
    server: PostgresServer,
    cell: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = server.url(cell)
    async with leading(url) as database:
        await written(RegistryWrites(database).store, deployment(), TEXT, None)
    await make_schema_7(url)
    apply = Tables.apply

    def slowly(tables: Tables, statements: Statements) -> None:
        time.sleep(0.5)
        apply(tables, statements)

    monkeypatch.setattr(Tables, "apply", slowly)
    rest = "idle_in_transaction_session_timeout"
    monkeypatch.setitem(_SETTINGS, rest, "100")
    async with asyncio.timeout(10), leading(url) as database:
        assert names(database) == ["chat"]
    assert "cannot be reached" not in caplog.text


@contextmanager
def small_disk(owner: int, mebibytes: int) -> Iterator[Path]:
    """Skips where none can be mounted."""
    path = Path(f"/tmp/mesh-small-disk-{os.getpid()}")
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m,uid={owner},mode=700"]
    try:
        if subprocess.run([*mount, "small", path], check=False, capture_output=True).returncode:
            pytest.skip("no file system can be mounted here")
        try:
            yield path
        finally:
            subprocess.run(["umount", "-l", path], check=True)
    finally:
        path.rmdir()


@pytest.mark.usefixtures("unhurried")
async def test_a_full_disk_refuses_the_write_and_keeps_the_rest(
    server: PostgresServer, cell: str
) -> None:
    with small_disk(65534, 4) as path:
        name = cell.replace("-", "_")
        await asked(server.url(), f"CREATE TABLESPACE {name} LOCATION '{path}'")
        url = f"{server.url(cell)}&default_tablespace={name}"
        async with leading(url) as database:
            writes = RegistryWrites(database)
            await written(writes.store, deployment(), TEXT, None)
            large = replace(TEXT, tokenizer_json=os.urandom(8 << 20))
            with pytest.raises(StorageError, match="No space left on device"):
                await written(writes.store, deployment("b", model="sha256-2"), large, None)
            await written(writes.store, replace(deployment(), context_tokens_max=7), None, None)
            assert names(database) == ["chat"]
        async with leading(url) as database:
            assert [one.context_tokens_max for one in database.tables.deployments()] == [7]
        await asked(server.url(), f'DROP SCHEMA "{cell}" CASCADE')
        await asked(server.url(), f"DROP TABLESPACE {name}")
