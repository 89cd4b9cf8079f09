"""Keys: every call and route is closed to whoever may not make it, and tenants see their own alone.

Calls come from the services' descriptors and routes from the application, so that a new one that is
forgotten in the tables fails here.
"""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
import pytest_asyncio
import requests
from google.protobuf.descriptor import FileDescriptor

from mesh.controller.keys import KeyBook, KeyDesk
from mesh.controller.main import main as run_controller
from mesh.domain.access import Role, TenantLimits, TenantName
from mesh.domain.errors import (
    AlreadyExists,
    Forbidden,
    InvalidInput,
    MeshError,
    NotFound,
    Refused,
    Unauthenticated,
    Unavailable,
)
from mesh.domain.ids import DeploymentName, NodeId, RequestId
from mesh.domain.invocation import Accepted, Finished, TextPrompt
from mesh.domain.model import Task
from mesh.domain.reasons import RefusalReason
from mesh.domain.usage import Usage, UsageBy, summed
from mesh.http.app import application, standing_by
from mesh.v1 import control_pb2, inference_pb2, node_link_pb2, open_inference_pb2
from mesh.v1.open_inference_pb2_grpc import GRPCInferenceServiceStub
from mesh.wire.access import ROUTES, RPCS, Gate
from mesh.wire.channel import bind, dial, dial_blocking
from mesh.wire.client import MeshClient
from mesh.wire.codec import view_from_wire
from mesh.wire.credentials import Credentials, show
from mesh.wire.serving import Guard
from tests.controller.live import EMBEDS, HELLO, WAIT_S_MAX, FakeNode, LiveCell, asking, live_cell
from tests.controller.live import SPEC as LIVE_SPEC
from tests.controller.test_inference import many

SPEC = replace(LIVE_SPEC, source="pkg://tiny/tiny.gguf")
"""A deployment from a source that tenants may use."""
FILES: tuple[FileDescriptor, ...] = (
    control_pb2.DESCRIPTOR,
    inference_pb2.DESCRIPTOR,
    node_link_pb2.DESCRIPTOR,
    open_inference_pb2.DESCRIPTOR,
)
METHODS = sorted(
    f"/{service.full_name}/{method.name}"
    for file in FILES
    for service in file.services_by_name.values()
    for method in service.methods
)
A, B = TenantName("a"), TenantName("b")
CLIENTS = 50
CLOSED = ("", "mesh_of_nobody", "expired", "revoked")
"""Keys that open nothing; the last two by the name in `Keys`."""


@dataclass
class Keys:
    """A key of each kind; `book` is the cell's."""

    book: KeyBook
    admin: str
    a: str
    b: str
    node: str
    expired: str
    revoked: str


def made_keys(home: Path) -> Keys:
    book = KeyBook(home / "controller")
    revoked, kept = book.create(Role.ADMIN, TenantName(""))
    book.revoke(kept.key_id)
    return Keys(
        book=book,
        admin=book.create(Role.ADMIN, TenantName(""))[0],
        a=book.create(Role.TENANT, A)[0],
        b=book.create(Role.TENANT, B)[0],
        node=book.create(Role.NODE, TenantName(""))[0],
        expired=book.create(Role.ADMIN, TenantName(""), expires_unix_s=1.0)[0],
        revoked=revoked,
    )


@contextmanager
def showing(key: str) -> Iterator[None]:
    show(Credentials(key=key))
    try:
        yield
    finally:
        show(Credentials())


def client_of(cell: LiveCell, key: str) -> MeshClient:
    with showing(key):
        return MeshClient(cell.address)


@asynccontextmanager
async def keyed(home: Path) -> AsyncIterator[tuple[LiveCell, Keys]]:
    """A cell that wants keys, with a node."""
    keys = made_keys(home)
    async with live_cell(home, keys=True, http="127.0.0.1:0") as cell:
        with showing(keys.node):
            cell.nodes.append(await FakeNode(cell.address).join())
        yield cell, keys
    keys.book.close()


@pytest_asyncio.fixture(loop_scope="module")
async def cell(tmp_path: Path) -> AsyncIterator[tuple[LiveCell, Keys]]:
    async with keyed(tmp_path) as made:
        yield made


async def test_a_standby_names_its_leader_to_those_alone_who_have_a_key(tmp_path: Path) -> None:
    def instead(known: bool) -> Unavailable:
        return Unavailable("leader:7070 leads" if known else "stands by")

    keys = made_keys(tmp_path)
    gate = Gate(keys.book.caller)
    guard = Guard(gate)
    guard.instead = instead
    server = grpc.aio.server(interceptors=[guard])
    address = bind(server, "127.0.0.1:0")
    await server.start()
    for key, said in ((keys.a, "leader:7070"), (keys.revoked, "stands by"), ("", "stands by")):
        with showing(key):
            client = MeshClient(address)
        with client, pytest.raises(Unavailable, match=said):
            await asyncio.to_thread(client.list)
        sent: list[Any] = []

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
        scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/v1/models"}
        scope |= {"query_string": b"", "headers": headers, "scheme": "http"}
        scope |= {"server": ("127.0.0.1", 1)}
        await standing_by(instead, gate)(scope, cast(Any, None), send)
        assert sent[0]["status"] == 503
        assert said.encode() in sent[1]["body"]
    await server.stop(None)
    keys.book.close()


def code_of(channel: grpc.Channel, method: str, key: str) -> grpc.StatusCode:
    """How a call with an empty message ends. Blocks: where a call has ended before the message is
    sent, gRPC's asyncio client ends a stream as INTERNAL and loses the status.
    """
    metadata = Credentials(key=key).metadata
    raw: Any = channel
    call = raw.stream_stream(method)(iter([b""]), metadata=metadata, timeout=WAIT_S_MAX)
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        return cast(grpc.Call, error).code()
    return grpc.StatusCode.OK


def check_access(address: str, keys: Keys) -> None:
    denied = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
    with dial_blocking(address) as channel:
        for method in METHODS:
            roles = RPCS[method]
            for name in CLOSED:
                code = code_of(channel, method, getattr(keys, name, name))
                unknown = code is grpc.StatusCode.UNAUTHENTICATED
                assert unknown == (roles is not None), (method, name)
            for role, key in ((Role.NODE, keys.node), (Role.TENANT, keys.b)):
                code = code_of(channel, method, key)
                if roles is None or role in roles:
                    assert code not in denied, method
                else:
                    assert code is grpc.StatusCode.PERMISSION_DENIED, method
            assert code_of(channel, method, keys.admin) not in denied, method


async def test_every_call_is_closed_to_whoever_may_not_make_it(
    cell: tuple[LiveCell, Keys],
) -> None:
    assert sorted(RPCS) == METHODS, "each call has its roles in the table"
    live, keys = cell
    await asyncio.to_thread(check_access, live.address, keys)


def paths() -> list[str]:
    nothing = cast(Any, None)
    made = application(
        gateway=nothing,
        snapshot=nothing,
        find=nothing,
        metrics=nothing,
        feed=nothing,
        operator=nothing,
        reads=cast(Any, SimpleNamespace(threads=None)),
    )
    return [cast(Any, route).path for route in made.routes]


async def test_every_route_is_closed_to_whoever_may_not_ask_it(
    cell: tuple[LiveCell, Keys],
) -> None:
    live, keys = cell
    assert sorted(ROUTES) == sorted(paths()), "each route has its roles in the table"

    def status(path: str, key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"http://{live.http}{path.replace('{model}', 'chat')}"
        verb = "POST" if "completions" in path else "GET"
        with requests.request(
            verb, url, headers=headers, json={}, timeout=WAIT_S_MAX, stream=True
        ) as told:
            if told.status_code == 401:
                assert told.headers["www-authenticate"] == "Bearer"
                error = told.json()["error"]
                if isinstance(error, str):
                    assert path.startswith("/api/")
                elif path.startswith("/v1/messages"):
                    assert error["type"] == "authentication_error"
                else:
                    assert error["code"] == "invalid_api_key"
            return told.status_code

    for path in (*ROUTES, "/nowhere"):
        roles = ROUTES.get(path, frozenset({Role.ADMIN}))
        for name in CLOSED:
            found = await asyncio.to_thread(status, path, getattr(keys, name, name))
            assert (found == 401) == (roles is not None), (path, name, found)
        for role, key in ((Role.NODE, keys.node), (Role.TENANT, keys.b)):
            found = await asyncio.to_thread(status, path, key)
            assert (found == 403) == (roles is not None and role not in roles), (path, role)
        assert await asyncio.to_thread(status, path, keys.admin) not in (401, 403)


async def test_a_key_may_come_as_anthropics_clients_send_it(cell: tuple[LiveCell, Keys]) -> None:
    live, keys = cell
    body = {"model": "chat", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    for key, status in ((keys.a, 404), (keys.revoked, 401), (keys.node, 403)):
        told = await asyncio.to_thread(
            requests.post,
            f"http://{live.http}/v1/messages",
            json=body,
            headers={"x-api-key": key},
            timeout=WAIT_S_MAX,
        )
        assert told.status_code == status, told.text


async def test_nothing_of_another_tenant_is_within_reach(cell: tuple[LiveCell, Keys]) -> None:
    live, keys = cell
    a, b, admin = (client_of(live, key) for key in (keys.a, keys.b, keys.admin))
    assert (await live.ask(a.deploy, replace(SPEC, tenant="b"))).message == "deployed"
    assert [one.spec.tenant for one in await live.ask(a.list)] == ["a"]
    assert await live.ask(b.list) == ()
    held = {key: await live.ask(who.profiles, SPEC.name) for key, who in (("a", a), ("all", admin))}
    assert [view.nodes for view in held["a"]] == [()], "a tenant is told of no node"
    assert [view.nodes for view in held["all"]] == [("n1",)]
    named = (b.get, b.delete, b.undo, b.load, b.unload, b.profile, b.profiles, b.tokenizer)
    for call in named:
        with pytest.raises(NotFound, match="there is no deployment 'chat'"):
            await live.ask(call, SPEC.name)
    with pytest.raises(NotFound):
        await live.ask(lambda: b.scale(SPEC.name, replicas_min=1))
    with pytest.raises(AlreadyExists):
        await live.ask(b.deploy, SPEC)
    with pytest.raises(NotFound) as raised:
        await live.ask(lambda: list(b.invoke(asking())))
    assert "chat" not in raised.value.hint, "no names of others"
    assert await _models(live, keys.b) == []
    assert await _models(live, keys.a) == ["chat"]

    assert await _inferred(live, keys.b) == (False, grpc.StatusCode.NOT_FOUND)
    assert await _inferred(live, keys.a) == (True, grpc.StatusCode.OK)

    live.nodes[0].held = True
    events = a.invoke(asking())
    accepted = await live.ask(next, events)
    while not isinstance(accepted, Accepted):
        accepted = await live.ask(next, events)
    assert await live.ask(b.requests) == ()
    (seen,) = await live.ask(a.requests)
    with pytest.raises(NotFound):
        await live.ask(b.cancel, RequestId(seen.request_id))
    assert len(await live.ask(admin.requests)) == 1
    await live.ask(a.cancel, RequestId(seen.request_id))
    changed = replace(SPEC, slo=replace(SPEC.slo, ttft_s=9.0))
    assert (await live.ask(admin.deploy, changed)).message == "revision 2 serves"
    assert (await live.ask(a.get, SPEC.name)).spec.tenant == "a", "it stays whose it was"
    assert await live.ask(a.delete, SPEC.name) == "deleted"


async def _inferred(live: LiveCell, key: str) -> tuple[bool, grpc.StatusCode]:
    """By the Open Inference Protocol: whether the model is ready, and how a call of it ends."""
    metadata = Credentials(key=key).metadata
    named = open_inference_pb2.ModelReadyRequest(name="chat")
    asked = open_inference_pb2.ModelInferRequest(model_name="chat")
    held = open_inference_pb2.InferTensorContents(bytes_contents=[b"hi"])
    asked.inputs.add(name="text_input", datatype="BYTES", shape=[1], contents=held)
    async with dial(live.address) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        ready = (await stub.ModelReady(named, metadata=metadata)).ready
        call = stub.ModelInfer(asked, metadata=metadata)
        return ready, await call.code()


async def _models(live: LiveCell, key: str) -> list[str]:
    headers = {"Authorization": f"Bearer {key}"}
    url = f"http://{live.http}/v1/models"
    told = await asyncio.to_thread(requests.get, url, headers=headers, timeout=WAIT_S_MAX)
    return [card["id"] for card in told.json()["data"]]


async def test_usage_is_metered_by_tenant_and_key(cell: tuple[LiveCell, Keys]) -> None:
    live, keys = cell
    a, b, admin = (client_of(live, key) for key in (keys.a, keys.b, keys.admin))
    await live.ask(a.deploy, SPEC)
    for client in (a, a, admin):
        *_, last = await live.ask(lambda client=client: list(client.invoke(asking())))
        assert isinstance(last, Finished)

    async def told_by(by: str | None) -> Any:
        request = control_pb2.GetUsageRequest(by=by)
        return await live.ask(admin._calls.unary, admin._control.GetUsage, request)

    whole = await live.ask(admin.usage)
    used = {u.tenant: (u.requests, u.output_tokens) for u in whole}
    assert used == {"a": (2, 8), "": (1, 4)}
    (mine,) = await live.ask(a.usage)
    by_id = {key.key_id: key for key in keys.book.all_keys()}
    assert (mine.requests, by_id[mine.key_id].tenant) == (2, A)
    for by in (None, *UsageBy):
        assert await live.ask(b.usage, 0.0, by) == ()
        told = await told_by(by)
        assert tuple(view_from_wire(one, Usage) for one in told.usages) == summed(whole, by)
    with pytest.raises(InvalidInput, match="colour"):
        await told_by("colour")


async def refusals(live: LiveCell, client: MeshClient) -> tuple[int, list[MeshError]]:
    """Has as many clients call at once: how many got a place, and what the others were told."""

    async def one() -> MeshError | None:
        def call() -> MeshError | None:
            try:
                next(iter(e for e in client.invoke(asking()) if isinstance(e, Accepted)))
            except MeshError as error:
                return error
            return None

        return await live.ask(call)

    ends = await asyncio.gather(*(one() for _ in range(CLIENTS)))
    failed = [end for end in ends if end is not None]
    return CLIENTS - len(failed), failed


async def test_limits_hold_under_fifty_clients(cell: tuple[LiveCell, Keys]) -> None:
    live, keys = cell
    a, b = client_of(live, keys.a), client_of(live, keys.b)
    await live.ask(a.deploy, SPEC)
    await live.ask(b.deploy, replace(SPEC, name=DeploymentName("other")))
    keys.book.limit(A, TenantLimits(requests_per_s=0.1, deployments=1))
    placed, failed = await refusals(live, a)
    assert placed == 1
    assert {cast(Refused, error).reason for error in failed} == {RefusalReason.TENANT_LIMIT}
    assert all(0 < cast(Refused, error).retry_after_s <= 10.0 for error in failed)
    with pytest.raises(Refused, match="has 1 deployments; its limit is 1"):
        await live.ask(a.deploy, replace(SPEC, name=DeploymentName("second")))
    asked = replace(asking(), deployment=DeploymentName("other"))
    *_, last = await live.ask(lambda: list(b.invoke(asked)))
    assert isinstance(last, Finished), "another tenant's limits are its own"


async def test_calls_under_way_are_limited_and_told_as_429(cell: tuple[LiveCell, Keys]) -> None:
    live, keys = cell
    a = client_of(live, keys.a)
    await live.ask(a.deploy, SPEC)
    keys.book.limit(A, TenantLimits(running=1))
    live.nodes[0].held = True
    stream = a.invoke(asking())
    await live.ask(next, stream)
    placed, failed = await refusals(live, a)
    assert (placed, len(failed)) == (0, CLIENTS)
    url = f"http://{live.http}/v1/completions"
    headers = {"Authorization": f"Bearer {keys.a}"}
    asked = {"model": "chat", "prompt": "hi"}
    told = await asyncio.to_thread(
        lambda: requests.post(url, json=asked, headers=headers, timeout=WAIT_S_MAX)
    )
    assert (told.status_code, told.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(told.headers["retry-after"]) >= 1
    stream.close()


async def test_a_tenant_with_few_calls_at_a_time_embeds_many_texts(
    cell: tuple[LiveCell, Keys],
) -> None:
    live, keys = cell
    with showing(keys.node):
        hello = replace(HELLO, node_id=NodeId("n2"), run_id="run-2", embeds=True)
        live.nodes.append(await FakeNode(live.address, hello).join())
    a = client_of(live, keys.a)
    await live.ask(a.deploy, replace(SPEC, name=EMBEDS, task=Task.EMBED))
    headers = {"Authorization": f"Bearer {keys.a}"}

    async def embedded() -> requests.Response:
        url, body = f"http://{live.http}/v1/embeddings", {"model": "embeds", "input": ["a"] * 40}
        return await asyncio.to_thread(
            lambda: requests.post(url, json=body, headers=headers, timeout=WAIT_S_MAX)
        )

    keys.book.limit(A, TenantLimits(running=8))
    assert len((await embedded()).json()["data"]) == 40
    keys.book.limit(A, TenantLimits(running=0))
    assert (await embedded()).status_code == 429


async def test_a_revoked_key_opens_nothing_any_more(cell: tuple[LiveCell, Keys]) -> None:
    live, keys = cell
    a = client_of(live, keys.a)
    await live.ask(a.list)
    (kept,) = [key for key in keys.book.all_keys() if key.tenant == A]
    keys.book.revoke(kept.key_id)
    with pytest.raises(Unauthenticated, match="was revoked"):
        await live.ask(a.list)
    with pytest.raises(Forbidden, match="is of a tenant"):
        await live.ask(client_of(live, keys.b).status)


async def test_each_call_of_a_shared_stream_is_its_callers(cell: tuple[LiveCell, Keys]) -> None:
    """As a front makes them: with an operator's key, each for a tenant."""
    live, keys = cell
    ids = {key.tenant: key.key_id for key in keys.book.all_keys() if key.role is Role.TENANT}
    await live.ask(client_of(live, keys.a).deploy, SPEC)
    async with many(live, authorization=f"Bearer {keys.admin}") as stream:
        await stream.ask(1, made_for=f"tenant/a/{ids[A]}/")
        await stream.until(1, Finished)
        await stream.ask(2, made_for=f"tenant/b/{ids[B]}/")
        await stream.until(2, NotFound)
        keys.book.revoke(ids[A])
        await stream.ask(3, made_for=f"tenant/a/{ids[A]}/")
        assert "was revoked" in (await stream.until(3, Forbidden)).message
        operators = [key for key in keys.book.all_keys() if key.role is Role.ADMIN]
        for key in operators:
            keys.book.revoke(key.key_id)
        await stream.ask(4, made_for=f"tenant/b/{ids[B]}/")
        assert "was revoked" in (await stream.until(4, Unauthenticated)).message


async def test_neither_keys_nor_prompts_are_logged_or_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = "never to be seen again"
    with caplog.at_level("DEBUG"):
        async with keyed(tmp_path) as (live, keys):
            a, admin = client_of(live, keys.a), client_of(live, keys.admin)
            await live.ask(a.deploy, SPEC)
            asked = replace(asking(), prompt=TextPrompt(text=prompt))
            *_, last = await live.ask(lambda: list(a.invoke(asked)))
            assert isinstance(last, Finished)
            with pytest.raises(MeshError):
                await live.ask(lambda: list(a.invoke(replace(asked, top_p=7.0))))
            seen = await live.ask(lambda: list(admin.watch(999)))
            told = "".join(event.line.text for event in seen)
    found = (tmp_path / "controller").rglob("*")
    kept = b"".join(path.read_bytes() for path in found if path.is_file())
    for secret in (prompt, keys.a, keys.admin, keys.node):
        assert secret not in caplog.text
        assert secret not in told
        assert secret.encode() not in kept


def test_keys_are_not_kept_as_they_are(tmp_path: Path) -> None:
    keys = made_keys(tmp_path)
    keys.book.close()
    folder = tmp_path / "controller"
    kept = b"".join(path.read_bytes() for path in folder.iterdir())
    assert keys.a.encode() not in kept
    assert keys.a.removeprefix("mesh_").encode() not in kept
    assert (folder / "keys.sqlite3").stat().st_mode & 0o077 == 0
    assert len(keys.a) >= len("mesh_") + 256 / 6


def test_keys_of_a_role_that_cannot_have_them_are_refused(tmp_path: Path) -> None:
    book = KeyBook(tmp_path)
    with pytest.raises(InvalidInput):
        book.create(Role.TENANT, TenantName(""))
    with pytest.raises(InvalidInput):
        book.create(Role.NODE, A)
    with pytest.raises(NotFound):
        book.revoke("of nobody")
    book.close()


def test_a_controller_that_others_reach_does_not_start_open_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends before it listens: no test opens a port to others."""
    arguments = ["--listen", "0.0.0.0:0", "--home", str(tmp_path)]
    assert run_controller(arguments) == 2
    assert "--open lets everybody" in capsys.readouterr().err
    assert run_controller([*arguments, "--open", "--keys"]) == 2
    loopback = ["--listen", "127.0.0.1:0", "--http", "0.0.0.0:0", "--home", str(tmp_path)]
    assert run_controller(loopback) == 2, "HTTP alone suffices"


async def test_a_tenant_deploys_from_what_the_operator_allows_alone(tmp_path: Path) -> None:
    """Files of the nodes are an operator's; who has no key because none is wanted is one."""
    of_a_file = replace(SPEC, source="file:///models/m.gguf")
    async with keyed(tmp_path / "usual") as (live, keys):
        with pytest.raises(Forbidden, match="file://"):
            await live.ask(client_of(live, keys.a).deploy, of_a_file)
        await live.ask(client_of(live, keys.a).deploy, SPEC)
        named = replace(of_a_file, name=DeploymentName("of-an-operator"))
        await live.ask(client_of(live, keys.admin).deploy, named)
        with pytest.raises(AlreadyExists, match="is taken"):
            await live.ask(client_of(live, keys.a).deploy, named)
    async with live_cell(tmp_path / "alone") as cell:
        cell.nodes.append(await FakeNode(cell.address).join())
        await cell.ask(cell.client.deploy, of_a_file)


async def test_a_message_without_a_key_is_not_read(cell: tuple[LiveCell, Keys]) -> None:
    """Nothing of it is parsed: else its caller would hear that it is no message."""
    live, keys = cell
    no_message, forbidden = b"\xff" * (16 << 20), grpc.StatusCode.PERMISSION_DENIED
    for method in ("/mesh.v1.Control/Deploy", "/mesh.v1.Inference/Invoke"):
        async with dial(live.address) as channel:
            for key, code in (("", grpc.StatusCode.UNAUTHENTICATED), (keys.node, forbidden)):
                shown = Credentials(key=key).metadata
                call = channel.unary_stream(method, bytes, bytes)(no_message, metadata=shown)
                assert await call.code() is code


async def test_health_is_told_without_a_key_and_without_reading_anything(
    cell: tuple[LiveCell, Keys],
) -> None:
    live, _ = cell
    async with dial(live.address) as channel:
        for method in (
            "/grpc.health.v1.Health/Check",
            "/inference.GRPCInferenceService/ServerLive",
            "/inference.GRPCInferenceService/ServerReady",
        ):
            call = channel.unary_stream(method, bytes, bytes)(b"\xff" * (16 << 20))
            assert [answer async for answer in call] == [b"\x08\x01"], method
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch", bytes, bytes)(b"")
        assert await watch.code() is grpc.StatusCode.UNIMPLEMENTED


def test_keys_are_listed_while_another_writes_and_need_not_be_read_again(tmp_path: Path) -> None:
    book, desk = KeyBook(tmp_path), KeyDesk(tmp_path)
    book.create(Role.ADMIN, TenantName(""))
    with closing(sqlite3.connect(book.path, isolation_level=None)) as other:
        (before,) = other.execute("PRAGMA data_version").fetchone()
        other.execute("BEGIN IMMEDIATE")
        assert len(desk.all_keys()) == 1
        other.execute("ROLLBACK")
        assert other.execute("PRAGMA data_version").fetchone() == (before,)
    book.close()
