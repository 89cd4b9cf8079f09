"""Two controllers with one state: what the one that stands by answers, and how it leads."""

import asyncio
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mesh.cli.verbs.state import copied
from mesh.controller.registry import Tables
from mesh.controller.server import HELD_EACH_TURN, Controller, ControllerConfig, Health, serve
from mesh.domain.access import Caller, Role
from mesh.domain.errors import Unavailable
from mesh.domain.ids import CellName, ModelId
from mesh.domain.invocation import Finished, Invocation, TextPrompt
from mesh.domain.text import TextAssets
from mesh.front.cells import CellLink
from mesh.runtime.clock import LoopClock
from mesh.runtime.lease import LEASE_S
from mesh.runtime.link_life import LOOK_S, NO_EPOCH, CellEpoch
from mesh.wire.access import Gate
from mesh.wire.channel import dial
from mesh.wire.client import MeshClient
from mesh.wire.connection import Connection, shown
from mesh.wire.credentials import Credentials
from mesh.wire.leader import WAITS, Look, look
from mesh.wire.resuming import LeaderWatch, ResumedAnswer
from tests.cluster.conftest import LEAD_S_MAX, leading, saying, until, within
from tests.controller.live import HELLO, PATIENT, SPEC, FakeNode, LiveCell, live_cell
from tests.controller.test_access import made_keys, showing
from tests.e2e.live_cell import free_port
from tests.support.postgres_server import PostgresServer
from tests.wire.test_link import Ends

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def http_status(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=LEAD_S_MAX) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


async def test_one_that_stands_by_says_who_leads_and_leads_with_all_that_was_deployed(
    server: PostgresServer, cell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its health does not say that it leads before nodes may join it, and then at once to those who
    wait for that.
    """
    state, at, http = server.url(cell), free_address(), free_address()
    stop, ready, starts, late = (asyncio.Event() for _ in range(4))
    config = ControllerConfig(
        listen=at, http=http, home=tmp_path / "two", state=state, limits=PATIENT
    )
    async with live_cell(tmp_path / "one", state=state) as first:
        await first.deployed()
        second = asyncio.create_task(serve(config, lambda *_: ready.set(), stop))
        with MeshClient(at) as client:

            def refused() -> bool:
                with pytest.raises(Unavailable) as told:
                    client.status()
                return told.value.hint == f"ask {first.address}"

            async with asyncio.timeout(LEAD_S_MAX):
                while not await asyncio.to_thread(refused):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            status, body = await asyncio.to_thread(http_status, f"http://{http}/v1/models")
            assert status == 503
            assert f"{first.address} leads" in body
            assert (await asyncio.to_thread(http_status, f"http://{http}/healthz"))[0] == 200
        assert not ready.is_set()
        node = FakeNode(at)
        with pytest.raises(Exception, match="this controller stands by"):
            await node.join()
        await node.leave()
        start_http = Controller._start_http

        async def start_http_late(self: Controller, http: Any) -> None:
            starts.set()
            await late.wait()
            await start_http(self, http)

        monkeypatch.setattr(Controller, "_start_http", start_http_late)
        for patient in ("mesh.controller.server.LOOK_S", "mesh.wire.leader.LOOK_S_MAX"):
            monkeypatch.setattr(patient, LEAD_S_MAX)
    two = LiveCell(at, stop, second, http)
    try:
        async with asyncio.timeout(LEAD_S_MAX), dial(at) as channel:
            await starts.wait()
            waits = asyncio.create_task(look(channel, WAITS))
            assert await look(channel) is Look.FOLLOWS
            late.set()
            assert await waits is Look.LEADS
            await two.node()
            await ready.wait()
        assert [one.spec.name for one in await two.ask(two.client.list)] == [SPEC.name]
        assert len(await two.answer()) > 0
        status, body = await asyncio.to_thread(http_status, f"http://{http}/v1/models")
        assert (status, SPEC.name in body) == (200, True)
    finally:
        for node in two.nodes:
            await node.leave()
        two.client.close()
        late.set()
        stop.set()
        await second


async def test_a_leaders_death_is_seen_by_its_sessions_and_not_by_its_lease(
    server: PostgresServer, cell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease that the one that stands by would wait for is longer than the test."""
    monkeypatch.setattr("mesh.runtime.lease.LEASE_S", 4 * LEAD_S_MAX)
    state, at, http = server.url(cell), free_address(), free_address()
    first = free_address()
    arguments = ("--state", state, "--listen", first, "--home", str(tmp_path / "one"))
    command = (sys.executable, "-m", "mesh", "controller", *arguments)
    leader = await asyncio.create_subprocess_exec(*command)
    stop, ready = asyncio.Event(), asyncio.Event()
    config = ControllerConfig(listen=at, http=http, home=tmp_path / "two", state=state)
    second = None
    try:
        with MeshClient(first) as client:
            async with asyncio.timeout(LEAD_S_MAX):
                while not await asyncio.to_thread(answers, client):
                    if leader.returncode is not None:  # a busy database may take too long for it
                        leader = await asyncio.create_subprocess_exec(*command)
                    await asyncio.sleep(0.05)
        second = asyncio.create_task(serve(config, lambda *_: ready.set(), stop))
        async with asyncio.timeout(LEAD_S_MAX):
            while True:
                with suppress(urllib.error.URLError):
                    status, body = await asyncio.to_thread(http_status, f"http://{http}/readyz")
                    if first in body:
                        break
                await asyncio.sleep(0.05)
        assert status == 503
        async with asyncio.timeout(LEAD_S_MAX):
            while not await waits_for_a_lock(server):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        leader.kill()
        async with asyncio.timeout(LEAD_S_MAX):
            await ready.wait()
        assert (await asyncio.to_thread(http_status, f"http://{http}/healthz"))[0] == 200
    finally:
        with suppress(ProcessLookupError):
            leader.kill()
        await leader.wait()
        stop.set()
        if second is not None:
            await second


async def waits_for_a_lock(server: PostgresServer) -> bool:
    """Whether somebody waits for an advisory lock, as one that stands by does for the leader's."""
    import asyncpg

    connection = await asyncpg.connect(server.url().partition("?")[0])
    try:
        waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        return bool(await connection.fetchval(waiting))
    finally:
        await connection.close()


def answers(client: MeshClient) -> bool:
    try:
        client.status()
    except Unavailable:
        return False
    return True


async def test_one_that_steps_down_stands_by_and_the_other_leads(
    server: PostgresServer, cell: str, tmp_path: Path
) -> None:
    state, at = server.url(cell), free_address()
    stop, ready = asyncio.Event(), asyncio.Event()
    config = ControllerConfig(listen=at, home=tmp_path / "two", state=state, limits=PATIENT)
    async with live_cell(tmp_path / "one", state=state) as first:
        with pytest.raises(Unavailable, match="no controller stands by"):
            await first.ask(first.client.step_down)
        await first.deployed()
        second = asyncio.create_task(serve(config, lambda *_: ready.set(), stop))
        async with asyncio.timeout(LEAD_S_MAX):
            while True:
                with suppress(Unavailable):
                    await first.ask(first.client.step_down)
                    break
                await asyncio.sleep(0.05)
            await ready.wait()
            assert await first.serving, "it is to stand by from now on"
        with MeshClient(at) as client:
            assert [one.spec.name for one in await asyncio.to_thread(client.list)] == [SPEC.name]
        stop.set()
        assert not await second


async def test_a_higher_epoch_ends_a_leader_that_cannot_renew_where_a_node_shows_it(
    server: PostgresServer, cell: str, tmp_path: Path
) -> None:
    """And no epoch of another cell, whose node was given the wrong addresses."""
    keys, led_on = made_keys(tmp_path), []

    async def checked(at: str, key: str, obeyed: CellEpoch) -> int:
        """The status that a caller with this key is told who has obeyed that one, as it says."""
        async with dial(at) as channel:
            check: Any = health_pb2_grpc.HealthStub(channel).Check
            told = (*Credentials(key=key).metadata, *shown(obeyed))
            answer = await check(health_pb2.HealthCheckRequest(), metadata=told)
            return int(answer.status)

    async def told() -> None:
        async with AsyncExitStack() as stack:
            stack.callback(keys.book.close)
            one = await stack.enter_async_context(
                live_cell(tmp_path, state=server.url(cell), keys=True)
            )
            with showing(keys.node):
                node = await one.node()
                of_another, of_none = CellEpoch(999999999, "other-1"), CellEpoch(999999999)
                later = node.epoch._replace(number=999999999)
                for obeyed, why in (
                    (of_another, "this node is of the cell other-1, and that controller of cell-"),
                    (of_none, f"later than epoch {node.epoch.number}: 999999999"),
                ):
                    assert await checked(one.address, keys.node, obeyed) == NOT_SERVING
                    refused = FakeNode(one.address, metadata=shown(obeyed))
                    with pytest.raises(Exception, match=why):
                        await refused.join()
                    await refused.leave()
            await asyncio.sleep(2 * LEASE_S)
            assert await checked(one.address, keys.node, node.epoch) == SERVING
            led_on.append(not one.serving.done())
            server.stop()
            stack.callback(server.start)
            await asyncio.sleep(2 * LEASE_S)
            for key in (keys.a, keys.revoked, "mesh_of_nobody", ""):
                assert await checked(one.address, key, later) == NOT_SERVING, "this caller's word"
            for obeyed in (of_another, of_none):
                assert await checked(one.address, keys.node, obeyed) == NOT_SERVING
            await asyncio.sleep(LEASE_S)
            led_on.append(not one.serving.done())
            await checked(one.address, keys.node, later)
            await until(one.serving.done)

    with pytest.raises(Unavailable, match="another controller leads the cell now"):
        await told()
    assert led_on == [True, True], "only where it could not renew, and for its own nodes alone"


async def test_a_node_follows_a_registry_that_is_copied_to_a_file_and_back_and_no_other(
    server: PostgresServer, cell: str, tmp_path: Path
) -> None:
    async def joined(home: str, epoch: CellEpoch, state: str | None = None) -> CellEpoch:
        """Whom a node obeys then, which has obeyed this one."""
        async with live_cell(tmp_path / home, state=state) as one:
            node = Connection(
                address=one.address, reports_max=1, welcome_s_max=LEAD_S_MAX, epoch=epoch
            )
            async with node:
                await node.open(HELLO)
            return node.epoch

    url, again = server.url(cell), server.url(f"{cell}-again")
    for _ in range(3):
        async with leading(url):
            pass
    first = await joined("one", NO_EPOCH, url)
    with pytest.raises(Unavailable, match=f"this node is of the cell {first.cell}, and"):
        await joined("new", first)
    await copied(url, str(tmp_path / "file"))
    second = await joined("file", first)
    await copied(str(tmp_path / "file"), again)
    third = await joined("two", second, again)
    assert first.number < second.number < third.number
    assert first.cell == second.cell == third.cell
    assert await joined("newer", NO_EPOCH) == NO_EPOCH, "whoever begins anew has these nodes, too"


@pytest.mark.parametrize("keys", [False, True])
async def test_a_look_waits_for_one_that_stands_by_to_lead_and_no_longer_than_it_may(
    keys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.wire.leader.LOOK_S_MAX", LEAD_S_MAX)
    gate = Gate(lambda _: Caller(role=Role.NODE)) if keys else None
    async with saying(gate) as one, dial(one.address) as channel:
        begun_s = time.monotonic()
        assert await look(channel, WAITS) is Look.FOLLOWS
        assert LOOK_S <= time.monotonic() - begun_s < LEAD_S_MAX
        monkeypatch.setattr("mesh.controller.server.LOOK_S", LEAD_S_MAX)
        waits = asyncio.create_task(look(channel, WAITS))
        await until(lambda: one.looks == 2)
        await asyncio.sleep(2 * LOOK_S)
        assert not waits.done()
        await one.say(leads=True)
        assert await waits is Look.LEADS


async def test_who_has_waited_is_not_answered_all_in_one_turn() -> None:
    class Looking:
        """One of many, as gRPC tells of it."""

        def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
            return (WAITS,)

        def time_remaining(self) -> float:
            return LEAD_S_MAX

    health, asked = Health(), health_pb2.HealthCheckRequest()
    looks = [asyncio.create_task(health.Check(asked, Looking())) for _ in range(4 * HELD_EACH_TURN)]
    await asyncio.sleep(0)
    health.lead()
    ended = [0]
    async with asyncio.timeout(LEAD_S_MAX):
        while ended[-1] < len(looks):
            await asyncio.sleep(0)
            ended.append(sum(one.done() for one in looks))
    assert max(b - a for a, b in pairwise(ended)) <= HELD_EACH_TURN
    assert not health._held


@asynccontextmanager
async def a_front_looks(both: list[str]) -> AsyncIterator[None]:
    link = CellLink(CellName("a"), both, LoopClock(asyncio.get_running_loop()), lambda _: None)
    watch = asyncio.create_task(link.watch())
    try:
        yield
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await link.close()


@asynccontextmanager
async def a_node_looks(both: list[str]) -> AsyncIterator[None]:
    ends = Ends(",".join(both))
    try:
        yield
    finally:
        await ends.stop()


@asynccontextmanager
async def a_client_looks(both: list[str]) -> AsyncIterator[None]:
    watch, answer = LeaderWatch(both), object.__new__(ResumedAnswer)
    with watch.watched(answer):
        yield


@pytest.mark.parametrize("who", [a_front_looks, a_node_looks, a_client_looks])
async def test_who_looks_for_the_leader_of_several_waits_for_the_next_one(who: Any) -> None:
    async with saying() as x, saying() as y:
        async with who([x.address, y.address]):
            await until(lambda: x.looks + y.looks > 0)
        assert x.waited + y.waited == x.looks + y.looks


async def test_one_that_stands_by_has_the_tokenizers_of_what_its_leader_deploys(
    server: PostgresServer, cell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each controller reads the texts of the model once, and this one before it leads."""
    state, at, read = server.url(cell), free_address(), []
    stop, ready, stands = (asyncio.Event() for _ in range(3))
    config = ControllerConfig(listen=at, home=tmp_path / "two", state=state, limits=PATIENT)
    text = Tables.text

    def noted(tables: Tables, model_id: ModelId) -> TextAssets | None:
        read.append(tables)
        return text(tables, model_id)

    monkeypatch.setattr(Tables, "text", noted)
    async with live_cell(tmp_path / "one", state=state) as first:
        second = asyncio.create_task(serve(config, lambda *_: ready.set(), stop, stands.set))
        await within(stands)
        await first.deployed()
        await until(lambda: len(read) == 2)
        assert read[0] is not read[1]
        assert not ready.is_set()
    await within(ready)
    two = LiveCell(at, stop, second, None)
    try:
        await two.node()
        asked = Invocation(deployment=SPEC.name, prompt=TextPrompt(text="hi"), max_tokens=3)
        *_, last = await two.answer(asked)
        assert isinstance(last, Finished)
        assert last.prompt_tokens == 2
        assert len(read) == 2
    finally:
        for node in two.nodes:
            await node.leave()
        two.client.close()
        stop.set()
        await second
