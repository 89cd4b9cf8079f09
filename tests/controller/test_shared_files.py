"""Files and batches that the next controller of a cell finds in its database."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from mesh.controller.registry import Statements
from mesh.controller.shared_files import CHUNK_BYTES, SharedFiles
from mesh.domain.access import Caller, Role, TenantName
from mesh.domain.errors import Unreached
from mesh.http.batches import BatchBody, Batches
from mesh.http.kept_files import KeptBatch, KeptFile
from mesh.wire.access import act_as

OWNER = Caller(role=Role.ADMIN, tenant=TenantName("one"), key_id="k1")
FIRST, LONG = b"a line\nand half of", b"x" * (CHUNK_BYTES + 7) + b"\n"


class Database:
    """In memory, as `postgres` has it, with a connection that may break."""

    def __init__(self) -> None:
        self._connection = sqlite3.connect(":memory:", isolation_level=None)
        self._connection.execute(
            "CREATE TABLE kept_files (number, id TEXT PRIMARY KEY, kind, tenant, role, key_id,"
            " created_unix_s, bytes, body)"
        )
        self._connection.execute("CREATE TABLE kept_contents (id, at, data, PRIMARY KEY (id, at))")
        self.breaks = False

    async def keep(self, statements: Statements) -> None:
        for sql, row in statements:
            self._connection.execute(sql, row)
        if self.breaks:
            raise Unreached("it broke as it committed")

    async def rows(self, sql: str, *values: str | int) -> list[Any]:
        return self._connection.execute(sql, values).fetchall()


@pytest.fixture
def database() -> Database:
    return Database()


async def opened(tmp_path: Path, database: Database) -> SharedFiles:
    act_as(OWNER)
    files = SharedFiles(tmp_path, database)
    await files.begin()
    return files


def kept(id_: str) -> KeptFile:
    return KeptFile(
        id=id_, bytes=9, created_at=1, expires_at=9, filename=f"{id_}.jsonl", purpose="batch"
    )


BATCH = KeptBatch(
    id="batch_b",
    endpoint="/v1/completions",
    input_file_id="file-in",
    completion_window="24h",
    output_file_id="file-out",
    error_file_id="file-err",
    created_at=2,
    expires_at=9,
)


async def test_the_next_controller_has_the_index_the_contents_and_whole_lines_of_answers(
    tmp_path: Path, database: Database
) -> None:
    files = await opened(tmp_path / "one", database)
    files.path("file-in").write_bytes(FIRST)
    files.add(kept("file-in"), OWNER)
    files.add(BATCH, OWNER)
    answers = files.path("file-out")
    answers.write_bytes(b"first\n" + LONG + b"torn")
    await files.saved()
    with answers.open("ab") as file:
        file.write(b", and whole\nto")
    files.add(kept("file-gone"), OWNER)
    await files.saved()
    files.forget("file-gone")
    await files.end()
    files.close()

    other = await opened(tmp_path / "two", database)
    (found,) = other.open_batches()
    assert found == (BATCH, OWNER)
    page = other.page(KeptFile, after="", limit=9)
    assert [file.id for file in page.data] == ["file-in"]
    assert (await other.fetched("file-in")).read_bytes() == FIRST
    came = await other.fetched("file-out")
    assert came.read_bytes() == b"first\n" + LONG + b"torn, and whole\n"
    assert not (await other.fetched("file-err")).exists()
    with came.open("ab") as file:
        file.write(b"last\n")
    other.update(BATCH.model_copy(update={"output_file_id": None}))
    await other.end()
    other.close()

    third = await opened(tmp_path / "one", database)
    assert third.open_batches()[0][0].output_file_id is None
    third.path("file-new").write_bytes(FIRST)
    await third.saved()
    await third.drop_left()
    rows = await database.rows("SELECT id FROM kept_contents WHERE id = 'file-out'")
    assert not rows, "no batch names it any more"
    assert await database.rows("SELECT id FROM kept_contents WHERE id = 'file-new'"), "it comes yet"
    third.close()


async def test_what_was_written_as_the_connection_broke_is_there_once(
    tmp_path: Path, database: Database
) -> None:
    files = await opened(tmp_path / "one", database)
    files.path("file-in").write_bytes(LONG)
    files.add(kept("file-in"), OWNER)
    database.breaks = True
    for _ in range(4):
        with pytest.raises(Unreached):
            await files.saved()
    database.breaks = False
    await files.saved()
    files.close()
    other = await opened(tmp_path / "two", database)
    assert (await other.fetched("file-in")).read_bytes() == LONG
    assert len(other.page(KeptFile, after="", limit=9).data) == 1
    other.forget("file-in")
    await other.saved()
    assert not await database.rows("SELECT id FROM kept_contents UNION SELECT id FROM kept_files")
    other.close()


async def test_a_batch_of_which_the_database_is_not_told_does_not_begin(
    tmp_path: Path, database: Database
) -> None:
    files = await opened(tmp_path, database)
    files.path("file-in").write_bytes(FIRST)
    files.add(kept("file-in"), OWNER)
    await files.saved()
    batches, database.breaks = Batches(files), True
    body = {"input_file_id": "file-in", "endpoint": "/v1/completions", "completion_window": "24h"}
    with pytest.raises(Unreached):
        await batches.create(BatchBody.model_validate(body))
    assert batches.open() == []
    database.breaks = False
    await files.saved()
    assert await database.rows("SELECT id FROM kept_files") == [("file-in",)]
    files.close()
