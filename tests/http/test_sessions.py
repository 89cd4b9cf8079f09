"""Sessions of the page: a key is shown once, and neither another page nor another tenant gains."""

import asyncio
import json
import sqlite3
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
from starlette.requests import Request

from mesh.controller.keys import FILE_NAME
from mesh.controller.viewed import Viewed
from mesh.domain.access import Caller, Role, TenantName
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.ids import DeploymentName
from mesh.http import operating
from mesh.http.sessions import COOKIE, SESSION_S_MAX, SESSIONS_MAX, TOKEN_HEADER, Sessions
from mesh.report.cell_state import CellPicture
from mesh.wire.work_threads import WORK_THREADS
from tests.controller.live import WAIT_S_MAX, LiveCell
from tests.controller.test_access import SPEC, Keys, client_of, keyed

HELLO = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}


class Tab:
    """A browser's tab: it keeps its cookie, and sends the token of its session with each change."""

    def __init__(self, cell: LiveCell) -> None:
        self.url = f"http://{cell.http}"
        self.http = requests.Session()
        self.http.headers["Origin"] = self.url

    async def ask(self, verb: str, path: str, body: Any = None, **how: Any) -> requests.Response:
        return await asyncio.to_thread(
            self.http.request, verb, self.url + path, json=body, timeout=WAIT_S_MAX, **how
        )

    async def sign_in(self, key: str) -> requests.Response:
        told = await self.ask("POST", "/api/v1/session", {"key": key})
        if told.ok:
            self.http.headers[TOKEN_HEADER] = told.json()["csrf"]
        return told


@pytest.fixture
async def closed(tmp_path: Path) -> AsyncIterator[tuple[LiveCell, Keys]]:
    async with keyed(tmp_path) as made:
        yield made


async def test_a_key_begins_a_session_no_script_can_read(closed: tuple[LiveCell, Keys]) -> None:
    cell, keys = closed
    tab = Tab(cell)
    assert (await tab.ask("GET", "/api/v1/session")).json()["role"] is None
    assert (await tab.ask("GET", "/api/v1/cell")).status_code == 401
    for wrong, status in (
        ("mesh_of_nobody", 401),
        (keys.revoked, 401),
        (keys.node, 403),
        ("", 400),
    ):
        assert (await tab.sign_in(wrong)).status_code == status
        assert not tab.http.cookies
    told = await tab.sign_in(keys.a)
    assert (told.json()["role"], told.json()["tenant"]) == ("tenant", "a")
    kept = told.headers["set-cookie"].lower()
    assert all(part in kept for part in ("httponly", "samesite=strict", "max-age=43200", "path=/"))
    assert keys.a not in told.text + kept
    assert (await tab.ask("GET", "/api/v1/cell")).status_code == 200
    assert (await tab.ask("GET", "/metrics")).status_code == 403, "a tenant is no operator"
    assert (await tab.ask("DELETE", "/api/v1/session")).json()["role"] is None
    assert (await tab.ask("GET", "/api/v1/cell")).status_code == 401


async def test_the_page_prepares_a_picture_for_those_who_may_view_and_no_other(
    closed: tuple[LiveCell, Keys], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, keys = closed
    prepared: list[Caller] = []
    pictures = Viewed.pictures

    async def noted(self: Viewed, callers: Sequence[Caller]) -> list[CellPicture]:
        prepared.extend(callers)
        return await pictures(self, callers)

    monkeypatch.setattr(Viewed, "pictures", noted)
    tab, html = Tab(cell), {"Accept": "text/html"}
    for key in ({}, {"Authorization": f"Bearer {keys.revoked}"}):
        assert (await tab.ask("GET", "/", headers={**html, **key})).status_code == 200
    await tab.sign_in(keys.a)
    await tab.ask("GET", "/", headers={"Accept": "*/*"})
    await tab.ask("GET", "/api/v1/session")
    assert not prepared
    await tab.ask("GET", "/", headers=html)
    await tab.ask("GET", "/api/v1/session")
    assert prepared == [Caller(role=Role.TENANT, tenant=TenantName("a"))]


async def test_a_change_needs_the_token_and_this_origin(closed: tuple[LiveCell, Keys]) -> None:
    cell, keys = closed
    await cell.ask(client_of(cell, keys.a).deploy, SPEC)
    tab = Tab(cell)
    await tab.sign_in(keys.a)
    load = "/api/v1/deployments/chat/load"
    assert (await tab.ask("POST", load, {})).status_code == 200
    assert (await tab.ask("POST", "/v1/chat/completions", HELLO)).status_code == 200
    for headers in ({TOKEN_HEADER: ""}, {TOKEN_HEADER: "é"}, {"Origin": "http://evil.example"}):
        given = {name: value.encode() for name, value in headers.items()}
        for path, body in ((load, {}), ("/v1/chat/completions", HELLO)):
            assert (await tab.ask("POST", path, body, headers=given)).status_code == 403, headers
    guessed = {"Cookie": f"{COOKIE}_{str(cell.http).rpartition(':')[2]}=guess"}
    assert (await Tab(cell).ask("GET", "/api/v1/cell", headers=guessed)).status_code == 401


async def test_cells_on_one_host_leave_each_other_signed_in(
    closed: tuple[LiveCell, Keys], tmp_path: Path
) -> None:
    cell, keys = closed
    tab = Tab(cell)
    await tab.sign_in(keys.a)
    async with keyed(tmp_path / "other") as (other, others):
        beside = Tab(other)
        beside.http.cookies = tab.http.cookies  # of one browser, which knows no ports of cookies
        await beside.sign_in(others.b)
        for one, tenant in ((tab, "a"), (beside, "b")):
            assert (await one.ask("GET", "/api/v1/session")).json()["tenant"] == tenant
        await beside.ask("DELETE", "/api/v1/session")
        assert (await tab.ask("GET", "/api/v1/session")).json()["tenant"] == "a"


async def test_a_tenant_sees_its_own_and_an_operator_all(closed: tuple[LiveCell, Keys]) -> None:
    cell, keys = closed
    await cell.ask(client_of(cell, keys.a).deploy, SPEC)
    await cell.ask(client_of(cell, keys.b).deploy, replace(SPEC, name=DeploymentName("other")))
    seen = {}
    for name, key in (("a", keys.a), ("b", keys.b), ("admin", keys.admin)):
        tab = Tab(cell)
        await tab.sign_in(key)
        seen[name] = (await tab.ask("GET", "/api/v1/cell")).json()
    assert [list(seen[name]["deployments"]) for name in seen] == [
        ["chat"],
        ["other"],
        ["chat", "other"],
    ]
    for name in ("a", "b"):
        assert (seen[name]["nodes"], seen[name]["status"]["state_path"]) == ({}, "")
    assert seen["admin"]["nodes"]
    assert seen["admin"]["samples"]["time_unix_s"]
    assert seen["b"]["samples"]["time_unix_s"] == [], "samples count what all tenants do"
    asks = Tab(cell)
    await asks.sign_in(keys.a)
    assert (await asks.ask("POST", "/v1/chat/completions", HELLO)).status_code == 200
    (mine,) = (await asks.ask("GET", "/api/v1/requests")).json()["ended"]
    assert [one["tenant"] for one in (await asks.ask("GET", "/api/v1/usage?by=tenant")).json()] == [
        "a"
    ]
    tab = Tab(cell)
    await tab.sign_in(keys.b)
    assert (await tab.ask("POST", "/api/v1/deployments/chat/delete", {})).status_code == 404
    theirs = f"/api/v1/requests/{mine['request_id']}"
    assert (await tab.ask("GET", theirs)).status_code == 404
    assert (await tab.ask("POST", theirs + "/cancel", {})).status_code == 404
    assert (await tab.ask("GET", "/api/v1/requests")).json()["ended"] == []
    assert (await tab.ask("GET", "/api/v1/usage")).json() == []
    report = (await tab.ask("GET", "/api/v1/report")).json()
    assert (report["calls"][0]["calls"], report["looks"], report["faults"]) == (0, [], [])


async def test_a_tenant_is_told_what_happens_to_its_own(closed: tuple[LiveCell, Keys]) -> None:
    cell, keys = closed
    hers, his = (
        (client_of(cell, key), replace(SPEC, name=DeploymentName(name)))
        for key, name in ((keys.a, "hers"), (keys.b, "his"))
    )
    for client, spec in (hers, his):
        await cell.ask(client.deploy, spec)
    tab = Tab(cell)
    await tab.sign_in(keys.a)
    with await tab.ask("GET", "/api/v1/events", stream=True) as events:
        for client, spec in (his, hers):
            await cell.ask(client.load, spec.name)
        lines = events.iter_lines()
        told: list[dict[str, Any]] = []
        while all(line["text"] != "load, asked by an operator" for line in told):
            data = (await asyncio.to_thread(next, lines)).partition(b"data: ")[2]
            told += json.loads(data) if data.startswith(b"[") else []
    assert {(line["deployment"], line["tenant"]) for line in told} == {("hers", "a")}
    texts = [line["text"] for line in told]
    assert texts[0] == f"deploy {SPEC.source}"
    assert any(text.startswith("imported ") for text in texts)
    logged = await cell.ask(lambda: [event.line for event in hers[0].watch(backlog=999)])
    assert [line.text for line in logged[: len(texts)]] == texts
    assert {(line.deployment, line.tenant) for line in logged} == {("hers", "a")}
    everything = await cell.ask(lambda: list(client_of(cell, keys.admin).watch(backlog=999)))
    assert {"a", "b", ""} == {event.line.tenant for event in everything}


async def test_a_tenants_report_tells_of_its_loads_alone(closed: tuple[LiveCell, Keys]) -> None:
    cell, keys = closed
    client = client_of(cell, keys.a)
    await cell.ask(client.deploy, SPEC)
    await cell.ask(client.load, SPEC.name)
    loads = {}
    for name, key in (("a", keys.a), ("b", keys.b), ("admin", keys.admin)):
        told = await cell.ask(client_of(cell, key).report, 600.0)
        loads[name] = [one["loads"] for one in json.loads(told)["loads"]]
    assert loads == {"a": [1], "b": [], "admin": [1]}


async def test_a_key_that_waits_for_the_disk_holds_nobody_up(
    closed: tuple[LiveCell, Keys], tmp_path: Path
) -> None:
    cell, keys = closed
    tab, other = Tab(cell), Tab(cell)
    for one in (tab, other):
        await one.sign_in(keys.admin)
    path = tmp_path / "controller" / FILE_NAME
    with closing(sqlite3.connect(path, isolation_level=None)) as writes:
        writes.execute("BEGIN IMMEDIATE")
        making = asyncio.create_task(tab.ask("POST", "/api/v1/keys", {"role": "admin"}))
        for _ in range(3):
            assert (await other.ask("GET", "/api/v1/cell")).status_code == 200
        assert not making.done()
        writes.execute("COMMIT")
    assert (await making).status_code == 200


async def test_an_operator_makes_a_key_that_is_told_once_and_revokes_it(
    closed: tuple[LiveCell, Keys],
) -> None:
    cell, keys = closed
    tab = Tab(cell)
    await tab.sign_in(keys.a)
    assert (await tab.ask("GET", "/api/v1/keys")).status_code == 403
    assert (await tab.ask("POST", "/api/v1/keys", {"role": "admin"})).status_code == 403
    await tab.sign_in(keys.admin)
    made = await tab.ask("POST", "/api/v1/keys", {"role": "tenant", "tenant": "c", "days": 1})
    assert (made.status_code, made.headers["cache-control"]) == (200, "no-store")
    told = made.json()
    listed = await tab.ask("GET", "/api/v1/keys")
    assert told["key"] not in listed.text
    assert told["key_id"] in {one["key_id"] for one in listed.json()}
    other = Tab(cell)
    assert (await other.sign_in(told["key"])).json()["tenant"] == "c"
    revoke = f"/api/v1/keys/{told['key_id']}/revoke"
    assert (await tab.ask("POST", revoke, {}, headers={TOKEN_HEADER: ""})).status_code == 403
    assert (await tab.ask("POST", revoke, {})).status_code == 200
    assert (await other.ask("GET", "/api/v1/cell")).status_code == 401
    assert (await tab.ask("POST", "/api/v1/keys/nobody/revoke", {})).status_code == 404
    for wrong in ({"role": "king"}, {"role": "tenant"}, {"tenant": "c", "days": 0}, {"more": 1}):
        assert (await tab.ask("POST", "/api/v1/keys", wrong)).status_code == 400, wrong


async def test_a_revoked_key_closes_the_open_tab(closed: tuple[LiveCell, Keys]) -> None:
    cell, keys = closed
    tab = Tab(cell)
    await tab.sign_in(keys.a)
    with await tab.ask("GET", "/api/v1/events", stream=True) as events:
        lines = events.iter_lines()
        assert await asyncio.to_thread(next, lines)
        (kept,) = (one for one in keys.book.all_keys() if one.tenant == "a")
        keys.book.revoke(kept.key_id)
        rest = await asyncio.to_thread(lambda: b"\n".join(lines))
        assert b"was revoked" in rest
    assert (await tab.ask("GET", "/api/v1/cell")).status_code == 401
    assert (await tab.ask("GET", "/api/v1/session")).json()["role"] is None


async def test_files_of_manifests_that_wait_are_bounded_and_hold_no_operator_up(
    closed: tuple[LiveCell, Keys], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, keys = closed
    may_end, read = threading.Event(), []

    def slow(files: list[tuple[str, bytes]]) -> list[DeploymentSpec]:
        read.append(files[0][1].decode())
        assert files[0][1] == b"quick" or may_end.wait(WAIT_S_MAX)
        return []

    async def post(key: str, manifest: str) -> tuple[int, bytes]:
        """By a connection of its own, in no thread."""
        host, port = str(cell.http).split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"manifest": manifest}).encode()
        writer.write(
            f"POST /api/v1/deploy HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
            "Content-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        try:
            answer = await reader.read()
        finally:
            writer.close()
        return int(answer.split()[1]), answer.lower()

    monkeypatch.setattr(operating, "read_manifests", slow)
    async with asyncio.timeout(WAIT_S_MAX):
        waits = [asyncio.create_task(post(keys.a, "slow")) for _ in range(WORK_THREADS + 1)]
        (refused,), reads = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        status, answer = refused.result()
        assert (status, b"retry-after: 1" in answer) == (429, True), "one has no more than a share"
        assert (await post(keys.admin, "quick"))[0] == 200, "it waits for no tenant"
        leaves, stays = (asyncio.create_task(post(keys.b, name)) for name in ("leaves", "stays"))
        assert not (await asyncio.wait([leaves, stays], timeout=0.2))[0]
        leaves.cancel()
        while True:
            comes = asyncio.create_task(post(keys.b, "quick"))
            if (await asyncio.wait([comes], timeout=0.2))[1]:
                break  # it has the place of the one that left
        assert sorted(read) == ["quick", "slow", "slow"]
        may_end.set()
        assert [(await one)[0] for one in (*reads, stays, comes)] == [200] * (len(reads) + 2)
        assert "leaves" not in read


def test_sessions_end_and_are_bounded() -> None:
    now_s = 0.0
    kept = Sessions(lambda: now_s)

    def request(token: str) -> Any:
        cookie = (b"cookie", f"{COOKIE}={token}".encode())
        return Request({"type": "http", "method": "GET", "headers": [cookie]})

    first, _ = kept.begin("Bearer one")
    tokens = [kept.begin("Bearer more")[0] for _ in range(SESSIONS_MAX)]
    assert kept.authorization(request(first)) == "Bearer one", "another key ends no session of it"
    found = [kept.authorization(request(token)) for token in tokens]
    assert found == [None, *["Bearer more"] * (SESSIONS_MAX - 1)], "the oldest has made room"
    now_s = SESSION_S_MAX
    assert kept.authorization(request(tokens[-1])) is None
