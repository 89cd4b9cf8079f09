"""The files and batches of OpenAI's protocol where controllers share a registry in PostgreSQL.

They are used from a folder of this controller, as with one controller alone. What is sent or begun
is in the database before its caller hears of it; answers of batches follow every SAVE_S. A
controller that begins to lead has the index at once, and a content when somebody asks for it: a
line whose answer had not come there is asked again. Before: `postgres`. After: `files`, `batches`.
"""

import asyncio
import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

from mesh.controller.registry import CLOSE_S_MAX, Shared
from mesh.domain.access import Caller
from mesh.domain.errors import MeshError
from mesh.http.kept_files import COLUMNS, KeptBatch, KeptFile, KeptFiles

SAVE_S = 1.0
"""Between two looks at what there is to save."""
CHUNK_BYTES = 1 << 20
"""The bytes of a content that are written at a time, to the end of a line."""
FOLDER = "shared-files"

_PUT = (
    "INSERT INTO kept_contents (id, at, data) VALUES (?, ?, ?)"
    " ON CONFLICT (id, at) DO UPDATE SET data = excluded.data"
)
"""It may be there already, where a write was broken off."""

logger = logging.getLogger(__name__)


class SharedFiles(KeptFiles):
    """`home` is the controller's folder. Raises StorageError."""

    def __init__(self, home: Path, database: Shared) -> None:
        folder = home / FOLDER
        shutil.rmtree(folder, ignore_errors=True)  # it is what this controller knew earlier
        super().__init__(folder)
        self._database = database
        self._saving, self._fetching = asyncio.Lock(), asyncio.Lock()
        self._changed = set[str]()
        """Ids whose rows in the index are not saved."""
        self._touched = set[str]()
        """Ids whose contents may have more than is saved."""
        self._saved_bytes: dict[str, int] = {}
        """By id, of contents that are in this controller's folder."""
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Read the index, and save from now on."""
        for row in await self._database.rows(f"SELECT {COLUMNS} FROM kept_files ORDER BY number"):
            self._rows(f"INSERT INTO kept ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", *row)
        self._task = asyncio.create_task(self._save_on())

    async def end(self) -> None:
        """Save what is left, if that can be done soon."""
        if self._task is not None:
            self._task.cancel()
            with suppress(MeshError, TimeoutError):
                async with asyncio.timeout(CLOSE_S_MAX):
                    await self.saved()

    def path(self, id_: str) -> Path:
        self._touched.add(id_)
        return super().path(id_)

    def add(self, one: KeptFile | KeptBatch, owner: Caller) -> None:
        super().add(one, owner)
        self._changed.add(one.id)

    def update(self, batch: KeptBatch) -> None:
        super().update(batch)
        self._changed.add(batch.id)

    def forget(self, file_id: str) -> None:
        super().forget(file_id)
        self._changed.add(file_id)

    async def fetched(self, id_: str) -> Path:
        path = self.path(id_)
        async with self._fetching:
            if path.exists():
                return path
            coming, at = path.with_suffix(".coming"), 0
            coming.unlink(missing_ok=True)
            chunk = "SELECT data FROM kept_contents WHERE id = ? AND at = ?"
            while found := await self._database.rows(chunk, id_, at):
                await asyncio.to_thread(_append, coming, found[0][0])
                at += len(found[0][0])
            if at:
                self._saved_bytes[id_] = at
                os.replace(coming, path)
        return path

    async def saved(self) -> None:
        async with self._saving:
            for id_ in sorted(self._touched):
                await self._save_content(id_)
            for id_ in sorted(self._changed):
                await self._save_row(id_)

    async def drop_left(self) -> None:
        """Delete contents that no file and no open batch names: an upload or a batch of an earlier
        controller has left them. Uploads under way here are in `_touched`.
        """
        found = await self._database.rows("SELECT DISTINCT id FROM kept_contents")
        known = {id_ for (id_,) in self._rows("SELECT id FROM kept")} | self._touched
        for batch, _ in self.open_batches():
            known |= {id_ for id_ in (batch.output_file_id, batch.error_file_id) if id_}
        for (id_,) in found:
            if id_ not in known:
                await self._database.keep((_without("kept_contents", id_),))

    async def _save_on(self) -> None:
        told, dropped = False, False
        while True:
            await asyncio.sleep(SAVE_S)
            try:
                await self.saved()
                if not dropped:
                    await self.drop_left()
                told, dropped = False, True
            except (MeshError, OSError):
                if not told:
                    logger.exception("files and batches are saved later")
                told = True

    async def _save_content(self, id_: str) -> None:
        """What it has more. The last line of one that is not in the index yet may be torn."""
        path, whole = super().path(id_), bool(self._rows("SELECT 1 FROM kept WHERE id = ?", id_))
        while data := await asyncio.to_thread(_read, path, self._saved_bytes.get(id_, 0), whole):
            at = self._saved_bytes.get(id_, 0)
            await self._database.keep(((_PUT, (id_, at, data)),))
            self._saved_bytes[id_] = at + len(data)
        if not path.exists() and self._saved_bytes.pop(id_, 0):
            await self._database.keep((_without("kept_contents", id_),))
        if whole or not path.exists():
            self._touched.discard(id_)

    async def _save_row(self, id_: str) -> None:
        found = self._rows(f"SELECT {COLUMNS} FROM kept WHERE id = ?", id_)
        self._changed.discard(id_)
        marks = ", ".join("?" * len(COLUMNS.split(",")))
        sql = f"INSERT INTO kept_files ({COLUMNS}) VALUES ({marks})"
        made = [(sql, row) for row in found] or [_without("kept_contents", id_)]
        try:
            await self._database.keep((_without("kept_files", id_), *made))
        except BaseException:
            self._changed.add(id_)
            raise


def _without(table: str, id_: str) -> tuple[str, tuple[str]]:
    return f"DELETE FROM {table} WHERE id = ?", (id_,)


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def _read(path: Path, at: int, whole: bool) -> bytes:
    """Some of a content from there on, to the end of a line unless it is `whole`."""
    try:
        with path.open("rb") as file:
            file.seek(at)
            data = file.read(CHUNK_BYTES)
            if not whole:
                data += file.readline()
    except FileNotFoundError:
        return b""
    return data if whole else data[: data.rfind(b"\n") + 1]
