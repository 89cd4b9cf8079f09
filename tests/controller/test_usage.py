"""Metering: each request on the books of its hour and deployment, once, whatever the disk does."""

import sqlite3
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from mesh.controller import usage as usages
from mesh.controller.keys import KeyBook
from mesh.controller.usage import FILE_NAME, RETRY_S, UsageBook, UsageMeter
from mesh.domain.access import NOBODY, Role, TenantName
from mesh.domain.actions import DeliverTokens, RefuseRequest
from mesh.domain.energy import Energy, EnergySource
from mesh.domain.errors import InvalidInput, StorageError
from mesh.domain.events import CancelRequested, InvokeRequested, NodeReported
from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.messages import Heartbeat, NodeReport, TokensReport
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.request import Request, RequestTokens
from mesh.domain.usage import HOUR_S, Usage, UsageBy, summed

START_UNIX_S = 100 * HOUR_S
COLUMNS = [one.name for one in fields(Usage)]
CHAT = DeploymentName("chat")


@pytest.fixture
def book(tmp_path: Path) -> Iterator[UsageBook]:
    opened = UsageBook(tmp_path)
    yield opened
    opened.close()


class Metered:
    def __init__(self, book: UsageBook) -> None:
        self.unix_s = float(START_UNIX_S)
        self.meter = UsageMeter(book, lambda name: name == CHAT, lambda: self.unix_s)

    def call(self, request_id: str, name: str = CHAT, prompt_tokens: int = 3) -> None:
        request = Request(
            request_id=RequestId(request_id),
            deployment=DeploymentName(name),
            prompt_tokens=(1,) * prompt_tokens,
        )
        self.meter.record(0.0, InvokeRequested(request=request), ())

    def tokens(self, request_id: str, count: int, finish: FinishReason | None = None) -> None:
        outputs = RequestTokens(
            request_id=RequestId(request_id),
            attempt=1,
            first_index=0,
            token_ids=(1,) * count,
            finish=finish,
        )
        self.meter.record(0.0, None, (DeliverTokens(outputs=outputs),))

    def refuse(self, request_id: str) -> None:
        refusal = RefuseRequest(
            request_id=RequestId(request_id), reason=RefusalReason.MEMORY_FULL, message="no"
        )
        self.meter.record(0.0, None, (refusal,))


def used(hour: int, name: str, requests: int, prompt: int, output: int, refused: int) -> Usage:
    return Usage(
        hour_unix_s=START_UNIX_S + hour * HOUR_S,
        deployment=DeploymentName(name),
        requests=requests,
        prompt_tokens=prompt,
        output_tokens=output,
        refused=refused,
    )


def test_requests_are_on_the_books_of_the_hour_in_which_they_end(book: UsageBook) -> None:
    metered = Metered(book)
    metered.call("r1")
    metered.call("r2", prompt_tokens=10)
    metered.tokens("r1", 2)
    metered.tokens("r1", 1, FinishReason.STOP)
    metered.unix_s += HOUR_S
    metered.tokens("r2", 5, FinishReason.LENGTH)
    first, second = used(0, CHAT, 1, 3, 3, 0), used(1, CHAT, 1, 10, 5, 0)
    assert book.since(0.0) == (first, second)
    assert book.since(START_UNIX_S + HOUR_S) == (second,), "an hour that has ended is left out"
    assert book.since(START_UNIX_S + HOUR_S - 1) == (first, second)


def test_what_got_no_token_is_not_charged_for_its_prompt(book: UsageBook) -> None:
    metered = Metered(book)
    for request_id in ("refused", "lost", "left"):
        metered.call(request_id)
    metered.refuse("refused")
    metered.tokens("lost", 2)
    metered.refuse("lost")
    metered.meter.record(0.0, CancelRequested(request_id=RequestId("left")), ())
    metered.tokens("left", 4, FinishReason.STOP)
    assert book.since(0.0) == (used(0, CHAT, 2, 3, 2, 1),)


def test_names_that_are_not_deployed_are_counted_together(book: UsageBook) -> None:
    metered = Metered(book)
    for request_id, name in (("r1", "a"), ("r2", "b")):
        metered.call(request_id, name)
        metered.refuse(request_id)
    assert book.since(0.0) == (used(0, "", 0, 0, 0, 2),)


def test_joules_go_to_those_whose_iterations_they_were_whatever_has_ended(book: UsageBook) -> None:
    metered = Metered(book)

    def report(said: NodeReport) -> None:
        metered.meter.record(0.0, NodeReported(link_id=1, report=said), ())

    def heartbeat(busy_j: float | None) -> None:
        energy = Energy(source=EnergySource.WATTS, busy_j=busy_j, busy_s=5.0)
        report(Heartbeat(rss_bytes=1, energy=energy))

    metered.call("r1")
    metered.call("r2", "unknown")
    one = RequestTokens(request_id=RequestId("r1"), attempt=1, first_index=0, token_ids=(1,))
    left, busy_s = ((RequestId("r2"), 7), (RequestId("gone"), 7)), (3.0, 1.0, 1.0)
    said = TokensReport(
        instance_id=InstanceId("i"), outputs=(one,), prefill_left=left, busy_s=busy_s
    )
    report(said)
    metered.tokens("r1", 1, FinishReason.STOP)
    assert [usage.energy_j for usage in book.since(0.0)] == [None], "nobody has told it yet"
    heartbeat(50.0)
    assert {u.deployment: u.energy_j for u in book.since(0.0)} == {CHAT: 30.0, "": 10.0}
    report(said)
    heartbeat(None)
    metered.call("r1")
    report(said)
    heartbeat(50.0)
    used_j = {u.deployment: u.energy_j for u in book.since(0.0)}
    assert used_j == {CHAT: 60.0, "": 20.0}, "what is not known adds nothing"


@pytest.mark.parametrize("schema", [1, 2, 3])
def test_a_file_of_before_is_read_and_has_no_joules(tmp_path: Path, schema: int) -> None:
    with closing(UsageBook(tmp_path)) as book:
        book.add([used(0, CHAT, 1, 2, 3, 4)])
    lacking = {1: ("tenant", "key_id", "slo_class"), 2: ("slo_class",), 3: ()}[schema]
    columns = [name for name in COLUMNS if name not in (*lacking, "energy_j")]
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as plain:
        plain.execute("ALTER TABLE usage RENAME TO new")
        plain.execute(f"CREATE TABLE usage AS SELECT {', '.join(columns)} FROM new")
        plain.execute("DROP TABLE new")
        plain.execute(f"PRAGMA user_version = {schema}")
        plain.commit()
    with closing(UsageBook(tmp_path)) as book:
        assert book.since(0.0) == (used(0, CHAT, 1, 2, 3, 4),)


class FullDisk(UsageBook):
    full = True

    def add(self, usages: Sequence[Usage]) -> None:
        if self.full:
            raise StorageError("no space left")
        super().add(usages)


async def test_what_the_disk_does_not_take_is_kept_and_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = FullDisk(tmp_path)
    metered = Metered(book)
    for n in range(3):
        metered.call(f"r{n}")
        metered.tokens(f"r{n}", 2, FinishReason.STOP)
    wanted = (used(0, CHAT, 3, 9, 6, 0),)
    assert (metered.meter.since(0.0), book.since(0.0)) == (wanted, ())
    assert metered.meter.since(0.0, UsageBy.HOUR, TenantName("a")) == ()
    with monkeypatch.context() as patch:
        patch.setattr(usages, "ROWS_MAX", 0)
        with pytest.raises(InvalidInput, match="more than 0 lines"):
            metered.meter.since(0.0)
    book.full = False
    metered.unix_s += RETRY_S
    metered.meter.record(0.0, None, ())
    assert metered.meter.since(0.0) == book.since(0.0) == wanted


def test_old_hours_go_and_a_file_that_is_none_is_an_error(tmp_path: Path, book: UsageBook) -> None:
    book.add([used(0, CHAT, 1, 1, 1, 0), used(5, CHAT, 1, 1, 1, 0)])
    book.drop_before(START_UNIX_S + HOUR_S)
    assert [one.hour_unix_s for one in book.since(0.0)] == [START_UNIX_S + 5 * HOUR_S]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / FILE_NAME).write_bytes(b"no database" * 1000)
    with pytest.raises(StorageError, match="not a database"):
        UsageBook(tmp_path / "other")


@pytest.mark.parametrize(
    ("kind", "fill"),
    [
        (UsageBook, lambda book: book.add([used(n, CHAT, n, n, n, 0) for n in range(2000)])),
        (KeyBook, lambda book: [book.create(Role.ADMIN, NOBODY) for _ in range(100)]),
    ],
)
def test_damage_inside_a_file_and_a_newer_schema_are_found_at_the_start(
    tmp_path: Path, kind: Any, fill: Any
) -> None:
    """As in the registry: a controller that fails later would be started again and again."""
    with closing(kind(tmp_path)) as whole:
        fill(whole)
        path = whole.path
    with closing(kind(tmp_path)):
        pass  # as every start opens it
    kept = path.read_bytes()
    raw = bytearray(kept)
    for page in range(4096, len(raw), 4096):
        raw[page : page + 64] = bytes(64)
    path.write_bytes(raw)
    with pytest.raises(StorageError, match=r"corrupt|malformed") as damaged:
        kind(tmp_path)
    assert str(path) in damaged.value.message
    path.write_bytes(kept)
    with closing(sqlite3.connect(path)) as plain:
        plain.execute("PRAGMA user_version = 99")
    with pytest.raises(StorageError, match="has schema 99, this mesh knows") as newer:
        kind(tmp_path)
    assert "newer mesh" in newer.value.hint


def test_usages_are_summed_over_hours_or_deployments() -> None:
    usages = [used(0, "b", 1, 2, 3, 0), used(0, "a", 1, 1, 1, 1), used(1, "a", 2, 2, 2, 0)]
    of_all = summed(usages, UsageBy.DEPLOYMENT)
    assert [(u.hour_unix_s, u.deployment, u.requests) for u in of_all] == [(0, "a", 3), (0, "b", 1)]
    by_hour = summed(usages, UsageBy.HOUR)
    assert [(u.deployment, u.requests, u.refused) for u in by_hour] == [("", 2, 1), ("", 2, 0)]
    assert len(summed(usages, UsageBy.BOTH)) == 3


def test_the_file_sums_as_lists_are_summed_and_a_question_is_bounded(
    book: UsageBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any thread, while the controller's loop writes."""
    ones = [
        replace(used(hour, name, 1, hour, 2, 3), tenant=tenant, key_id=tenant + "1", slo_class=slo)
        for hour in range(3)
        for name in ("a", "b")
        for tenant in ("", "t")
        for slo in ("", "tight")
    ]
    book.add([replace(one, energy_j=1.5 if one.deployment == "a" else None) for one in ones])
    whole = book.since(0.0)
    assert len(whole) == len(ones)
    with ThreadPoolExecutor(1) as other:
        for by in (None, *UsageBy):
            for tenant in (None, TenantName("t")):
                mine = [one for one in whole if tenant in (None, one.tenant)]
                assert other.submit(book.since, 0.0, by, tenant).result() == summed(mine, by)
    monkeypatch.setattr(usages, "ROWS_MAX", 23)
    with pytest.raises(InvalidInput, match="more than 23 lines"):
        book.since(0.0)
    assert len(book.since(0.0, UsageBy.BOTH)) == 6
