"""The registry: what outlives the controller, in one SQLite file under its state folder.

It holds the acknowledged deployments, the tokenizers of their models, what was measured of them,
how long their answers turn out, and how often a controller has started on this folder. A write has
returned only when it is on disk (WAL, synchronous=FULL), so what was acknowledged survives
`kill -9` and a power cut. One controller at a time: the file stays locked while it runs, and the
kernel lets go of it when it dies.
"""

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from cattrs.preconf.json import make_converter

from mesh.domain.deployment import Deployment
from mesh.domain.errors import StorageError
from mesh.domain.history import CallGaps, OutputHistory
from mesh.domain.ids import DeploymentName, ModelId
from mesh.domain.profile import Profile
from mesh.domain.revision import Revision, Revisions, public_name
from mesh.domain.text import SamplingDefaults, TextAssets

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
_STEPS = (
    *(_SCHEMA_1, _SCHEMA_2, _SCHEMA_3, _SCHEMA_4, _SCHEMA_5, _SCHEMA_6, _SCHEMA_7),
    _SCHEMA_8,
)
"""Each makes its schema of the one before it."""
SCHEMA = len(_STEPS)
"""The version of the tables; the file keeps it as its user_version."""
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


class SqliteRegistry:
    """Not thread-safe. Every method raises StorageError, and then nothing has changed."""

    def __init__(self, folder: Path) -> None:
        """Open or create the registry in `folder`, and count this start."""
        self.path = folder / FILE_NAME
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot make the state folder {folder}: {error.strerror}",
                hint="choose a folder that you may write with --home or MESH_HOME",
            ) from error
        with self._explained("open"):
            self._connection = sqlite3.connect(self.path, isolation_level=None, timeout=0.0)
        try:
            self.epoch = self._begin()
        except BaseException:
            self._connection.close()
            raise

    def deployments(self) -> tuple[Deployment, ...]:
        """All of them, by name."""
        with self._explained("read"):
            rows = self._connection.execute("SELECT name, body FROM deployments ORDER BY name")
            return tuple(
                self._valid(Deployment, body, f"deployment under {name!r}") for name, body in rows
            )

    def profiles(self) -> tuple[Profile, ...]:
        """All of them, by model and fingerprint: they outlive the deployments of their models."""
        with self._explained("read"):
            rows = self._connection.execute(
                "SELECT model_id, fingerprint, body FROM profiles ORDER BY model_id, fingerprint"
            )
            return tuple(
                self._valid(Profile, body, f"profile of model {model_id} on {fingerprint!r}")
                for model_id, fingerprint, body in rows
            )

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
                    gaps=self._valid(CallGaps, gaps, f"times between calls of {name!r}").bounded(),
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

    def store(
        self,
        deployment: Deployment,
        text: TextAssets | None,
        revisions: Revisions | None = None,
    ) -> None:
        """Write a deployment, over an earlier one of its public name; `text`, of the model of its
        newest revision, and `revisions` are kept as they are where they are None.
        """
        name = public_name(deployment.spec.name)
        with self._written():
            if text is not None:
                newest = max(
                    (deployment, *(r.deployment for r in revisions or ())),
                    key=lambda one: one.revision,
                )
                self._connection.execute(
                    "INSERT OR REPLACE INTO texts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        newest.model.model_id,
                        text.tokenizer_json,
                        text.chat_template,
                        text.bos_token,
                        text.eos_token,
                        int(text.add_bos),
                        _CONVERTER.dumps(text.sampling),
                        text.tool_template,
                        text.special_tokens,
                    ),
                )
            # As often as not it served under another name in the cell before.
            self._drop("deployments", name, but=deployment.spec.name)
            self._drop("histories", name, but=deployment.spec.name)
            self._connection.execute(
                "INSERT OR REPLACE INTO deployments VALUES (?, ?, ?)",
                (deployment.spec.name, deployment.model.model_id, _CONVERTER.dumps(deployment)),
            )
            if revisions is not None:
                self._drop("revisions", name)
                self._connection.executemany(
                    "INSERT INTO revisions VALUES (?, ?, ?, ?)",
                    [
                        (name, r.number, r.deployment.model.model_id, _CONVERTER.dumps(r))
                        for r in revisions
                    ],
                )
            self._drop_unused_texts()

    def remove(self, name: DeploymentName) -> None:
        """Forget a deployment with its revisions and its history, and its models' texts when it
        was the last to use them.
        """
        with self._written():
            for table in ("deployments", "revisions", "histories"):
                self._drop(table, name)
            self._drop_unused_texts()

    def store_profile(self, profile: Profile) -> None:
        """Write a profile, over an earlier one of its model and fingerprint."""
        with self._written():
            self._connection.execute(
                "INSERT OR REPLACE INTO profiles VALUES (?, ?, ?)",
                (profile.model_id, profile.fingerprint, _CONVERTER.dumps(profile)),
            )

    def store_history(self, name: DeploymentName, history: OutputHistory) -> None:
        """Write a deployment's history, over the earlier one. One of a deployment that is gone is
        dropped: nobody would ever remove it.
        """
        with self._written():
            self._connection.execute(
                "INSERT OR REPLACE INTO histories SELECT ?1, ?2, ?3, ?4, ?5"
                " WHERE EXISTS (SELECT 1 FROM deployments WHERE name = ?1)",
                (
                    *(name, history.mean_tokens, history.count, _CONVERTER.dumps(history.gaps)),
                    _CONVERTER.dumps(history.classes),
                ),
            )

    def close(self) -> None:
        self._connection.close()

    def _begin(self) -> int:
        """Take the file, see that it is whole and ours, and count the start: the new epoch."""
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
        with self._written():
            self._migrate()
            connection.execute("UPDATE starts SET epoch = epoch + 1")
            (epoch,) = connection.execute("SELECT epoch FROM starts").fetchone()
        return int(epoch)

    def _migrate(self) -> None:
        (found,) = self._connection.execute("PRAGMA user_version").fetchone()
        if found > SCHEMA:
            raise StorageError(
                f"the registry {self.path} has schema {found}; this mesh knows up to {SCHEMA}",
                hint="run the newer mesh that wrote it, or choose another folder with --home",
            )
        for step in _STEPS[found:]:
            # One by one: executescript would commit what is under way.
            for statement in step.split(";")[:-1]:
                self._connection.execute(statement)
        self._connection.execute(f"PRAGMA user_version = {SCHEMA}")

    def _valid(self, kind: type[T], body: str, what: str) -> T:
        try:
            return _CONVERTER.loads(body, kind)
        except Exception as error:
            raise StorageError(
                f"the registry {self.path} holds no valid {what}",
                hint=_HINTS[sqlite3.SQLITE_CORRUPT],
            ) from error

    def _drop_unused_texts(self) -> None:
        self._connection.execute(
            "DELETE FROM texts WHERE model_id NOT IN (SELECT model_id FROM deployments)"
            " AND model_id NOT IN (SELECT model_id FROM revisions)"
        )

    def _drop(self, table: str, name: DeploymentName, but: DeploymentName | None = None) -> None:
        """What there is of a deployment, by all of its names in the cell but one."""
        rows = self._connection.execute(f"SELECT DISTINCT name FROM {table}").fetchall()
        gone = [(n,) for (n,) in rows if public_name(n) == name and n != but]
        self._connection.executemany(f"DELETE FROM {table} WHERE name = ?", gone)

    @contextmanager
    def _written(self) -> Iterator[None]:
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
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code == sqlite3.SQLITE_BUSY:
                message = f"the registry {self.path} is in use by another controller"
            else:
                message = f"cannot {verb} the registry {self.path}: {error}"
            raise StorageError(message, hint=_HINTS.get(code, "check the file and its disk")) from (
                error
            )
