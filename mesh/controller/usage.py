"""Metering: what was used of each deployment in each hour, in a SQLite file beside the registry.

`UsageMeter` is a recorder of the controller's host, and so has written what a request used before
its client hears of its end: a controller that is killed has lost nothing that a client was told. It
does not wait for the disk: a power cut may cost the last seconds. While the disk takes nothing,
what is to be written is kept, a number an hour and deployment, and tried again.
"""

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields
from pathlib import Path

from mesh.core.controller.state.energy import EnergyBook
from mesh.domain.access import ANYONE, Caller, TenantName
from mesh.domain.actions import DeliverTokens, RefuseRequest
from mesh.domain.errors import InvalidInput, StorageError
from mesh.domain.events import (
    CancelRequested,
    InvokeRequested,
    NodeDisconnected,
    NodeReported,
)
from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.messages import Heartbeat, NodeReport, TokensReport
from mesh.domain.usage import HOUR_S, KEPT, PLACE, Usage, UsageBy, summed
from mesh.domain.values import dataclass, replace

FILE_NAME = "usage.sqlite3"
SCHEMA = 4
HOURS_KEPT = 24 * 400
"""Somewhat more than a year."""
ROWS_MAX = 100_000
"""At most so many lines are read for one question."""
RETRY_S = 10.0
"""After a write that failed."""
_COLUMNS = tuple(field.name for field in fields(Usage))
"""The columns of the table, in the order of a usage's fields."""
_TABLE = """
CREATE TABLE IF NOT EXISTS usage (
    hour_unix_s INTEGER NOT NULL,
    deployment TEXT NOT NULL,
    requests INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    refused INTEGER NOT NULL,
    tenant TEXT NOT NULL,
    key_id TEXT NOT NULL,
    slo_class TEXT NOT NULL,
    energy_j REAL,
    PRIMARY KEY (hour_unix_s, deployment, tenant, key_id, slo_class)
) STRICT, WITHOUT ROWID
"""
_NEW_COLUMNS = {1: "'', '', '', NULL", 2: "'', NULL", 3: "NULL"}
"""The columns that the table lacked, by schema, as they are filled in."""
_ADD = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    requests = requests + excluded.requests,
    prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    output_tokens = output_tokens + excluded.output_tokens,
    refused = refused + excluded.refused,
    energy_j = coalesce(energy_j + excluded.energy_j, energy_j, excluded.energy_j)
"""
log = logging.getLogger(__name__)


class UsageBook:
    """The file. Every method raises StorageError, and then nothing has changed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        with self._explained("open"):
            self._connection = sqlite3.connect(self.path, isolation_level=None, timeout=0.0)
        try:
            self._begin()
        except BaseException:
            self._connection.close()
            raise

    def _begin(self) -> None:
        with self._explained("open"):
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            (found,) = self._connection.execute("PRAGMA user_version").fetchone()
            if found > SCHEMA:
                raise StorageError(
                    f"the usage file {self.path} has schema {found}, this mesh knows {SCHEMA}",
                    hint="run the newer mesh that wrote it, or move it away",
                )
            self._connection.execute("BEGIN IMMEDIATE")
            if found in _NEW_COLUMNS:
                self._connection.execute("ALTER TABLE usage RENAME TO usage_before")
            self._connection.execute(_TABLE)
            if found in _NEW_COLUMNS:
                self._connection.execute(
                    f"INSERT INTO usage SELECT *, {_NEW_COLUMNS[found]} FROM usage_before"
                )
                self._connection.execute("DROP TABLE usage_before")
            self._connection.execute(f"PRAGMA user_version = {SCHEMA}")
            # By reading all of it, damage is found now and not later. SQLite's own checks take its
            # columns for nulls: it has no row ids.
            self._connection.execute("SELECT sum(requests) FROM usage").fetchone()
            self._connection.execute("COMMIT")

    def add(self, usages: Sequence[Usage]) -> None:
        """In one transaction."""
        with self._explained("write"):
            self._connection.execute("BEGIN")
            try:
                self._connection.executemany(_ADD, [_row(usage) for usage in usages])
                self._connection.execute("COMMIT")
            except BaseException:
                self._connection.rollback()
                raise

    def since(
        self, from_unix_s: float, by: UsageBy | None = None, tenant: TenantName | None = None
    ) -> tuple[Usage, ...]:
        """The usage of all tenants, or of one, in the hours that had not ended at `from_unix_s`.
        For any thread. Raises InvalidInput for more than ROWS_MAX lines.
        """
        kept = KEPT[by]
        nothing = {name: "0" if name == "hour_unix_s" else "''" for name in PLACE}
        columns = [name if name in kept else nothing.get(name, f"sum({name})") for name in _COLUMNS]
        query = (
            f"SELECT {', '.join(columns)} FROM usage WHERE hour_unix_s > ? AND tenant = "
            f"coalesce(?, tenant) GROUP BY {', '.join(kept)} ORDER BY {', '.join(kept)} LIMIT ?"
        )
        asked = (from_unix_s - HOUR_S, tenant, ROWS_MAX + 1)
        with (
            self._explained("read"),
            closing(sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro", uri=True)) as reader,
        ):
            rows = reader.execute(query, asked).fetchall()
        _check_few(rows)
        return tuple(Usage(**dict(zip(_COLUMNS, row, strict=True))) for row in rows)

    def drop_before(self, unix_s: float) -> None:
        with self._explained("write"):
            self._connection.execute("DELETE FROM usage WHERE hour_unix_s < ?", (unix_s,))

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _explained(self, verb: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StorageError(
                f"cannot {verb} the usage file {self.path}: {error}",
                hint="check its disk: space left, rights; "
                "a file that is no database may be moved away",
            ) from error


def _check_few(lines: Sequence[object]) -> None:
    """Raises InvalidInput."""
    if len(lines) > ROWS_MAX:
        raise InvalidInput(
            f"this usage has more than {ROWS_MAX} lines",
            hint="ask for a shorter time, or sum it by fewer of hour, deployment and class",
        )


def _row(usage: Usage) -> tuple[int | str | float | None, ...]:
    counts = usage.requests, usage.prompt_tokens, usage.output_tokens, usage.refused
    of = usage.tenant, usage.key_id, usage.slo_class
    return usage.hour_unix_s, usage.deployment, *counts, *of, usage.energy_j


@dataclass(slots=True, kw_only=True)
class _UnderWay:
    """A request that has not ended: whose it is, and what it has got that is charged."""

    of: Usage
    """With no counts."""
    prompt_tokens: int
    counted_from: int
    """Its first token that is charged: others were before."""
    output_tokens: int = 0


class UsageMeter:
    """`known`: whether the cell has a deployment; calls of other names are counted together, so
    that nobody fills the file with names. `unix_s` is the wall clock; `payer` knows who calls, and
    `charged` what was charged of a call that comes again: see `ClientStream`.
    """

    def __init__(
        self,
        book: UsageBook,
        known: Callable[[DeploymentName], bool],
        unix_s: Callable[[], float] = time.time,
        payer: Callable[[RequestId], Caller] = lambda _: ANYONE,
        charged: Callable[[RequestId], int | None] = lambda _: None,
    ) -> None:
        self._charged = charged
        self._book = book
        self._known = known
        self._unix_s = unix_s
        self._payer = payer
        self._under_way: dict[RequestId, _UnderWay] = {}
        self._unwritten: dict[tuple[int | str, ...], Usage] = {}
        self._retry_unix_s = 0.0
        self._energy: dict[int, EnergyBook[Usage]] = {}
        """By link, whom iterations were for: a usage that says nothing but that."""

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        if isinstance(event, InvokeRequested):
            request = event.request
            name = request.deployment if self._known(request.deployment) else DeploymentName("")
            payer = self._payer(request.request_id)
            charged = self._charged(request.request_id)
            self._under_way[request.request_id] = _UnderWay(
                of=Usage(
                    hour_unix_s=0,
                    deployment=name,
                    tenant=payer.tenant,
                    key_id=payer.key_id,
                    slo_class=event.slo.name if event.slo is not None and name else "",
                ),
                prompt_tokens=request.counted_prompt_tokens if charged is None else 0,
                counted_from=charged or 0,
            )
        elif isinstance(event, CancelRequested):
            for request_id in event.request_ids:
                self._end(request_id)
        elif isinstance(event, NodeReported):
            self._reported(event.link_id, event.report)
        elif isinstance(event, NodeDisconnected):
            self._energy.pop(event.link_id, None)
        for action in actions:
            if isinstance(action, DeliverTokens):
                self._deliver(action)
            elif isinstance(action, RefuseRequest):
                self._end(action.request_id, refused=True)
        if self._unwritten:
            self._write()

    def _reported(self, link_id: int, report: NodeReport) -> None:
        """What was computed for whom, and then what it took."""
        if isinstance(report, TokensReport) and report.busy_s:
            book = self._energy.setdefault(link_id, EnergyBook())
            names = [one.request_id for one in report.outputs]
            names += [request_id for request_id, _ in report.prefill_left]
            for request_id, seconds in zip(names, report.busy_s, strict=False):
                under_way = self._under_way.get(request_id)
                if under_way is not None:
                    book.note(under_way.of, seconds)
        elif isinstance(report, Heartbeat) and report.energy is not None:
            for usage, took in (
                self._energy.pop(link_id, EnergyBook()).settle(report.energy).items()
            ):
                self._add(replace(usage, hour_unix_s=self._hour_unix_s, energy_j=took.busy_j))

    def _deliver(self, action: DeliverTokens) -> None:
        outputs = action.outputs
        under_way = self._under_way.get(outputs.request_id)
        if under_way is None:
            return
        before = under_way.counted_from - outputs.first_index
        under_way.output_tokens += max(len(outputs.token_ids) - max(before, 0), 0)
        if outputs.finish is not None:
            self._end(outputs.request_id)

    def _end(self, request_id: RequestId, *, refused: bool = False) -> None:
        """Its hour is that of its end. One that never got a token is not charged for its prompt;
        one that is refused after tokens is charged for what it got.
        """
        under_way = self._under_way.pop(request_id, None)
        if under_way is None:
            return
        served = under_way.output_tokens > 0 or not refused
        used = replace(
            under_way.of,
            hour_unix_s=self._hour_unix_s,
            requests=int(served),
            prompt_tokens=under_way.prompt_tokens if under_way.output_tokens else 0,
            output_tokens=under_way.output_tokens,
            refused=int(refused and not served),
        )
        self._add(used)

    @property
    def _hour_unix_s(self) -> int:
        return int(self._unix_s()) // HOUR_S * HOUR_S

    def _add(self, used: Usage) -> None:
        before = self._unwritten.get(used.place)
        self._unwritten[used.place] = used if before is None else before.plus(used)

    def _write(self) -> None:
        now_unix_s = self._unix_s()
        if now_unix_s < self._retry_unix_s:
            return
        try:
            self._book.add(list(self._unwritten.values()))
        except StorageError as error:
            self._retry_unix_s = now_unix_s + RETRY_S
            log.warning("usage is kept in memory for now: %s", error.message)
        else:
            self._unwritten.clear()

    def since(
        self, from_unix_s: float, by: UsageBy | None = None, tenant: TenantName | None = None
    ) -> tuple[Usage, ...]:
        """What has been used since, what is not written yet included; what is written meanwhile
        may be missing. For any thread. Raises StorageError or InvalidInput.
        """
        found = self._book.since(from_unix_s, by, tenant)
        unwritten = list(self._unwritten.values())
        more = [u for u in unwritten if tenant is None or u.tenant == tenant]
        if more:
            found = summed((*found, *more), by)
            _check_few(found)
        return found
