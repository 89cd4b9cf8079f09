"""The lease of a cell in PostgreSQL, kept by one controller: it leads, or stands by until it may.

The lease is a row that its leader renews, and an advisory lock goes with the leader's session, so
that those that stand by learn of its end at once. `lease` decides; here are the connections, which
are given up and made anew at every failure. After: `postgres`, which keeps the registry by it.
"""

import asyncio
import logging
import secrets
import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from mesh.domain.checks import check_name
from mesh.domain.errors import (
    InvalidInput,
    LaterSchema,
    MeshError,
    StorageError,
    Unavailable,
    Unreached,
)
from mesh.runtime.lease import LEASE_S, RENEW_S, Lease, LeaseRow, Role

try:
    import asyncpg
except ImportError as error:
    raise InvalidInput(
        f"--state asks for PostgreSQL, and {error.name} is not installed",
        hint="pip install 'mesh-serve[cluster]'",
    ) from error

SCHEMES = ("postgresql", "postgres")
DEFAULT_CELL = "mesh"
ASK_S_MAX = 0.5
"""For an answer of the database to a look at the lease, or its renewal."""
WRITE_S_MAX = 0.8
"""For a write; an operator hears within a second that there was none."""
OPEN_S_MAX = 10.0
"""For the first connection, and for the copy of what the registry holds."""
COPY_S_MAX = 60.0
TAKE_REST_S_MAX = 10
"""The longest that one that takes the lease asks the database nothing meanwhile."""
LOOK_AGAIN_S = 0.01
"""Between two looks whether the leader has ended whose session lock has gone."""
_SETTINGS = {
    "application_name": "mesh",
    # A leader that hangs amid a transaction would keep the next one waiting.
    "idle_in_transaction_session_timeout": "1000",
    "lock_timeout": "2000",
    # The lock of a leader whose network is cut goes within seconds.
    "tcp_keepalives_idle": "1",
    "tcp_keepalives_interval": "1",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "3000",
}
_SESSION_LOCK, _RENEWAL_LOCK = "mesh ", "mesh renews "
"""The locks of a leader: of a session that does nothing else, for which those that stand by wait,
and of the one on which it renews its lease.
"""
DAMAGED_HINT = (
    "restore the cell's schema, or rename it: what was deployed and profiled must be so again then"
)
_POOLER_HINT = "have --state name PostgreSQL itself: PgBouncer, say, keeps no sessions"
_LOCK = "pg_{}(hashtext('{}' || $1), $2::int)"
_LOCKS = (
    "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2"
    " AND classid = hashtext('{}' || $1)::oid AND objid = $2::int::oid AND granted = $3"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
_ROW = "SELECT epoch, holder, until::text AS until, until = '-infinity' AS given_up FROM lease"

logger = logging.getLogger(__name__)


class Place:
    """Where a cell's registry is: `postgresql://USER@HOST:PORT/DATABASE?cell=NAME`, or
    `…@HOST:PORT,HOST:PORT/…` for servers of which one takes writes. Raises InvalidInput, which says
    nothing of who asks, and by which password.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            _, at, hosts = parts.netloc.rpartition("@")
            if url.count("@") > len(at):
                raise InvalidInput(
                    "--state: the address has an @ that is part of a user or a password, or / ? # "
                    "before it",
                    hint="write @ as %40, / as %2F, ? as %3F and # as %23 there",
                )
            asked = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
            _ = [urlsplit(f"//{host}").port for host in hosts.split(",")]
        except ValueError as error:
            raise InvalidInput(f"--state: the address cannot be read: {error}") from error
        if parts.scheme not in SCHEMES:
            raise InvalidInput(
                f"--state: {parts.scheme or hosts + parts.path!r} is no kind of database that mesh "
                "knows",
                hint="give it as postgresql://USER@HOST:PORT/DATABASE, or leave it out for SQLite",
            )
        self.cell = asked.pop("cell", DEFAULT_CELL)
        check_name(self.cell, "--state: the cell's name")
        self.dsn = urlunsplit(parts._replace(query=urlencode(asked)))
        self.shown = f"{parts.scheme}://{hosts}{parts.path}?cell={self.cell}"
        """Without who asks, and by which password."""


class LeaseKeeper(ABC):
    """One controller's connections. `holder` is where clients and nodes reach it."""

    def __init__(self, at: Place, holder: str) -> None:
        self.at = at
        self.place = self.at.shown
        self.epoch, self.cell = 0, ""
        self.deposed = asyncio.Event()
        """Set once another controller leads, or this one has stepped down."""
        self.leads = asyncio.Event()
        self.failure: MeshError | None = None
        """Why it can never lead."""
        self.handed_over = False
        self.lease = Lease()
        self._holder = f"{holder} {secrets.token_hex(8)}"
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_unless_given_up)
        self.now_s = loop.time
        self._keeping: Any = None
        """The connection that looks at the lease, or renews it."""
        self._renews = False
        """Whether that one has the lock of who renews."""
        self._session: Any = None
        """The connection that has the lock for which others wait, or waits for it."""
        self._writing: Any = None
        self.busy = asyncio.Lock()
        """Whoever uses the connection that writes holds it."""
        self._woken = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._away = ""
        """Why the database cannot be reached, as it was said last."""

    @abstractmethod
    async def taking(self, connection: Any) -> tuple[int, str]:
        """What goes into the transaction that takes the lease; the new epoch, and the cell's id."""

    @abstractmethod
    async def refresh(self, connection: Any) -> None:
        """At each beat while it stands by."""

    def leader(self) -> str:
        row = self.lease.row
        return "" if row is None or row.given_up else row.holder.partition(" ")[0]

    def check_writable(self) -> None:
        """Raises Unavailable where this controller may not write now."""
        if not self.lease.may_write(self.now_s()):
            why = self._away or "another controller may lead"
            raise Unavailable(
                f"the registry at {self.place} takes no writes of this controller now: {why}",
                hint="requests are served meanwhile; try again when the database is back",
            )

    def show(self, epoch: int) -> None:
        """A node has obeyed a leader of this epoch, as it says."""
        if self.lease.shown(epoch, self.now_s()):
            self.deposed.set()

    async def hand_over(self) -> None:
        """Step down for one that stands by. Raises Unavailable where none does, or the database is
        away: nothing changes then.
        """
        self.check_writable()
        try:
            async with self.asked("ask") as connection:
                waiting = await self._locks(connection, _SESSION_LOCK, self.epoch, granted=False)
        except StorageError as error:
            raise Unavailable(error.message, hint=error.hint) from error
        if not waiting:
            raise Unavailable(
                f"no controller stands by at {self.place}",
                hint="start another one with the same --state; it stands by within a second",
            )
        self.handed_over = True
        await self.step_down()

    def begin(self) -> None:
        """Stand by, and lead once that may be."""
        keeping = (self._keep, self._keep_session_lock)
        self._tasks = [asyncio.create_task(self._kept(work)) for work in keeping]

    async def close(self) -> None:
        """A leader gives its lease up."""
        if self.lease.role is Role.LEADING:
            await self.step_down()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._keeping is not None:
            self._keeping.terminate()
        self.hang_up_writing()

    async def step_down(self) -> None:
        """Give the lease up: one that waits for the session lock takes it at once."""
        self.lease.step_down()
        self.deposed.set()
        async with self.busy:
            with suppress(Exception):
                async with asyncio.timeout(ASK_S_MAX):
                    connection = await self.writer()
                    sql = "UPDATE lease SET until = '-infinity' WHERE epoch = $1 AND holder = $2"
                    await connection.execute(sql, self.epoch, self._holder)
        if self._keeping is not None:
            self._keeping.terminate()
        self._end_session()

    async def check_apart(self) -> None:
        """Raises StorageError where two connections are given one session, in which a lock of one
        would be the other's.
        """
        asked = "SELECT pg_backend_pid()"
        async with self.asked("open") as one, self.asked("open") as other:
            try:
                shared = await one.fetchval(asked) == await other.fetchval(asked)
            except asyncpg.DuplicatePreparedStatementError:
                shared = True
        if shared:
            raise StorageError(
                f"two connections to {self.place} share a session: something before the database "
                "keeps none",
                hint=_POOLER_HINT,
            )

    async def check_session(self, connection: Any) -> None:
        """Raises StorageError where it has not the settings that it was begun with, without which
        two cells would be one, or where the database cannot hold every text.
        """
        schema = await connection.fetchval("SELECT current_schema()")
        if schema != self.at.cell:
            raise StorageError(
                f"the session at {self.place} is in the schema {schema}: something before the "
                "database drops what it is begun with",
                hint=_POOLER_HINT,
            )
        encoding = await connection.fetchval("SHOW server_encoding")
        if encoding not in ("UTF8", "SQL_ASCII"):
            raise StorageError(
                f"the database of {self.place} has the encoding {encoding}, which lacks characters "
                "of models' texts",
                hint="create one with it: `createdb -E UTF8 -T template0 NAME`",
            )

    async def _keep(self) -> None:
        """Look at the lease, take it, renew it: a beat every RENEW_S, or when woken."""
        while self.lease.role is not Role.DEPOSED:
            begun_s = self.now_s()
            try:
                async with asyncio.timeout(ASK_S_MAX):
                    if self._keeping is None or self._keeping.is_closed():
                        self._keeping, self._renews = await self._connect(ASK_S_MAX), False
                    takes = await self._beat(self._keeping, begun_s)
                if takes:
                    await self._take(self._keeping)
                elif self.lease.role is Role.STANDING_BY:
                    await self.refresh(self._keeping)
                self._note_away("")
            except LaterSchema:
                raise
            except Exception as error:
                if self.deposed.is_set():
                    return
                self._note_away(str(error) or type(error).__name__)
                if self._keeping is not None:
                    self._keeping.terminate()
                self._keeping = None
                self.lease.not_taken(self.now_s())
            left_s = RENEW_S - (self.now_s() - begun_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(left_s, 0.01)):
                    await self._woken.wait()
            self._woken.clear()

    async def _beat(self, connection: Any, now_s: float) -> bool:
        """Whether the lease is to be taken."""
        if self.lease.role is Role.LEADING:
            sql = "UPDATE lease SET until = clock_timestamp() + $2::float8 * interval '1 s'"
            sql += " WHERE epoch = $1 AND holder = $3"
            if await connection.execute(sql, self.epoch, LEASE_S, self._holder) == "UPDATE 1":
                self.lease.renewed(now_s)
                if not self._renews:
                    await self._lock_renewing(connection)
            else:
                self._lose(await self._row(connection))
            return False
        row = await self._row(connection)
        return self.lease.seen(row, now_s)

    async def _lock_renewing(self, connection: Any) -> None:
        """The session before this one may last for a while: it is tried at each beat."""
        sql = f"SELECT {_LOCK.format('try_advisory_lock', _RENEWAL_LOCK)}"
        self._renews = await connection.fetchval(sql, self.at.cell, self.epoch)

    def _lose(self, row: LeaseRow) -> None:
        """Somebody else has the lease, of whatever epoch."""
        logger.warning("epoch %d has the lease at %s, not %d", row.epoch, self.place, self.epoch)
        self.lease.step_down()
        self.deposed.set()

    async def check_leads(self, connection: Any) -> None:
        """In a transaction that writes. Raises Unreached where another controller leads."""
        row = await self._row(connection)
        if (row.epoch, row.holder) != (self.epoch, self._holder):
            await connection.execute("ROLLBACK")
            self._lose(row)
            raise Unreached(f"another controller leads the cell now: epoch {row.epoch}")

    async def _row(self, connection: Any) -> LeaseRow:
        row = await connection.fetchrow(_ROW)
        return LeaseRow(**dict(row))

    async def _take(self, connection: Any) -> None:
        """Take the lease, unless it has changed since it was looked at. Writes of the leader so far
        end first, within the time that a transaction may rest.
        """
        asked_s, seen = self.now_s(), self.lease.row
        async with asyncio.timeout(COPY_S_MAX), connection.transaction():
            # Tables of an earlier mesh are all read here, and written to the copy.
            rest = f"SET LOCAL idle_in_transaction_session_timeout = '{TAKE_REST_S_MAX} s'"
            await connection.execute(rest)
            await connection.execute("SELECT 1 FROM lease FOR UPDATE")
            if await self._row(connection) != seen:
                self.lease.not_taken(self.now_s())
                return
            epoch, cell = await self.taking(connection)
            await connection.execute(
                "UPDATE lease SET epoch = $1, holder = $2,"
                " until = clock_timestamp() + $3::float8 * interval '1 s'",
                *(epoch, self._holder, LEASE_S),
            )
        self.epoch, self.cell = epoch, cell
        self.lease.taken(epoch, asked_s)
        self.leads.set()
        logger.info("leads the cell at %s, epoch %d", self.place, epoch)
        async with asyncio.timeout(ASK_S_MAX):
            await self._lock_renewing(connection)

    async def database_id(self, connection: Any) -> str:
        """Which database this is, by what a server keeps when it is restored or fails over; empty
        where the server does not say.
        """
        sql = "SELECT concat(system_identifier, ' ', current_database()) FROM pg_control_system()"
        with suppress(asyncpg.PostgresError):
            async with connection.transaction():  # a refusal ends this one alone
                return str(await connection.fetchval(sql))
        return ""

    async def _keep_session_lock(self) -> None:
        """Hold the advisory lock of its epoch while it leads; else wait for the leader's, where
        that holds it: its session has ended when it comes.
        """
        while self.lease.role is not Role.DEPOSED:
            try:
                self._session = await self._connect(ASK_S_MAX)
                await self._hold_session_lock(self._session)
            except Exception as error:
                logger.debug("no session lock at %s: %s", self.place, error)  # `_keep` warns
            finally:
                self._end_session()
            await asyncio.sleep(RENEW_S)

    def _end_session(self) -> None:
        if self._session is not None:
            self._session.terminate()
        self._session = None

    async def _hold_session_lock(self, connection: Any) -> None:
        seen, lock = self.lease.row, f"SELECT {_LOCK.format('advisory_lock', _SESSION_LOCK)}"
        if self.lease.role is Role.LEADING:
            await connection.execute(lock, self.at.cell, self.epoch)
            closed = asyncio.Event()
            connection.add_termination_listener(lambda _: closed.set())
            await closed.wait()
        elif seen is not None and await self._locks(connection, _SESSION_LOCK, seen.epoch):
            await connection.execute("SET lock_timeout = 0")
            comes = asyncio.create_task(connection.execute(lock, self.at.cell, seen.epoch))
            try:
                while self._stands_by_under(seen.epoch) and not comes.done():
                    await asyncio.wait([comes], timeout=RENEW_S)
            finally:
                if not comes.done():
                    comes.cancel()
                    await asyncio.gather(comes, return_exceptions=True)
            if comes.cancelled():  # the session of a leader that was frozen may last
                return
            comes.result()
            dead = await self._renews_no_more(connection, seen.epoch)
            if dead and self.lease.session_ended(seen.epoch):
                self._woken.set()

    async def _renews_no_more(self, connection: Any, epoch: int) -> bool:
        """Whether the leader's other session has ended, too, or does so at once: one that has lost
        the first alone is alive.
        """
        until_s = self.now_s() + RENEW_S
        while await self._locks(connection, _RENEWAL_LOCK, epoch):
            if self.now_s() > until_s:
                return False
            await asyncio.sleep(LOOK_AGAIN_S)
        return True

    async def _locks(self, connection: Any, which: str, epoch: int, granted: bool = True) -> int:
        """How many sessions have a lock of the leader, or wait for it."""
        found = await connection.fetchval(_LOCKS.format(which), self.at.cell, epoch, granted)
        return int(found)

    def _stands_by_under(self, epoch: int) -> bool:
        row = self.lease.row
        stands_by = self.lease.role in (Role.STANDING_BY, Role.TAKING)
        return stands_by and row is not None and row.epoch == epoch

    async def writer(self) -> Any:
        if self._writing is None or self._writing.is_closed():
            self._writing = await self._connect(WRITE_S_MAX)
        return self._writing

    def hang_up_writing(self) -> None:
        if self._writing is not None:
            self._writing.terminate()
        self._writing = None

    async def _connect(self, within_s: float) -> Any:
        return await asyncpg.connect(
            self.at.dsn,
            timeout=within_s,
            server_settings={**_SETTINGS, "search_path": f'"{self.at.cell}"'},
            target_session_attrs="read-write",
        )

    @asynccontextmanager
    async def asked(self, verb: str) -> AsyncIterator[Any]:
        """A connection for one purpose. Raises StorageError for what goes wrong with it."""
        try:
            connection = await self._connect(OPEN_S_MAX)
            try:
                yield connection
            finally:
                connection.terminate()
        except MeshError:
            raise
        except Exception as error:
            raise self.explained(verb, error) from error

    async def _kept(self, work: Callable[[], Awaitable[None]]) -> None:
        """Work that lasts as long as the registry: what ends it is told to who waits to lead."""
        try:
            await work()
        except MeshError as error:
            self.failure = error
        except Exception as error:
            logger.exception("the lease at %s is kept no longer", self.place)
            self.failure = StorageError(f"the lease at {self.place} is lost: {error}")
        if self.failure is not None:
            self.lease.step_down()
            self.deposed.set()

    def _note_away(self, why: str) -> None:
        if why and not self._away:
            logger.warning("the database at %s cannot be reached: %s", self.place, why)
        elif self._away and not why:
            logger.info("the database at %s is back", self.place)
        self._away = why

    def explained(self, verb: str, error: Exception) -> StorageError:
        why = str(error).partition("\n")[0] or type(error).__name__
        message = f"cannot {verb} the registry at {self.place}: {why}"
        lasts = _lasts(error) and not is_cut(error)
        return (StorageError if lasts else Unreached)(message, hint=_hint(error))


def _unless_given_up(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what the loop was told, but not the future that asyncpg leaves of a connection which was
    given up just as it came about: nobody can ask that for its error.
    """
    if "unexpected connection_lost() call" not in str(context.get("exception")):
        loop.default_exception_handler(context)


def is_cut(error: Exception) -> bool:
    """Whether the session ended or never came about, or the server stops or stands by."""
    if not isinstance(error, asyncpg.PostgresError):
        lost = OSError | TimeoutError | asyncpg.InterfaceError | asyncpg.InternalClientError
        return isinstance(error, lost) and not isinstance(error, ValueError)
    state = error.sqlstate or ""
    return state.startswith("08") or state in ("57P01", "57P02", "57P03", "57P05", "25006", "25P03")


def _lasts(error: Exception) -> bool:
    """Whether the same statement would fail again: it is at fault, and not the database."""
    state = getattr(error, "sqlstate", None) or ""
    return not state or (state[:2] in ("0A", "21", "22", "23", "42") and state != "42501")


def _hint(error: Exception) -> str:
    state = getattr(error, "sqlstate", None) or ""
    if isinstance(error, ValueError | FileNotFoundError | ssl.SSLError):
        return "see what --state says after the name of the database, and the files for TLS"
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return "give the address of the server that takes writes, or those of all: HOST:PORT,HOST…"
    if state == "08P01":
        return _POOLER_HINT
    if is_cut(error):
        return "see that the database runs, and that --state names it"
    if state.startswith("28"):
        return "give a user and password that it knows: in the address, or by PGPASSWORD"
    if state == "53100":
        return "free space on the disk of the database, then try again"
    if state in ("42P01", "42703"):
        return DAMAGED_HINT
    if state == "3D000":
        return "create the database first: `createdb NAME`"
    if state == "42501":
        return "grant the user CREATE on the database, or make a schema of the cell's name for it"
    return "the database's log says more"
