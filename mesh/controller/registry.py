"""The registry: what outlives the controller, in one SQLite file or in PostgreSQL (`postgres`).

It holds the acknowledged deployments, the tokenizers of their models, what was measured of them,
how long their answers turn out, and how often a controller has begun to lead. `Writes` are lists of
statements, the same for either database; `Tables` reads them from SQLite, of which `postgres` keeps
a copy. A write to the file has returned only when it is on disk (WAL, synchronous=FULL), so what
was acknowledged survives `kill -9` and a power cut. One controller at a time: the file stays locked
while it runs, and the kernel lets go of it when it dies.
"""

import asyncio
import logging
import secrets
import sqlite3
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Protocol, TypeVar

from cattrs.preconf.json import make_converter

from mesh.domain.deployment import Deployment
from mesh.domain.errors import (
    HOME_HINT,
    LaterSchema,
    MeshError,
    StorageError,
    Unavailable,
    Unreached,
    system_errors,
)
from mesh.domain.history import CallGaps, OutputHistory
from mesh.domain.ids import DeploymentName, ModelId
from mesh.domain.profile import Profile
from mesh.domain.revision import Revision, Revisions, name_in_cell, public_name
from mesh.domain.text import SamplingDefaults, TextAssets
from mesh.domain.values import dataclass
from mesh.runtime.controller_actions import Done
from mesh.v1 import profile_pb2
from mesh.wire.codec import from_wire, to_wire

FILE_NAME = "registry.sqlite3"
_SCHEMA_1 = """
CREATE TABLE starts (epoch INTEGER NOT NULL);
INSERT INTO starts VALUES (0);
CREATE TABLE texts (
    model_id TEXT PRIMARY KEY,
    tokenizer_json BLOB NOT NULL,
    chat_template TEXT,
    bos_token TEXT,
    eos_token TEXT,
    add_bos INTEGER NOT NULL
) STRICT;
CREATE TABLE deployments (
    name TEXT PRIMARY KEY,
    model_id TEXT NOT NULL REFERENCES texts (model_id),
    body TEXT NOT NULL
) STRICT;
"""
_SCHEMA_2 = """
CREATE TABLE profiles (
    model_id TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (model_id, fingerprint)
) STRICT;
"""
_SCHEMA_3 = """
CREATE TABLE histories (
    name TEXT PRIMARY KEY,
    mean_tokens REAL NOT NULL,
    requests INTEGER NOT NULL
) STRICT;
"""
_SCHEMA_4 = """
ALTER TABLE texts ADD COLUMN sampling TEXT NOT NULL DEFAULT '{}';
"""
_SCHEMA_5 = """
CREATE TABLE revisions (
    name TEXT NOT NULL,
    number INTEGER NOT NULL,
    model_id TEXT NOT NULL REFERENCES texts (model_id),
    body TEXT NOT NULL,
    PRIMARY KEY (name, number)
) STRICT;
"""
_SCHEMA_6 = """
ALTER TABLE texts ADD COLUMN tool_template TEXT;
ALTER TABLE texts ADD COLUMN special_tokens TEXT NOT NULL DEFAULT '';
"""
_SCHEMA_7 = """
ALTER TABLE histories ADD COLUMN gaps TEXT NOT NULL DEFAULT '{}';
"""
_SCHEMA_8 = """
ALTER TABLE histories ADD COLUMN classes TEXT NOT NULL DEFAULT '[]';
"""
_SCHEMA_9 = """
ALTER TABLE starts ADD COLUMN cell TEXT NOT NULL DEFAULT '';
"""
STEPS = (
    *(_SCHEMA_1, _SCHEMA_2, _SCHEMA_3, _SCHEMA_4, _SCHEMA_5, _SCHEMA_6, _SCHEMA_7),
    *(_SCHEMA_8, _SCHEMA_9),
)
"""Each makes its schema of the one before it."""
SCHEMA = len(STEPS)
"""The version of the tables; the file keeps it as its user_version."""
TABLES = ("texts", "deployments", "profiles", "histories", "revisions")
"""What the registry holds, a table that others refer to before them."""
NAMED = "cell = CASE WHEN cell = '' THEN ? ELSE cell END"
"""Gives the cell an id where it has none yet."""
Value = str | int | float | bytes | None
Statements = tuple[tuple[str, tuple[Value, ...]], ...]
"""SQL that both databases understand, with its parameters; all of it is one transaction."""
WRITES_MAX = 1000
"""At most so many administrative calls wait for the registry."""
RETRY_S = 0.25
"""Between two tries to write to a database that cannot be reached."""
CLOSE_S_MAX = 1.0
"""For what waits to be written when the controller ends."""
TOGETHER_MAX = 100
"""At most so many writes for which nobody waits are one transaction."""
log = logging.getLogger(__name__)
T = TypeVar("T")
_CONVERTER = make_converter()
_Classes: Any = tuple[tuple[str, float, int], ...]
"""The type of `OutputHistory.classes`."""
_HINTS: Mapping[int, str] = {
    sqlite3.SQLITE_FULL: "free space on its disk, then try again",
    sqlite3.SQLITE_IOERR: "check its disk: space left, quota, health",
    sqlite3.SQLITE_BUSY: "stop the other controller, or give this one another folder with --home",
    sqlite3.SQLITE_READONLY: "make its folder writable, or choose another with --home",
    sqlite3.SQLITE_CANTOPEN: "make its folder writable, or choose another with --home",
    sqlite3.SQLITE_CORRUPT: "move it away; what was deployed and profiled must be so again",
    sqlite3.SQLITE_NOTADB: "move it away; what was deployed and profiled must be so again",
}


def stored(
    deployment: Deployment, text: TextAssets | None, revisions: Revisions | None = None
) -> Statements:
    """Write a deployment, over an earlier one of its public name; `text`, of the model of its
    newest revision, and `revisions` are kept as they are where they are None.
    """
    name, made = public_name(deployment.spec.name), []
    if text is not None:
        newest = max(
            (deployment, *(r.deployment for r in revisions or ())), key=lambda one: one.revision
        )
        row: tuple[Value, ...] = (
            newest.model.model_id,
            text.tokenizer_json,
            text.chat_template,
            text.bos_token,
            text.eos_token,
            int(text.add_bos),
            _CONVERTER.dumps(text.sampling),
            text.tool_template,
            text.special_tokens,
        )
        made.append(_put("texts", _TEXT_COLUMNS, row))
    # As often as not it served under another name in the cell before.
    made.append(_dropped("deployments", name, but=deployment.spec.name))
    made.append(_dropped("histories", name, but=deployment.spec.name))
    body = _CONVERTER.dumps(deployment)
    made.append(
        _put(
            "deployments",
            ("name", "model_id", "body"),
            (deployment.spec.name, deployment.model.model_id, body),
        )
    )
    if revisions is not None:
        made.append(_dropped("revisions", name))
        for r in revisions:
            of = (name, r.number, r.deployment.model.model_id, _CONVERTER.dumps(r))
            made.append(_put("revisions", ("name", "number", "model_id", "body"), of, keys=2))
    return (*made, (_UNUSED_TEXTS, ()))


def removed(name: DeploymentName) -> Statements:
    """Forget a deployment with its revisions and its history, and its models' texts when it was
    the last to use them.
    """
    dropped = (_dropped(table, name) for table in ("deployments", "revisions", "histories"))
    return (*dropped, (_UNUSED_TEXTS, ()))


def profile_stored(profile: Profile) -> Statements:
    """Write a profile, over an earlier one of its model and fingerprint."""
    row = (profile.model_id, profile.fingerprint, _CONVERTER.dumps(profile))
    return (_put("profiles", ("model_id", "fingerprint", "body"), row, keys=2),)


def history_stored(name: DeploymentName, history: OutputHistory) -> Statements:
    """Write a deployment's history, over the earlier one. One of a deployment that is gone is
    dropped: nobody would ever remove it.
    """
    row = (
        *(name, history.mean_tokens, history.count, _CONVERTER.dumps(history.gaps)),
        *(_CONVERTER.dumps(history.classes), name),
    )
    sql = (
        "INSERT INTO histories (name, mean_tokens, requests, gaps, classes)"
        " SELECT CAST(? AS TEXT), CAST(? AS REAL), CAST(? AS INTEGER), CAST(? AS TEXT),"
        " CAST(? AS TEXT) WHERE EXISTS (SELECT 1 FROM deployments WHERE name = ?)"
        " ON CONFLICT (name) DO UPDATE SET mean_tokens = excluded.mean_tokens,"
        " requests = excluded.requests, gaps = excluded.gaps, classes = excluded.classes"
    )
    return ((sql, row),)


_TEXT_COLUMNS = (
    *("model_id", "tokenizer_json", "chat_template", "bos_token", "eos_token", "add_bos"),
    *("sampling", "tool_template", "special_tokens"),
)
_UNUSED_TEXTS = (
    "DELETE FROM texts WHERE model_id NOT IN (SELECT model_id FROM deployments)"
    " AND model_id NOT IN (SELECT model_id FROM revisions)"
)


def _put(
    table: str, columns: Sequence[str], row: tuple[Value, ...], keys: int = 1
) -> tuple[str, tuple[Value, ...]]:
    """A row, over the one that has the same first `keys` columns."""
    changed = ", ".join(f"{column} = excluded.{column}" for column in columns[keys:])
    sql = (
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
        f" ON CONFLICT ({', '.join(columns[:keys])}) DO UPDATE SET {changed}"
    )
    return sql, row


def _dropped(table: str, name: DeploymentName, but: str = "") -> tuple[str, tuple[Value, ...]]:
    """What there is of a deployment, by all of its names in the cell but one."""
    names = name_in_cell(name, 1).removesuffix("1")
    sql = f"DELETE FROM {table} WHERE (name = ? OR substr(name, 1, ?) = ?) AND name <> ?"
    return sql, (name, len(names), names, but)


def check_schema(found: int, where: str) -> None:
    """Raises LaterSchema for the tables of a later mesh."""
    if found > SCHEMA:
        raise LaterSchema(
            f"the registry {where} has schema {found}; this mesh knows up to {SCHEMA}",
            hint="run the newer mesh that wrote it, or choose another place for the state",
        )


def cell_id(name: str, database: str = "") -> str:
    """For a cell without an id, which no other one has. In the same database it is the same again:
    nodes follow one that is restored to before it had its id.
    """
    if not database:
        return f"{name}-{secrets.token_hex(8)}"
    return f"{name}-{sha256(f'{database} {name}'.encode()).hexdigest()[:16]}"


def make_folder(folder: Path) -> None:
    """The state folder, unless it is there. Raises StorageError."""
    with system_errors(StorageError, f"cannot make the state folder {folder}", HOME_HINT):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)


class Tables:
    """The tables in SQLite. Every method raises StorageError, in which `where` names the database.
    One may read while another thread writes, and waits for its transaction.
    """

    def __init__(self, path: Path | str, where: str, *, remedy: str = "") -> None:
        """`remedy`: for a copy, what to do where the database does not hold what it should."""
        self.where, self._remedy = where, remedy
        self._lock = threading.RLock()
        with self._explained("open"):
            self._connection = sqlite3.connect(
                path, isolation_level=None, timeout=0.0, check_same_thread=False
            )

    def deployments(self) -> tuple[Deployment, ...]:
        """All of them, by name."""
        with self._explained("read"):
            rows = self._connection.execute("SELECT name, body FROM deployments ORDER BY name")
            return tuple(
                self._valid(Deployment, body, f"deployment under {name!r}") for name, body in rows
            )

    def models(self, most: int) -> dict[ModelId, DeploymentName]:
        """The models that serve, so many at most, each with a deployment that has it."""
        asked = "SELECT model_id, min(name) FROM deployments GROUP BY model_id ORDER BY 2 LIMIT ?"
        with self._explained("read"):
            rows = self._connection.execute(asked, (most,)).fetchall()
        return {ModelId(model_id): public_name(DeploymentName(name)) for model_id, name in rows}

    def profiles(self) -> tuple[Profile, ...]:
        """All of them, by model and fingerprint: they outlive the deployments of their models. One
        that cannot be read is logged and left out: a node measures it again by itself.
        """
        with self._explained("read"):
            rows = self._connection.execute(
                "SELECT model_id, fingerprint, body FROM profiles ORDER BY model_id, fingerprint"
            ).fetchall()
        found = []
        for model_id, fingerprint, body in rows:
            what = f"profile of model {model_id} on {fingerprint!r}"
            try:
                profile = self._valid(Profile, body, what)
                # It checks the tables, too.
                found.append(from_wire(to_wire(profile, profile_pb2.Profile), Profile))
            except (MeshError, TypeError, ValueError) as error:
                log.warning("the %s in %s is left out: %s", what, self.where, error)
        return tuple(found)

    def histories(self) -> dict[DeploymentName, OutputHistory]:
        """The histories of the deployments that have ended requests, by name."""
        with self._explained("read"):
            rows = self._connection.execute(
                "SELECT name, mean_tokens, requests, gaps, classes FROM histories ORDER BY name"
            )
            return {
                DeploymentName(name): OutputHistory(
                    mean_tokens=mean_tokens,
                    count=requests,
                    gaps=self._valid(CallGaps, gaps, f"times between calls of {name!r}").valid(),
                    classes=self._valid(_Classes, classes, f"histories of classes of {name!r}"),
                )
                for name, mean_tokens, requests, gaps, classes in rows
            }

    def revisions(self) -> dict[DeploymentName, Revisions]:
        """Those that do not serve, of each deployment that has any."""
        with self._explained("read"):
            rows = self._connection.execute(
                "SELECT name, number, body FROM revisions ORDER BY name, number"
            ).fetchall()
        found: dict[DeploymentName, Revisions] = {}
        for name, number, body in rows:
            revision = self._valid(Revision, body, f"revision {number} of {name!r}")
            found[DeploymentName(name)] = (*found.get(DeploymentName(name), ()), revision)
        return found

    def text(self, model_id: ModelId) -> TextAssets | None:
        """A model's tokenizer and template; None when no deployment has that model."""
        with self._explained("read"):
            row = self._connection.execute(
                "SELECT tokenizer_json, chat_template, bos_token, eos_token, add_bos, sampling,"
                " tool_template, special_tokens FROM texts WHERE model_id = ?",
                (model_id,),
            ).fetchone()
        if row is None:
            return None
        (tokenizer_json, chat_template, bos_token, eos_token, add_bos, sampling, *more) = row
        tool_template, special_tokens = more
        return TextAssets(
            tokenizer_json=tokenizer_json,
            chat_template=chat_template,
            bos_token=bos_token,
            eos_token=eos_token,
            add_bos=bool(add_bos),
            tool_template=tool_template,
            special_tokens=special_tokens,
            sampling=self._valid(SamplingDefaults, sampling, f"sampling of model {model_id}"),
        )

    def _valid(self, kind: type[T], body: str, what: str) -> T:
        try:
            return _CONVERTER.loads(body, kind)
        except Exception as error:
            raise StorageError(
                f"the registry {self.where} holds no valid {what}",
                hint=self._remedy or _HINTS[sqlite3.SQLITE_CORRUPT],
            ) from error

    def apply(self, statements: Statements) -> None:
        """One transaction, kept as the database keeps it. Raises StorageError, and then nothing
        has changed.
        """
        with self.transaction():
            for sql, row in statements:
                self._connection.execute(sql, row)

    def rows(self, table: str) -> tuple[tuple[str, ...], list[tuple[Value, ...]]]:
        """The columns of a table, and all of its rows in the order of its first columns."""
        with self._explained("read"):
            found = self._connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2")
            return tuple(column[0] for column in found.description), found.fetchall()

    def count(self, table: str) -> int:
        with self._explained("read"):
            (count,) = self._connection.execute(f"SELECT count(*) FROM {table}").fetchone()
            return int(count)

    def migrate(self) -> None:
        """Make the tables, or those of an earlier mesh into this one's. Raises StorageError for
        a later one's.
        """
        (found,) = self._connection.execute("PRAGMA user_version").fetchone()
        check_schema(found, self.where)
        for step in STEPS[found:]:
            # One by one: executescript would commit what is under way.
            for statement in step.split(";")[:-1]:
                self._connection.execute(statement)
        self._connection.execute(f"PRAGMA user_version = {SCHEMA}")

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """One transaction, on disk when it ends."""
        with self._explained("write"):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                # On a failing disk this fails too: SQLite then rolls back when it opens the file.
                with suppress(sqlite3.Error):
                    self._connection.rollback()
                raise

    @contextmanager
    def _explained(self, verb: str) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code == sqlite3.SQLITE_BUSY:
                message = f"the registry {self.where} is in use by another controller"
            else:
                message = f"cannot {verb} the registry {self.where}: {error}"
            hint = _HINTS.get(code, self._remedy or "check the file and its disk")
            raise StorageError(message, hint=hint) from error


class SqliteRegistry(Tables):
    """The file. Every method raises StorageError, and then nothing has changed."""

    def __init__(self, folder: Path) -> None:
        """Open or create the registry in `folder`, and count this start."""
        self.path, self.place = folder / FILE_NAME, str(folder)
        make_folder(folder)
        super().__init__(self.path, str(self.path))
        self.leads, self.deposed, self.changed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.leads.set()
        self.failure: MeshError | None = None
        self.handed_over = False
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="registry")
        try:
            self.epoch, self.cell = self._begin()
        except BaseException:
            self._connection.close()
            raise

    async def commit(self, statements: Statements) -> None:
        """The same as `apply`, while the loop goes on: the disk takes milliseconds, or longer."""
        await asyncio.get_running_loop().run_in_executor(self._writer, self.apply, statements)

    @property
    def tables(self) -> Tables:
        return self

    @property
    def shared(self) -> None:
        """This controller alone has the file."""

    def leader(self) -> str:
        return ""

    def show(self, epoch: int) -> None:
        """Its epochs are of no lease."""

    def check_writable(self) -> None:
        """Nobody else has the file."""

    async def hand_over(self) -> None:
        raise Unavailable(
            f"the registry {self.path} has this controller alone",
            hint="controllers that stand by share a registry in PostgreSQL: --state",
        )

    async def end(self) -> None:
        self.close()

    def close(self) -> None:
        """After the write under way."""
        self._writer.shutdown()
        super().close()

    def _begin(self) -> tuple[int, str]:
        """Take the file, see that it is whole and ours, and count the start: the new epoch, and the
        cell's id.
        """
        connection = self._connection
        with self._explained("open"):
            # Exclusive before WAL: no shared memory file, and a second controller is kept out.
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            (state,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if state != "ok":
            raise StorageError(
                f"the registry {self.path} is corrupt: {state}",
                hint=_HINTS[sqlite3.SQLITE_CORRUPT],
            )
        with self.transaction():
            self.migrate()
            begin = f"UPDATE starts SET epoch = epoch + 1, {NAMED} RETURNING epoch, cell"
            ((epoch, cell),) = connection.execute(begin, (cell_id("mesh"),)).fetchall()
        return epoch, cell


class Shared(Protocol):
    """A database that others may lead next, for what is in no `Tables`."""

    async def keep(self, statements: Statements) -> None:
        """One transaction, while this controller leads. Raises StorageError; it may be written
        then, or be written twice.
        """
        ...

    async def rows(self, sql: str, *values: str | int) -> list[Any]:
        """Raises StorageError."""
        ...


class Database(Protocol):
    """Where the registry is, opened by a controller that leads."""

    epoch: int
    cell: str
    """An id that the registry keeps: epochs of another one say nothing of this cell."""
    place: str
    """The folder or the address, as people are told."""
    leads: asyncio.Event
    deposed: asyncio.Event
    """Set once another controller leads, or this one never can."""
    changed: asyncio.Event
    """Set where `tables` got what another controller has written."""
    failure: MeshError | None
    """Why it never can."""
    handed_over: bool
    """Whether it is deposed because it has handed over as it was asked to."""

    def leader(self) -> str:
        """The address of the controller that leads, as far as is known; empty for none."""
        ...

    @property
    def tables(self) -> Tables:
        """What it holds, to read."""
        ...

    @property
    def shared(self) -> Shared | None:
        """The database, where other controllers may lead the cell."""
        ...

    async def commit(self, statements: Statements) -> None:
        """One transaction. Raises StorageError, and then nothing has changed, or it says that this
        is not known.
        """
        ...

    def show(self, epoch: int) -> None:
        """A node has obeyed a leader of this epoch of this cell, as it says."""
        ...

    def check_writable(self) -> None:
        """Raises Unavailable where this controller may not write now."""
        ...

    async def hand_over(self) -> None:
        """Have another controller lead. Raises Unavailable, and then nothing has changed."""
        ...

    async def end(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Write:
    what: str
    """What is written; a later one of the same, for which nobody waits, takes its place."""
    statements: Statements
    done: Done | None


class RegistryWrites:
    """The registry as the core's performer writes to it: in the order in which it was asked, while
    the loop goes on. What nobody waits for is kept until the database can be reached.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: deque[_Write] = deque()
        self._under_way = 0
        """So many of them, the first, are being written."""
        self._task: asyncio.Task[None] | None = None
        self._asked = asyncio.Event()

    def store(
        self,
        deployment: Deployment,
        text: TextAssets | None,
        revisions: Revisions | None,
        done: Done | None = None,
    ) -> None:
        name = public_name(deployment.spec.name)
        self._add(f"the revisions of {name}", stored(deployment, text, revisions), done)

    def remove(self, name: DeploymentName, done: Done | None = None) -> None:
        self._add(f"the removal of {name}", removed(name), done)

    def store_profile(self, profile: Profile, done: Done | None = None) -> None:
        what = f"the profile of {profile.model_id} on {profile.fingerprint}"
        self._add(what, profile_stored(profile), done)

    def store_history(self, name: DeploymentName, history: OutputHistory) -> None:
        self._add(f"the output lengths of {name}", history_stored(name, history), None)

    async def close(self) -> None:
        """Write what waits, within CLOSE_S_MAX. A file still takes the write under way."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=CLOSE_S_MAX)
            under_way = self._under_way
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            for n, write in enumerate(self._waiting):
                how = "may not be kept" if n < under_way else "is not kept"
                log.warning("%s %s: the controller ends", write.what, how)

    def _add(self, what: str, statements: Statements, done: Done | None) -> None:
        write = _Write(what=what, statements=statements, done=done)
        if done is None:
            queued = islice(self._waiting, self._under_way, None)
            for one in [one for one in queued if one.done is None and one.what == what]:
                self._waiting.remove(one)
        elif sum(one.done is not None for one in self._waiting) >= WRITES_MAX:
            done(StorageError(f"{WRITES_MAX} writes wait for the registry, which is the limit"))
            return
        else:
            self._asked.set()
        self._waiting.append(write)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write())

    async def _write(self) -> None:
        told, alone = False, 0
        while self._waiting:
            self._asked.clear()
            writes = self._next(1 if alone else TOGETHER_MAX)
            self._under_way = len(writes)
            failure: StorageError | None = None
            try:
                await self._commit(writes)
            except Unreached as error:
                self._under_way = 0
                if not told:
                    log.warning("%s; what is learned meanwhile waits", error.message)
                told = True
                self._refuse_all(error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S):
                        await self._asked.wait()
                continue
            except Exception as error:
                if len(writes) > 1:  # one of them is at fault, and the others are to be kept
                    self._under_way, alone = 0, len(writes)
                    continue
                failure = _as_refused(error)
            alone = max(alone - 1, 0)
            self._under_way = 0
            for write in writes:
                self._waiting.popleft()
                if write.done is not None:
                    write.done(failure)
                elif failure is not None:
                    log.warning("%s is not kept: %s", write.what, failure.message)

    async def _commit(self, writes: list[_Write]) -> None:
        """While it lasts, what waits behind is refused once the database is away."""
        statements = tuple(statement for write in writes for statement in write.statements)
        task = asyncio.create_task(self._database.commit(statements))
        try:
            while not (await asyncio.wait([task], timeout=RETRY_S))[0]:
                try:
                    self._database.check_writable()
                except Unavailable as error:
                    self._refuse_all(Unreached(error.message, hint=error.hint))
            task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _next(self, most: int) -> list[_Write]:
        """The first write, and what follows it where nobody waits for any of them."""
        following = takewhile(lambda write: write.done is None, self._waiting)
        return list(islice(following, most)) or [self._waiting[0]]

    def _refuse_all(self, error: StorageError) -> None:
        """Nobody is to wait for a database that cannot be reached, but for what is under way."""
        queued = list(self._waiting)
        first, behind = queued[: self._under_way], queued[self._under_way :]
        self._waiting = deque(first + [write for write in behind if write.done is None])
        for write in behind:
            if write.done is not None:
                write.done(error)


def _as_refused(error: Exception) -> StorageError:
    """Anything but a StorageError is a fault of ours. It ends this write alone."""
    if isinstance(error, StorageError):
        return error
    log.error("a write to the registry failed", exc_info=error)
    return StorageError(f"the registry could not write it: {type(error).__name__}: {error}")
