"""`mesh state`: the registry of a cell whose controllers are stopped, from one place to another."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import click

from mesh.cli import output
from mesh.controller.registry import TABLES, Database, SqliteRegistry, Statements
from mesh.domain.errors import AlreadyExists, InvalidInput, Unavailable

LEAD_S_MAX = 5.0
"""A lease that nobody renews has run out by then."""


@click.group()
def state() -> None:
    """Copy the registry of a cell. A place is a state folder (--home) or postgresql://…."""


@state.command()
@click.argument("source", metavar="FROM")
@click.argument("to", metavar="TO")
def copy(source: str, to: str) -> None:
    """Copy all that a registry holds into an empty one. No controller may run on either."""
    output.text(asyncio.run(copied(source, to)))


async def copied(source: str, to: str) -> str:
    """What was copied, in words. Raises InvalidInput, StorageError, Unavailable where a controller
    runs on either, and AlreadyExists where `to` holds anything.
    """
    if "://" not in source and not (Path(source) / "controller").is_dir():
        raise InvalidInput(
            f"{source} is no state folder: it has no controller/", hint="give what --home was"
        )
    async with _opened(source) as held, _opened(to) as empty:
        for table in TABLES:
            if there := empty.tables.count(table):
                raise AlreadyExists(
                    f"the registry at {empty.place} holds {there} {table}",
                    hint="copy into an empty one: another folder, database or cell",
                )
        counts = {table: held.tables.count(table) for table in TABLES}
        await empty.commit(await asyncio.to_thread(_written, held))  # leases are renewed meanwhile
        told = ", ".join(f"{count} {table}" for table, count in counts.items())
        return f"copied      {told}, from {held.place} to {empty.place}"


def _written(held: Database) -> Statements:
    """It may be written twice."""
    made = []
    for table in TABLES:
        columns, rows = held.tables.rows(table)
        marks = ", ".join("?" * len(columns))
        sql = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks}) ON CONFLICT DO NOTHING"
        made += [(sql, row) for row in rows]
    # It stays the same cell; ids carry the epoch, and nodes may still have some of the last one.
    epochs = (held.epoch, held.epoch)
    same = ("UPDATE starts SET cell = ?", (held.cell,))
    return (*made, same, ("UPDATE starts SET epoch = ? WHERE epoch < ?", epochs))


@asynccontextmanager
async def _opened(place: str) -> AsyncIterator[Database]:
    if "://" not in place:
        database: Database = SqliteRegistry(Path(place) / "controller")
    else:
        from mesh.controller.postgres import PostgresRegistry  # with asyncpg, which few have

        opened = PostgresRegistry(place, holder="mesh state copy")
        await opened.open()
        database = opened
    try:
        await asyncio.wait(
            [
                asyncio.create_task(database.leads.wait()),
                asyncio.create_task(database.deposed.wait()),
            ],
            timeout=LEAD_S_MAX,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if database.failure is not None:
            raise database.failure
        if not database.leads.is_set():
            raise Unavailable(
                f"{database.leader() or 'another controller'} leads the cell at {database.place}",
                hint="stop its controllers first",
            )
        yield database
    finally:
        await database.end()
