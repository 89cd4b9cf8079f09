"""What anybody can have of the HTTP server without a key: some connections, and no memory."""

import asyncio
import select
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from mesh.http import connections
from mesh.http.connections import Connections, peer_of
from mesh.http.lingering import LINGER_BYTES_MAX
from mesh.http.server import HttpServer
from mesh.wire.certificates import Part, make_folder, read_tls
from mesh.wire.credentials import Tls
from tests.controller.live import WAIT_S_MAX
from tests.controller.test_access import keyed

BODY_BYTES = 1 << 30
SENT_BYTES_MAX = LINGER_BYTES_MAX + (32 << 20)
"""With what the kernel holds of a connection at both of its ends."""


GO_ON = asyncio.Event()


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers at once, but /slow when it may."""
    if scope["path"] == "/slow":
        await GO_ON.wait()
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def serving(book: Connections, tls: Tls | None = None) -> AsyncIterator[tuple[str, int]]:
    server = HttpServer("127.0.0.1:0", tls, book=book)
    server.start(hello)
    host, port = server.address.split(":")
    try:
        yield host, int(port)
    finally:
        await server.stop(0.0)


@contextmanager
def dialled(address: tuple[str, int], count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(address, WAIT_S_MAX)) for _ in range(count)
        ]


async def settled(book: Connections, count: int) -> None:
    async with asyncio.timeout(WAIT_S_MAX):
        while len(book) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def worked(book: Connections) -> None:
    """Until one of two works."""
    async with asyncio.timeout(WAIT_S_MAX):
        while book.resting != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def asks(client: socket.socket, path: bytes = b"/") -> None:
    client.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")


def answer_to(client: socket.socket) -> bytes:
    """The whole of it, which may come in pieces; what came where the connection was closed."""
    came = b""
    while not came.endswith(b"\r\n\r\nok") and (piece := client.recv(100)):
        came += piece
    return came


async def test_connections_that_rest_are_bounded_and_the_oldest_go() -> None:
    book = Connections(resting_max=20, resting_by_peer_max=20)
    async with serving(book) as address:
        with dialled(address, 300) as clients:
            await settled(book, 20)
            assert await asyncio.to_thread(clients[0].recv, 1) == b"", "the oldest was closed"
            asks(clients[-1])
            assert b"200 OK" in await asyncio.to_thread(answer_to, clients[-1])
        await settled(book, 0)


async def test_who_has_asked_keeps_its_connection_beside_those_that_never_did() -> None:
    book = Connections(resting_max=20, resting_by_peer_max=20)
    async with serving(book) as address:
        with dialled(address, 1) as (client,):
            for _ in range(2):
                asks(client)
                assert b"200 OK" in await asyncio.to_thread(answer_to, client)
                with dialled(address, 100):
                    await settled(book, 20)
                await settled(book, 1)


async def test_who_has_most_loses_first_and_work_is_not_cut_off() -> None:
    book = Connections(resting_max=20, resting_by_peer_max=20)
    GO_ON.clear()
    async with serving(book) as address:
        with socket.socket() as other, dialled(address, 1) as (working,):
            other.bind(("127.0.0.2", 0))
            await asyncio.to_thread(other.connect, address)
            asks(working, b"/slow")
            await settled(book, 2)
            await worked(book)
            with dialled(address, 100):
                await settled(book, 21)
                GO_ON.set()
                assert b"200 OK" in await asyncio.to_thread(working.recv, 100)
                asks(other)
                assert b"200 OK" in await asyncio.to_thread(other.recv, 100)


async def test_beyond_all_bounds_a_new_connection_takes_the_place_of_one_that_rests() -> None:
    book = Connections(connections_max=5, resting_max=20, resting_by_peer_max=20)
    async with serving(book) as address:
        with dialled(address, 50) as clients:
            await settled(book, 5)
            asks(clients[-1])
            assert b"200 OK" in await asyncio.to_thread(answer_to, clients[-1])


async def test_a_late_handshake_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_S_MAX", 0.2)
    make_folder(tmp_path / "tls", ["127.0.0.1"], 1)
    book = Connections(secured=True)
    async with serving(book, read_tls(tmp_path / "tls", Part.CONTROLLER)) as address:
        with dialled(address, 3) as clients:
            await settled(book, 3)
            trusting = ssl.create_default_context(cafile=str(tmp_path / "tls" / "ca.pem"))

            def shake() -> bytes:
                with trusting.wrap_socket(clients[0], server_hostname="127.0.0.1") as client:
                    asks(client)
                    return client.recv(100)

            assert b"200 OK" in await asyncio.to_thread(shake)
            assert await asyncio.to_thread(clients[1].recv, 1) == b""
            await settled(book, 0)


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        (("10.0.0.1", 5), "10.0.0.1"),
        (("::ffff:10.0.0.1", 5, 0, 0), "10.0.0.1"),
        (("2606:4700:1:2:3:4:5:6", 5, 0, 0), "2606:4700:1:2::/64"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::/64"),
    ],
)
def test_a_peer_is_an_address_or_a_network(address: tuple[str, int], peer: str) -> None:
    assert peer_of(address) == peer


def sent_without_a_key(address: str, head: bytes) -> tuple[int, bytes]:
    """How much of an endless body was taken, and the answer."""
    host, port = address.split(":")
    sent_bytes = 0
    with socket.create_connection((host, int(port)), WAIT_S_MAX) as client:
        client.sendall(head)
        piece = b"10000\r\n" + bytes(0x10000) + b"\r\n" if b"chunked" in head else bytes(0x10000)
        try:
            while sent_bytes < BODY_BYTES:
                client.sendall(piece)
                sent_bytes += len(piece)
        except OSError:
            pass
        answer = b""
        try:
            while got := client.recv(1 << 16):
                answer += got
        except ConnectionResetError:
            pass
        return sent_bytes, answer


@pytest.mark.parametrize(
    "how",
    [b"Content-Length: %d" % BODY_BYTES, b"Transfer-Encoding: chunked"],
    ids=["whole", "chunks"],
)
@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        (b"/v1/chat/completions", b"", b"401"),
        (b"/v1/chat/completions", b"Authorization: Bearer mesh_of_nobody\r\n", b"401"),
        (b"/nowhere", b"", b"401"),
        (b"/healthz", b"", b"405"),
    ],
)
async def test_a_body_without_a_key_is_not_read(
    path: bytes, key: bytes, status: bytes, how: bytes, tmp_path: Path
) -> None:
    async with keyed(tmp_path) as (live, _):
        head = b"POST " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + key
        head += b"Content-Type: application/json\r\n" + how + b"\r\n\r\n"
        assert live.http is not None
        sent_bytes, answer = await asyncio.to_thread(sent_without_a_key, live.http, head)
    assert sent_bytes < SENT_BYTES_MAX
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert b"connection: close" in answer.lower()
    assert answer.rstrip().endswith(b"}")


async def test_few_bodies_of_those_who_sign_in_are_read_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address may send a fourth of them, and each has little time."""
    monkeypatch.setattr("mesh.http.app.SIGN_INS_MAX", 8)
    head = b"POST /api/v1/session HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    async with keyed(tmp_path) as (live, keys):
        assert live.http is not None
        host, port = live.http.split(":")
        with dialled((host, int(port)), 4) as (*waiting, other):
            for client in waiting:
                client.sendall(head + b"Content-Length: 100\r\n\r\n{")
            readable, _, _ = await asyncio.to_thread(select.select, waiting, [], [], WAIT_S_MAX)
            assert [one.recv(100).split()[1] for one in readable] == [b"429"]
            ask = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\n\r\n"
            other.sendall(ask % keys.a.encode())
            assert b" 200 OK" in await asyncio.to_thread(other.recv, 100)
            for client in {*waiting} - {*readable}:
                assert b" 408 " in await asyncio.to_thread(client.recv, 100)
