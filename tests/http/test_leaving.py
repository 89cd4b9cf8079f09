"""Clients that leave before their answer's end, or do not read it: what they had is free again."""

import asyncio
import socket
from pathlib import Path

import pytest

from mesh.controller.gateway import GatewayLimits
from mesh.domain.messages import AbortRequest, SubmitRequest
from mesh.http.exchange import END_S_MAX
from tests.http.edge import Edge, edge, raw, read_all

LEAVING = 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 2])
async def test_a_client_that_leaves_frees_its_place(http: Edge, stream: bool, tokens: int) -> None:
    node = await http.cell.deployed(held=True)
    body = b'{"model": "chat", "prompt": [1], "stream": %b}' % (b"true" if stream else b"false")
    client = raw(http, b"POST /v1/completions", body)
    order = (await node.told(SubmitRequest)).order
    await node.answer(order, 0, tokens, last=False)
    await asyncio.sleep(0.05)
    client.close()
    abort = await node.told(AbortRequest)
    assert abort.request_id == order.request.request_id
    await http.cell.idle()


async def test_a_client_that_leaves_behind_a_long_body_is_seen(http: Edge) -> None:
    """The server rests reading when much of a body comes at once to who waits for it."""
    node = await http.cell.deployed(held=True)
    body, rest = b'{"model": "chat", "prompt": [1]}', b" " * 100_000
    client = raw(http, b"POST /v1/completions", body, missing_bytes=len(rest))
    await asyncio.sleep(0.1)
    client.sendall(rest)
    order = (await node.told(SubmitRequest)).order
    client.close()
    assert (await node.told(AbortRequest)).request_id == order.request.request_id
    await http.cell.idle()


async def test_all_requests_of_a_client_that_leaves_go(http: Edge) -> None:
    await http.cell.deployed(held=True)
    body = b'{"model": "chat", "prompt": [[1], [2], [3]]}'
    client = raw(http, b"POST /v1/completions", body)
    await http.cell.until(lambda: len(http.cell.client.requests()) == 3)
    client.close()
    await http.cell.until(lambda: not http.cell.client.requests())
    await http.cell.idle()


async def test_many_that_leave_at_once_free_all_places(http: Edge) -> None:
    node = await http.cell.deployed(held=True)
    body = b'{"model": "chat", "prompt": [1], "max_tokens": 1, "stream": true}'

    def ask(count: int) -> list[socket.socket]:
        return [raw(http, b"POST /v1/completions", body) for _ in range(count)]

    clients = await asyncio.to_thread(ask, LEAVING)
    await http.cell.until(lambda: len(http.cell.client.requests()) == LEAVING)
    for client in clients:
        client.close()
    await http.cell.until(lambda: not http.cell.client.requests())
    await http.cell.idle()
    assert (await http.cell.status()).queued == 0
    node.held = False
    assert (await http.chat(max_tokens=1)).status_code == 200


async def test_a_client_that_reads_nothing_is_cut_off(tmp_path: Path) -> None:
    async with edge(tmp_path, gateway=GatewayLimits(told_max=8)) as http:
        node = await http.cell.deployed(held=True)
        body = b'{"model": "chat", "prompt": [1], "stream": true}'
        client = raw(http, b"POST /v1/completions", body, read_bytes_max=4096)
        order = (await node.told(SubmitRequest)).order
        await node.flood(order, "x" * 20_000)
        await http.cell.idle()
        await asyncio.sleep(END_S_MAX + 0.5)
        with client:
            answer = await asyncio.to_thread(read_all, client)
        assert not answer.endswith(b"0\r\n\r\n"), "it ends in the middle"
        node.held = False
        assert (await http.chat(max_tokens=1)).status_code == 200
