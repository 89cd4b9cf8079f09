"""The keys of a cell and the limits of its tenants, in a SQLite file beside the registry.

Of a key its SHA-256 is kept, which suffices for 256 random bits: nobody can try them all. `mesh
key` writes here on the controller's machine, and a controller that runs sees it with the next
call. Before: the gate of both protocols, which asks for the caller of a key. After: nothing.
"""

import secrets
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from hashlib import sha256
from pathlib import Path

from mesh.domain.access import Caller, Key, Role, TenantLimits, TenantName
from mesh.domain.checks import check_name
from mesh.domain.errors import Forbidden, InvalidInput, NotFound, StorageError, Unauthenticated

FILE_NAME = "keys.sqlite3"
SCHEMA = 1
KEY_BYTES = 32
KEYS_MAX = 10_000
BUSY_S_MAX = 5.0
"""The longest that a write waits for another one."""
_PREFIX = "mesh_"
_ID_CHARS = 12
_TABLES = (
    """
CREATE TABLE IF NOT EXISTS keys (
    digest TEXT PRIMARY KEY,
    key_id TEXT NOT NULL UNIQUE,
    role TEXT NOT NULL,
    tenant TEXT NOT NULL,
    created_unix_s REAL NOT NULL,
    expires_unix_s REAL,
    revoked_unix_s REAL
) STRICT""",
    """
CREATE TABLE IF NOT EXISTS limits (
    tenant TEXT PRIMARY KEY,
    requests_per_s REAL,
    tokens_per_min REAL,
    running INTEGER,
    deployments INTEGER
) STRICT""",
)


class KeyBook:
    """The file. Not thread-safe. Raises StorageError."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self._version = -1
        self._keys: dict[str, Key] = {}
        self._by_id: dict[str, Key] = {}
        self._limits: dict[TenantName, TenantLimits] = {}
        with self._explained("open"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._connection = sqlite3.connect(self.path, isolation_level=None, timeout=BUSY_S_MAX)
        try:
            self._begin()
        except BaseException:
            self._connection.close()
            raise

    def _begin(self) -> None:
        with self._explained("open"):
            self.path.chmod(0o600)
            self._connection.execute("PRAGMA journal_mode = WAL")
            (found,) = self._connection.execute("PRAGMA user_version").fetchone()
            (state,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
            if state != "ok":
                raise ValueError(f"the file is corrupt: {state}")
            if found > SCHEMA:
                raise StorageError(
                    f"{self.path} has schema {found}, this mesh knows {SCHEMA}",
                    hint="run the newer mesh that wrote it, or move it away and make new keys",
                )
            if found < SCHEMA:
                for table in _TABLES:
                    self._connection.execute(table)
                self._connection.execute(f"PRAGMA user_version = {SCHEMA}")

    def create(
        self, role: Role, tenant: TenantName, *, expires_unix_s: float | None = None
    ) -> tuple[str, Key]:
        """A new key: itself, which nobody can be shown again, and what is kept of it. Raises
        InvalidInput where the role needs a tenant, or has none.
        """
        if role is Role.TENANT:
            check_name(tenant, "the tenant's name")
        elif tenant:
            raise InvalidInput(f"a key of the role {role} is no tenant's", hint="leave it out")
        secret = _PREFIX + secrets.token_urlsafe(KEY_BYTES)
        digest = _digest(secret)
        key = Key(
            key_id=digest[:_ID_CHARS],
            role=role,
            tenant=tenant,
            created_unix_s=time.time(),
            expires_unix_s=expires_unix_s,
        )
        with self._explained("write"):
            (count,) = self._connection.execute("SELECT count(*) FROM keys").fetchone()
            if count >= KEYS_MAX:
                raise InvalidInput(f"there are {count} keys, which is the limit")
            self._connection.execute(
                "INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, NULL)",
                (digest, key.key_id, role, tenant, key.created_unix_s, expires_unix_s),
            )
        return secret, key

    def revoke(self, key_id: str) -> None:
        """It opens nothing from the next call on. Raises NotFound."""
        with self._explained("write"):
            changed = self._connection.execute(
                "UPDATE keys SET revoked_unix_s = coalesce(revoked_unix_s, ?) WHERE key_id = ?",
                (time.time(), key_id),
            ).rowcount
        if not changed:
            raise NotFound(f"there is no key {key_id!r}", hint="`mesh key list` shows their ids")

    def all_keys(self) -> tuple[Key, ...]:
        """All of them, the oldest first."""
        self._look()
        return tuple(sorted(self._keys.values(), key=lambda key: (key.created_unix_s, key.key_id)))

    def caller(self, secret: str) -> Caller:
        """Whose key it is. Raises Unauthenticated where it is nobody's, or nobody's any more."""
        self._look()
        key = self._keys.get(_digest(secret))
        if key is None:
            raise Unauthenticated("the key is unknown", hint="`mesh key create` makes one")
        if why := _ended(key):
            raise Unauthenticated(why, hint="ask for another one")
        return Caller(role=key.role, tenant=key.tenant, key_id=key.key_id)

    def check_acted_for(self, key_id: str) -> None:
        """Raises Forbidden where an operator calls for whose key holds no more here. One that only
        the operator knows holds.
        """
        self._look()
        key = self._by_id.get(key_id)
        if key is not None and (why := _ended(key)):
            raise Forbidden(why, hint="ask for another one")

    def limits(self, tenant: TenantName) -> TenantLimits:
        self._look()
        return self._limits.get(tenant, TenantLimits())

    def limited(self) -> dict[TenantName, TenantLimits]:
        """Tenants that have limits, by name."""
        self._look()
        return dict(sorted(self._limits.items()))

    def limit(self, tenant: TenantName, limits: TenantLimits) -> None:
        """In the place of those that it had."""
        check_name(tenant, "the tenant's name")
        row = limits.requests_per_s, limits.tokens_per_min, limits.running, limits.deployments
        with self._explained("write"):
            self._connection.execute(
                "INSERT OR REPLACE INTO limits VALUES (?, ?, ?, ?, ?)", (tenant, *row)
            )

    def close(self) -> None:
        self._connection.close()

    def _look(self) -> None:
        """Read it again if anybody has written to it."""
        with self._explained("read"):
            execute = self._connection.execute
            (version,) = execute("PRAGMA data_version").fetchone()
            version += self._connection.total_changes << 32
            if version == self._version:
                return
            self._keys = {
                digest: Key(
                    key_id=key_id,
                    role=Role(role),
                    tenant=TenantName(tenant),
                    created_unix_s=created,
                    expires_unix_s=expires,
                    revoked_unix_s=revoked,
                )
                for digest, key_id, role, tenant, created, expires, revoked in execute(
                    "SELECT * FROM keys"
                )
            }
            self._by_id = {key.key_id: key for key in self._keys.values()}
            self._limits = {
                TenantName(tenant): TenantLimits(
                    requests_per_s=requests,
                    tokens_per_min=tokens,
                    running=running,
                    deployments=deployments,
                )
                for tenant, requests, tokens, running, deployments in execute(
                    "SELECT * FROM limits"
                )
            }
        self._version = version

    @contextmanager
    def _explained(self, verb: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, ValueError, OSError) as error:
            raise StorageError(
                f"cannot {verb} the keys in {self.path}: {error}",
                hint="check the file, its rights and its disk",
            ) from error


class KeyDesk:
    """What the page does with the keys in that folder. Each call opens the file anew, so that it
    may come from any thread: a write waits for another one up to `BUSY_S_MAX`. Raises as `KeyBook`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def create(
        self, role: Role, tenant: TenantName, *, expires_unix_s: float | None = None
    ) -> tuple[str, Key]:
        with closing(KeyBook(self._folder)) as book:
            return book.create(role, tenant, expires_unix_s=expires_unix_s)

    def revoke(self, key_id: str) -> None:
        with closing(KeyBook(self._folder)) as book:
            book.revoke(key_id)

    def all_keys(self) -> tuple[Key, ...]:
        with closing(KeyBook(self._folder)) as book:
            return book.all_keys()


def _ended(key: Key) -> str:
    """Why a key opens nothing any more; empty where it does."""
    if key.revoked_unix_s is not None:
        return f"the key {key.key_id} was revoked"
    if key.expires_unix_s is not None and key.expires_unix_s <= time.time():
        return f"the key {key.key_id} has expired"
    return ""


def _digest(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()
