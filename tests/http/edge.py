"""A live cell with HTTP, asked by a client that knows nothing of mesh."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import requests

from tests.controller.live import WAIT_S_MAX, LiveCell, live_cell

HELLO = [{"role": "user", "content": "hi"}]


class Edge:
    """`cell`, and what is asked of it by HTTP."""

    def __init__(self, cell: LiveCell) -> None:
        self.cell = cell
        self.url = f"http://{cell.http}"

    async def get(self, path: str) -> requests.Response:
        return await asyncio.to_thread(requests.get, self.url + path, timeout=WAIT_S_MAX)

    async def delete(self, path: str) -> requests.Response:
        return await asyncio.to_thread(requests.delete, self.url + path, timeout=WAIT_S_MAX)

    async def post(self, path: str, body: Any, **how: Any) -> requests.Response:
        """`body`: JSON, or bytes as they are."""
        given = {"data": body} if isinstance(body, bytes) else {"json": body}
        headers = {"Content-Type": "application/json", **how.pop("headers", {})}
        return await asyncio.to_thread(
            lambda: requests.post(
                self.url + path, **given, headers=headers, timeout=WAIT_S_MAX, **how
            )
        )

    async def chat(self, **body: Any) -> requests.Response:
        return await self.post("/v1/chat/completions", {"model": "chat", "messages": HELLO, **body})

    async def complete(self, prompt: Any, **body: Any) -> requests.Response:
        return await self.post("/v1/completions", {"model": "chat", "prompt": prompt, **body})


def events(response: requests.Response) -> Iterator[Any]:
    """The data of server-sent events, parsed; `[DONE]` as it is."""
    for block in response.content.decode().split("\n\n"):
        for line in block.splitlines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                yield data if data == "[DONE]" else json.loads(data)


def read_all(client: socket.socket) -> bytes:
    answer = b""
    while data := client.recv(1 << 20):
        answer += data
    return answer


def raw(
    http: Edge, line: bytes, body: bytes, *, read_bytes_max: int = 0, missing_bytes: int = 0
) -> socket.socket:
    """A request by hand; the socket, whose answer nobody has read. It says that so many bytes more
    would come than do.
    """
    host, port = http.url.removeprefix("http://").split(":")
    client = socket.socket()
    client.settimeout(WAIT_S_MAX)
    if read_bytes_max:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, read_bytes_max)
    client.connect((host, int(port)))
    head = line + b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client.sendall(head + b"Content-Length: %d\r\n\r\n" % (len(body) + missing_bytes) + body)
    return client


@asynccontextmanager
async def edge(home: Path, **config: Any) -> AsyncIterator[Edge]:
    async with live_cell(home, http="127.0.0.1:0", **config) as cell:
        yield Edge(cell)
