"""The files and batches of OpenAI's protocol: an index in SQLite, and a folder with the contents.

Each is its tenant's alone, and goes 30 days after it was made. A batch's answers are appended to
files here while it runs; how many there are is what these files say, so that a controller that is
killed forgets no answer. The index does not wait for the disk: a power cut may cost the last
seconds. Before: `files` and `batches`. After: the disk.
"""

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from mesh.domain.access import Caller, Role, TenantName
from mesh.domain.errors import Refused, StorageError
from mesh.domain.lifecycle import BATCH, BatchState
from mesh.domain.reasons import RefusalReason
from mesh.wire.access import caller

FILE_NAME = "files.sqlite3"
KEPT_S = 30 * 86_400
FILE_BYTES_MAX = 200_000_000
"""As with OpenAI."""
UPLOAD_S_MAX = 600.0
TENANT_BYTES_MAX = 2 << 30
"""The files of a tenant together. The answers of a batch count once it has ended."""
ALL_BYTES_MAX = 16 << 30
TENANT_KEPT_MAX = 10_000
"""A tenant's files and batches together."""
ENDED = frozenset(state for state, following in BATCH.items() if not following)
SCHEMA = 1
COLUMNS = "number, id, kind, tenant, role, key_id, created_unix_s, bytes, body"
_TABLE = """
CREATE TABLE IF NOT EXISTS kept (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    tenant TEXT NOT NULL,
    role TEXT NOT NULL,
    key_id TEXT NOT NULL,
    created_unix_s INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    body TEXT NOT NULL
) STRICT
"""


class KeptFile(BaseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class BatchError(BaseModel):
    code: str
    message: str
    line: int | None = None
    """The first of a file is 1; null where the file as a whole is wrong."""
    param: str | None = None


class BatchErrors(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchError]


class Counts(BaseModel):
    total: int = 0
    completed: int = 0
    failed: int = 0


class KeptBatch(BaseModel):
    """The ids of its files of answers are those that they have once it has ended."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchState = BatchState.VALIDATING
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = Field(default_factory=Counts)
    metadata: dict[str, str] | None = None


Kept = TypeVar("Kept", KeptFile, KeptBatch)


class Page(BaseModel, Generic[Kept]):
    object: Literal["list"] = "list"
    data: list[Kept]
    first_id: str | None
    last_id: str | None
    has_more: bool


class KeptFiles:
    """`home` is the controller's folder. Not thread-safe but for `path`. Raises StorageError."""

    def __init__(self, home: Path, unix_s: Callable[[], float] = time.time) -> None:
        self._folder = home / "files"
        self._unix_s = unix_s
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._connection = sqlite3.connect(home / FILE_NAME, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise self._explained(error) from error
        self._rows("PRAGMA journal_mode = WAL")
        self._rows("PRAGMA synchronous = NORMAL")
        ((found,),) = self._rows("PRAGMA user_version")
        if found > SCHEMA:
            raise StorageError(
                f"{home / FILE_NAME} has schema {found}, this mesh knows {SCHEMA}",
                hint="run the newer mesh that wrote it, or move it away",
            )
        self._rows(_TABLE)
        self._rows(f"PRAGMA user_version = {SCHEMA}")

    @property
    def now_unix_s(self) -> int:
        return int(self._unix_s())

    def path(self, id_: str) -> Path:
        """Where the content of a file is; the id is one of ours."""
        return self._folder / id_

    def content(self, file_id: str) -> Path:
        """The same, where it is still there."""
        path = self.path(file_id)
        if not path.is_file():
            raise StorageError(
                f"the content of {file_id} is there no more", hint="delete it, and send it again"
            )
        return path

    async def fetched(self, id_: str) -> Path:
        """Where a content is, which is there now if the cell has it."""
        return self.path(id_)

    async def saved(self) -> None:
        """Whoever leads the cell next knows of all changes then."""

    def check_room(self, further_bytes: int) -> None:
        """Raises Refused where the caller's tenant, or all of them, have too much with that."""
        sql = "SELECT count(*), total(bytes), (SELECT total(bytes) FROM kept) FROM kept"
        ((count, own, all_),) = self._rows(f"{sql} WHERE tenant = ?", caller().tenant)
        for said, have, most in (
            ("of files and batches of a tenant", count + 1, TENANT_KEPT_MAX),
            ("bytes of files of a tenant", own + further_bytes, TENANT_BYTES_MAX),
            ("bytes of all files", all_ + further_bytes, ALL_BYTES_MAX),
        ):
            if have > most:
                raise Refused(
                    f"with this one there are {have:.0f} {said}; {most} is the limit",
                    reason=RefusalReason.TENANT_LIMIT,
                    hint="delete files that are not needed any more; all go after 30 days",
                )

    def add(self, one: KeptFile | KeptBatch, owner: Caller) -> None:
        size = one.bytes if isinstance(one, KeptFile) else 0
        self._rows(
            "INSERT OR REPLACE INTO kept"
            " (id, kind, tenant, role, key_id, created_unix_s, bytes, body)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            *(one.id, one.object, owner.tenant, owner.role, owner.key_id, one.created_at, size),
            one.model_dump_json(),
        )

    def update(self, batch: KeptBatch) -> None:
        self._rows("UPDATE kept SET body = ? WHERE id = ?", batch.model_dump_json(), batch.id)

    def get(self, kind: type[Kept], id_: str) -> Kept | None:
        """One of the caller's; `None` where there is none."""
        sql = "SELECT body FROM kept WHERE id = ? AND kind = ? AND tenant = ?"
        rows = self._rows(sql, id_, _name(kind), caller().tenant)
        return kind.model_validate_json(rows[0][0]) if rows else None

    def page(
        self,
        kind: type[Kept],
        *,
        after: str,
        limit: int,
        oldest_first: bool = False,
        purpose: str = "",
    ) -> Page[Kept]:
        """The caller's that follow `after`, or the first; of files those of a `purpose`."""
        than, order = (">", "") if oldest_first else ("<", "DESC")
        sql, tenant = "SELECT body FROM kept WHERE kind = ? AND tenant = ?", caller().tenant
        values: list[str] = [_name(kind), tenant]
        if after:
            sql += f" AND number {than} (SELECT number FROM kept WHERE id = ? AND tenant = ?)"
            values += [after, tenant]
        if purpose:
            sql += " AND json_extract(body, '$.purpose') = ?"
            values.append(purpose)
        rows = self._rows(f"{sql} ORDER BY number {order} LIMIT {limit + 1}", *values)
        data = [kind.model_validate_json(body) for (body,) in rows[:limit]]
        ends = (data[0].id, data[-1].id) if data else (None, None)
        return Page(data=data, first_id=ends[0], last_id=ends[1], has_more=len(rows) > limit)

    def forget(self, file_id: str) -> None:
        self._rows("DELETE FROM kept WHERE id = ?", file_id)
        self.path(file_id).unlink(missing_ok=True)

    def open_batches(self) -> list[tuple[KeptBatch, Caller]]:
        """Those of all tenants that have not ended, the oldest first, with who asked for them."""
        ended = ", ".join(f"'{state}'" for state in sorted(ENDED))
        rows = self._rows(
            "SELECT body, tenant, role, key_id FROM kept WHERE kind = 'batch'"
            f" AND json_extract(body, '$.status') NOT IN ({ended}) ORDER BY number"
        )
        return [
            (
                KeptBatch.model_validate_json(body),
                Caller(role=Role(role), tenant=TenantName(tenant), key_id=key_id),
            )
            for body, tenant, role, key_id in rows
        ]

    def forget_old(self) -> None:
        """What was made too long ago, but for what batches use that have not ended; and contents
        that no file has, as of uploads that were broken off. Raises OSError, too.
        """
        used: set[str | None] = set()
        for batch, _ in self.open_batches():
            used |= {batch.id, batch.input_file_id, batch.output_file_id, batch.error_file_id}
        rows = dict(self._rows("SELECT id, created_unix_s FROM kept"))
        for id_, created_unix_s in rows.items():
            if created_unix_s < self._unix_s() - KEPT_S and id_ not in used:
                self.forget(id_)
        for path in self._folder.iterdir():
            old = path.stat().st_mtime < self._unix_s() - UPLOAD_S_MAX
            if old and path.name not in used and path.name not in rows:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        self._connection.close()

    def _rows(self, sql: str, *values: str | int) -> list[Any]:
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise self._explained(error) from error

    def _explained(self, error: Exception) -> StorageError:
        return StorageError(
            f"the index of files beside {self._folder} cannot be used: {error}",
            hint="check the disk: space left, rights; what is no database may be moved away",
        )


def _name(kind: type[KeptFile] | type[KeptBatch]) -> str:
    return str(kind.model_fields["object"].default)
