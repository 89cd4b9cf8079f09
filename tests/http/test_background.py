"""Responses in the background: how much of them is kept, and whose goes first."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from mesh.domain.access import Caller, Role, TenantName
from mesh.domain.errors import Refused
from mesh.http.background import RUNS_BYTES_MAX, RUNS_MAX, TENANT_SHARE_MAX, Run, Runs
from mesh.wire import access

MIB = 1 << 20
SHARE_BYTES = int(RUNS_BYTES_MAX * TENANT_SHARE_MAX)


@pytest.fixture
def runs() -> Iterator[Runs]:
    token = access._CALLER.set(Caller())
    yield Runs()
    access._CALLER.reset(token)


def of(tenant: str) -> None:
    access._CALLER.set(Caller(role=Role.TENANT, tenant=TenantName(tenant)))


class Made:
    """An application that says so many bytes, and ends when it is let."""

    def __init__(self, says_bytes: int = 0, *, ends: bool = True) -> None:
        self.says_bytes = says_bytes
        self.may_end = asyncio.Event()
        if ends:
            self.may_end.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if self.says_bytes:
            await send({"type": "http.response.body", "body": b"x" * self.says_bytes})
        await self.may_end.wait()


async def begun(runs: Runs, id_: str, made: Made, *, given_bytes: int = 0) -> Run:
    kept: list[dict[str, Any]] = []
    run = Run(response_queued={"id": id_}, keep=kept.append, given_bytes=given_bytes)
    runs.begin(id_, run, made, {}, b"raw")
    for _ in range(3):
        await asyncio.sleep(0)
    return run


async def test_what_a_call_was_given_counts_until_it_has_ended(runs: Runs) -> None:
    slow = Made(ends=False)
    await begun(runs, "1", slow, given_bytes=RUNS_BYTES_MAX - 10)
    with pytest.raises(Refused, match="the limits are"):
        await begun(runs, "2", Made(), given_bytes=11)
    slow.may_end.set()
    first = runs.get("1")
    assert first is not None
    assert first.task is not None
    await first.task
    for n in range(RUNS_MAX):
        ended = await begun(runs, f"further-{n}", Made(100), given_bytes=8 * MIB)
        assert (ended.keep, ended.given_bytes, ended.response_queued) == (None, 0, {})


async def test_a_tenant_leaves_a_share_to_others(runs: Runs) -> None:
    of("a")
    for n in range(int(RUNS_MAX * TENANT_SHARE_MAX)):
        await begun(runs, f"{n}", Made(ends=False))
    with pytest.raises(Refused, match="'a'"):
        await begun(runs, "more", Made())
    of("b")
    with pytest.raises(Refused, match="'b'"):
        await begun(runs, "large", Made(), given_bytes=SHARE_BYTES + 1)
    assert await begun(runs, "first", Made(ends=False))
    of("a")
    for n in range(int(RUNS_MAX * TENANT_SHARE_MAX)):
        runs.forget(f"{n}")
    await begun(runs, "again", Made())


async def test_a_flood_of_one_tenant_forgets_its_own_events_alone(runs: Runs) -> None:
    of("b")
    await begun(runs, "mine", Made(100))
    of("a")
    for n in range(2 * RUNS_MAX):
        await begun(runs, f"{n}", Made(100))
    assert runs.get("0") is None
    assert runs.get(f"{2 * RUNS_MAX - 1}")
    of("b")
    assert runs.get("mine")


async def test_beyond_the_bytes_the_largest_call_that_runs_fails(runs: Runs) -> None:
    small = await begun(runs, "small", Made(MIB, ends=False))
    large = await begun(runs, "large", Made(ends=False), given_bytes=RUNS_BYTES_MAX - 2 * MIB)
    await begun(runs, "last", Made(2 * MIB, ends=False))
    assert (large.ended, small.ended) == (True, False)
    assert b"take more than" in large.events[-1]
