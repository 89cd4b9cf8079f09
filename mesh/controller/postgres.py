"""The registry in PostgreSQL, for several controllers of one cell, of which one leads.

A cell is a schema of the database. Each write commits only while this controller has the lease, by
its epoch and a random id of its start: its transaction holds the row that a new leader has to
change. What is read comes from a copy in a private temporary file, so that requests are served
while the database is away. Before: `postgres_lease`, which keeps the lease and the connections.
"""

import asyncio
import logging
import re
from functools import lru_cache
from typing import Any

from mesh.controller.postgres_lease import (
    ASK_S_MAX,
    COPY_S_MAX,
    DAMAGED_HINT,
    OPEN_S_MAX,
    WRITE_S_MAX,
    LeaseKeeper,
    Place,
    is_cut,
)
from mesh.controller.registry import (
    NAMED,
    SCHEMA,
    STEPS,
    TABLES,
    Shared,
    Statements,
    Tables,
    cell_id,
    check_schema,
)
from mesh.domain.errors import StorageError, Unavailable, Unreached
from mesh.domain.values import dataclass
from mesh.runtime.lease import RENEW_S, Role

STATEMENT_S = 0.005
WRITE_BYTES_PER_S = 8 << 20
"""At least so fast goes a text, of which some have 40 MiB."""
DOUBT_S_MAX = 60.0
"""For the question whether a write is kept whose connection broke as it committed."""
REFRESH_S = 2.0
"""Between two looks of one that stands by at what the leader has written."""
_KEYS = {
    "texts": ("model_id",),
    "deployments": ("name",),
    "profiles": ("model_id", "fingerprint"),
    "histories": ("name",),
    "revisions": ("name", "number"),
}
_TYPES = {"BLOB": "BYTEA", "INTEGER": "BIGINT", "REAL": "DOUBLE PRECISION", "STRICT": ""}
_OWN = """
CREATE TABLE schema_version (version BIGINT NOT NULL);
INSERT INTO schema_version VALUES (0);
CREATE TABLE lease (epoch BIGINT NOT NULL, holder TEXT NOT NULL, until TIMESTAMPTZ NOT NULL);
INSERT INTO lease VALUES (0, '', '-infinity');
"""
"""What SQLite has by itself, or needs not."""
_CHANGES = """
CREATE TABLE IF NOT EXISTS changes (version BIGINT NOT NULL);
INSERT INTO changes SELECT 0 WHERE NOT EXISTS (SELECT FROM changes);
"""
"""Counts the writes, for those that stand by. An earlier mesh made cells without it."""
_FILES = """
CREATE TABLE IF NOT EXISTS kept_files (
    number BIGINT NOT NULL,
    id TEXT PRIMARY KEY,
    kind TEXT NOT NULL,
    tenant TEXT NOT NULL,
    role TEXT NOT NULL,
    key_id TEXT NOT NULL,
    created_unix_s BIGINT NOT NULL,
    bytes BIGINT NOT NULL,
    body TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS kept_contents (
    id TEXT NOT NULL,
    at BIGINT NOT NULL,
    data BYTEA NOT NULL,
    PRIMARY KEY (id, at)
);
"""
"""The files and batches of `shared_files`, of which the registry's copy has nothing."""
_SECONDS = "least(extract(epoch FROM now() - timestamptz '2026-01-01 00:00Z'), 900000000)::bigint"
"""An epoch is about the second in which it begins, up to as many as 31 bits hold."""

logger = logging.getLogger(__name__)


@lru_cache(maxsize=256)
def in_postgres(sql: str) -> str:
    """A statement of the registry, as PostgreSQL writes it."""
    sql = re.sub(r"\b(BLOB|INTEGER|REAL|STRICT)\b", lambda found: _TYPES[found[1]], sql)
    parts = sql.split("?")
    return parts[0] + "".join(f"${n}{part}" for n, part in enumerate(parts[1:], start=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changed:
    """What the copy lacks of what the database holds."""

    changes: Statements
    versions: dict[str, dict[tuple[Any, ...], str]]
    """What PostgreSQL calls the version of a row, by table and by the key of the row."""
    version: int
    """The count of writes."""


class PostgresRegistry(LeaseKeeper):
    """What one controller reads and writes, by the lease that it keeps."""

    def __init__(self, url: str, *, holder: str) -> None:
        super().__init__(Place(url), holder)
        self._copy, self.changed = Tables("", self.place, remedy=DAMAGED_HINT), asyncio.Event()
        self._versions: dict[str, dict[tuple[Any, ...], str]] = {table: {} for table in TABLES}
        self._version = -1
        """The count of writes that its copy holds."""
        self._committing = False
        self._reading: asyncio.Task[_Changed | None] | None = None
        """What the leader has written is read, while this one stands by."""
        self._refreshed_s = 0.0
        """When the copy was brought up to date last, or was found to be."""

    @property
    def tables(self) -> Tables:
        return self._copy

    async def open(self) -> None:
        """See that the database is ours to use, read what it holds, and begin to stand by. Raises
        StorageError.
        """
        try:
            async with asyncio.timeout(OPEN_S_MAX):
                await self.check_apart()
                await self._prepare()
            with self._copy.transaction():
                self._copy.migrate()
            await self._copy_changed(await self._read())
        except BaseException:
            await self.end()
            raise
        self._refreshed_s = self.now_s()
        self.begin()

    @property
    def shared(self) -> Shared:
        return self

    async def commit(self, statements: Statements) -> None:
        """One transaction, while this controller leads. Raises StorageError, and then nothing has
        changed: where the connection breaks as it commits, the same is written again until that is
        known. Where it cannot be found out within DOUBT_S_MAX the error says so.
        """
        await self._commit(statements, copied=True)

    async def keep(self, statements: Statements) -> None:
        await self._commit(statements, copied=False)

    async def rows(self, sql: str, *values: str | int) -> list[Any]:
        async with self.asked("read") as connection, asyncio.timeout(COPY_S_MAX):
            found: list[Any] = await connection.fetch(in_postgres(sql), *values)
            return found

    async def _commit(self, statements: Statements, *, copied: bool) -> None:
        try:
            self.check_writable()
        except Unavailable as error:
            raise Unreached(error.message, hint=error.hint) from error
        async with self.busy:
            in_doubt, until_s = False, self.now_s() + DOUBT_S_MAX
            while not await self._is_written(statements, in_doubt, until_s):
                in_doubt = True
                logger.warning("whether a write to %s is kept is found out", self.place)
                await asyncio.sleep(RENEW_S)
            if not copied:
                return
            try:
                await asyncio.to_thread(self._copy.apply, statements)
            except StorageError as error:
                logger.error("what this controller reads is behind: %s", error.message)

    async def _is_written(self, statements: Statements, in_doubt: bool, until_s: float) -> bool:
        """False where that is not known, and may be found out until then."""
        try:
            async with asyncio.timeout(_write_s_max(statements)):
                await self._transact(statements)
        except BaseException as error:
            committing, self._committing = self._committing, False
            self.hang_up_writing()  # with what it has begun
            if not isinstance(error, Exception):
                raise
            cut = is_cut(error)
            if in_doubt or (committing and cut):
                if cut and self.lease.role is Role.LEADING and self.now_s() < until_s:
                    return False
                why = getattr(error, "message", "") or str(error) or type(error).__name__
                raise StorageError(
                    f"it is not known whether the registry at {self.place} keeps this: the"
                    f" connection broke as it was written, and then: {why}",
                    hint="see by `mesh get` what the controller has once it has started again",
                ) from error
            if isinstance(error, StorageError):
                raise
            raise self.explained("write", error) from error
        return True

    async def end(self) -> None:
        """Close it; a leader gives its lease up."""
        await self.close()
        self._stop_reading()
        self._copy.close()

    async def _prepare(self) -> None:
        """The cell's schema and the tables that SQLite needs not, where they are missing."""
        async with self.asked("open") as connection:
            async with connection.transaction():
                # Two controllers that start at once make it once.
                await connection.execute(
                    "SELECT pg_advisory_xact_lock(hashtext($1))", f"mesh {self.at.cell}"
                )
                if not await connection.fetchval(
                    "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)", self.at.cell
                ):
                    await connection.execute(f'CREATE SCHEMA "{self.at.cell}"')
                await self.check_session(connection)
                if await connection.fetchval("SELECT to_regclass('lease')") is None:
                    await connection.execute(_OWN)
                    for step in STEPS:
                        await connection.execute(in_postgres(step))
                    await connection.execute("UPDATE schema_version SET version = $1", SCHEMA)
                await connection.execute(_CHANGES + _FILES)
            for table in ("starts", "schema_version", "lease", "changes"):
                count = await connection.fetchval(f"SELECT count(*) FROM {table}")
                if count != 1:
                    raise StorageError(
                        f"the registry at {self.place} is damaged: {table} has {count} rows, not 1",
                        hint=DAMAGED_HINT,
                    )
            found = await connection.fetchval("SELECT version FROM schema_version")
            check_schema(found, self.place)

    async def _read(self) -> _Changed | None:
        """What the copy lacks, as one moment of the database. Tables of an earlier mesh, whose
        leader may still use them, are read after this one has taken the lease.
        """
        async with self.asked("read") as connection, asyncio.timeout(COPY_S_MAX):
            if await connection.fetchval("SELECT version FROM schema_version") != SCHEMA:
                return None
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                if await connection.fetchval("SELECT version FROM changes") == self._version:
                    return None
                return await self._read_changes(connection)

    async def refresh(self, connection: Any) -> None:
        """Have what the leader has written read, every REFRESH_S if there is anything, and bring
        the copy up to date once it is read. Reading may take COPY_S_MAX, and the lease is looked at
        meanwhile.
        """
        if self._reading is None:
            if self.now_s() - self._refreshed_s < REFRESH_S:
                return
            self._refreshed_s = self.now_s()
            async with asyncio.timeout(ASK_S_MAX):
                version = await connection.fetchval("SELECT version FROM changes")
            if version != self._version:
                self._reading = asyncio.create_task(self._read())
                # One that is given up may have failed: nobody asks for that.
                self._reading.add_done_callback(lambda done: done.cancelled() or done.exception())
        elif self._reading.done():
            reading, self._reading, self._refreshed_s = self._reading, None, self.now_s()
            try:
                await self._copy_changed(reading.result())
            except StorageError as error:
                logger.warning("what the leader has written is read later: %s", error.message)

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._reading = None

    async def _copy_changed(self, changed: _Changed | None) -> None:
        if changed is None:
            return
        if changed.changes:
            await asyncio.to_thread(self._copy.apply, changed.changes)
            self.changed.set()
        self._versions, self._version = changed.versions, changed.version

    async def _read_changes(self, connection: Any) -> _Changed:
        changes: list[tuple[str, tuple[Any, ...]]] = []
        versions: dict[str, dict[tuple[Any, ...], str]] = {}
        version = await connection.fetchval("SELECT version FROM changes")
        for table in TABLES:
            keys, known = _KEYS[table], self._versions[table]
            listed = await connection.fetch(
                f"SELECT {', '.join(keys)}, xmin::text AS v, ctid::text AS at FROM {table}"
            )
            there = {tuple(row[k] for k in keys): row["v"] for row in listed}
            where = " AND ".join(f"{k} = ?" for k in keys)
            gone = [key for key in known if key not in there]
            changes += [(f"DELETE FROM {table} WHERE {where}", key) for key in gone]
            for row in listed:
                key = tuple(row[k] for k in keys)
                if known.get(key) == row["v"]:
                    continue
                # One by one: texts are megabytes each.
                found = await connection.fetchrow(
                    f"SELECT * FROM {table} WHERE ctid = $1::text::tid", row["at"]
                )
                columns = ", ".join(found.keys())
                marks = ", ".join("?" * len(found))
                sql = f"INSERT OR REPLACE INTO {table} ({columns}) VALUES ({marks})"
                changes.append((sql, tuple(found.values())))
            versions[table] = there
        return _Changed(changes=tuple(changes), versions=versions, version=version)

    async def taking(self, connection: Any) -> tuple[int, str]:
        self._stop_reading()
        await self._migrate(connection)
        # A restored database knows of none that led since: they all began before now.
        made_of = await self.database_id(connection)
        begun = await connection.fetchrow(
            in_postgres(
                f"UPDATE starts SET epoch = greatest(epoch, ?, {_SECONDS}) + 1, {NAMED}"
                " RETURNING epoch, cell"
            ),
            *(self.lease.epoch, cell_id(self.at.cell, made_of)),
        )
        await self._copy_changed(await self._read_changes(connection))
        return begun["epoch"], begun["cell"]

    async def _migrate(self, connection: Any) -> None:
        found = await connection.fetchval("SELECT version FROM schema_version")
        check_schema(found, self.place)
        for step in STEPS[found:]:
            await connection.execute(in_postgres(step))
        await connection.execute("UPDATE schema_version SET version = $1", SCHEMA)

    async def _transact(self, statements: Statements) -> None:
        """Raises Unreached where another one leads. `_committing` says how far it came."""
        connection = await self.writer()
        await connection.execute("BEGIN")
        await connection.execute("SELECT 1 FROM starts FOR SHARE")
        await self.check_leads(connection)
        for sql, row in statements:
            await connection.execute(in_postgres(sql), *row)
        await connection.execute("UPDATE changes SET version = version + 1")
        self._committing = True
        await connection.execute("COMMIT")
        self._committing = False


def _write_s_max(statements: Statements) -> float:
    """For a transaction: what is long takes longer."""
    values = [value for _, row in statements for value in row]
    sent_bytes = sum(len(value) for value in values if isinstance(value, str | bytes))
    return WRITE_S_MAX + len(statements) * STATEMENT_S + sent_bytes / WRITE_BYTES_PER_S
