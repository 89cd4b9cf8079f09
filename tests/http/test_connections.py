"""What comes on a connection: requests that offer an upgrade, in pieces, several, of HTTP/1.0."""

import asyncio
import json
import socket
from itertools import product

import pytest

from tests.controller.live import WAIT_S_MAX
from tests.http.edge import HELLO, Edge, read_all

BODY = json.dumps({"model": "chat", "messages": HELLO, "max_tokens": 2}).encode()
PATH = b"POST /v1/chat/completions HTTP/1.1\r\n"
PLAIN = b"Host: localhost\r\nContent-Type: application/json\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
LENGTH = b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n5\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (
    BODY[:5],
    len(BODY) - 5,
    BODY[5:],
)
LAST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def connected(http: Edge) -> socket.socket:
    host, port = http.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=WAIT_S_MAX)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


async def said(http: Edge, *parts: bytes) -> bytes:
    """Everything that is answered to these, sent one after the other, until the connection ends."""

    def ask() -> bytes:
        with connected(http) as client:
            for part in parts:
                client.sendall(part)
            return read_all(client)

    return await asyncio.to_thread(ask)


def statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


async def test_an_upgrade_is_an_ordinary_request(http: Edge) -> None:
    await http.cell.deployed()
    offers = (
        H2C,
        b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
        b"Upgrade: TLS/1.0, odd/7\r\nConnection: keep-alive, UPGRADE\r\n",
        b"Connection: Upgrade\r\nUpgrade: a\r\nUpgrade: b\r\n",
    )
    for offer, framed in product(offers, (LENGTH, CHUNKED)):
        request = PATH + PLAIN + offer + framed
        whole = await said(http, request + request + LAST)
        assert statuses(whole) == [200, 200, 200], "pipelined, on a connection that stays"
        assert whole.count(b'"content":"aa"') == 2, request
        bytes_one_by_one = await said(http, *(bytes([byte]) for byte in request), LAST)
        assert statuses(bytes_one_by_one) == [200, 200], request


async def test_an_upgrade_without_a_body_or_with_a_close_is_answered(http: Edge) -> None:
    get = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
    assert statuses(await said(http, get + H2C + b"\r\n" + LAST)) == [200, 200]
    close = b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n\r\n"
    assert statuses(await said(http, get + close)) == [200]
    assert statuses(await said(http, b"CONNECT localhost:80 HTTP/1.1\r\n" + PLAIN + b"\r\n")) == [
        400
    ]
    assert statuses(await said(http, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")) == [400]


async def test_who_expects_to_be_told_to_go_on_is_told_once(http: Edge) -> None:
    await http.cell.deployed()
    head = PATH + PLAIN + H2C + b"Expect: 100-continue\r\n" + LENGTH.removesuffix(BODY)

    def ask() -> tuple[bytes, bytes]:
        with connected(http) as client:
            client.sendall(head)
            told = client.recv(1 << 10)
            client.sendall(BODY + LAST)
            return told, read_all(client)

    told, answer = await asyncio.to_thread(ask)
    assert told == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert statuses(answer) == [200, 200]


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_is_answered_without_chunks(http: Edge, stream: bool) -> None:
    await http.cell.deployed()
    body = json.dumps({**json.loads(BODY), "stream": stream}).encode()
    length = b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    answer = await said(http, PATH.replace(b"1.1", b"1.0") + PLAIN + length)
    head, _, text = answer.partition(b"\r\n\r\n")
    assert statuses(head) == [200]
    assert b"transfer-encoding" not in head.lower()
    if stream:
        assert text.startswith(b"data: {")
        assert text.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(text)["choices"][0]["message"]["content"] == "aa"


async def test_a_method_that_is_not_allowed_is_told_with_those_that_are(http: Edge) -> None:
    response = await http.get("/v1/chat/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
