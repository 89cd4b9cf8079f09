"""Addresses are read strictly, and a port that cannot be ours is an error in one line."""

import asyncio
import socket
from contextlib import ExitStack

import grpc
import pytest

from mesh.domain.errors import InvalidInput, Unavailable
from mesh.wire import channel
from mesh.wire.channel import bind, channel_options, format_address, parse_address, server_options


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("127.0.0.1:7070", ("127.0.0.1", 7070)),
        ("node-1.local:0", ("node-1.local", 0)),
        ("[::1]:80", ("::1", 80)),
        (" localhost:65535 ", ("localhost", 65535)),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, parsed: tuple[str, int]) -> None:
    assert parse_address(text) == parsed
    assert parse_address(format_address(*parsed)) == parsed


@pytest.mark.parametrize("text", ["", "7070", ":7070", "host:", "host:x", "host:65536", "::1:80"])
def test_what_is_no_address_is_invalid(text: str) -> None:
    with pytest.raises(InvalidInput, match="is no address"):
        parse_address(text)


def test_no_proxy_is_asked_for_this_machine() -> None:
    for address in ("127.0.0.1:1", "localhost:1", "[::1]:1"):
        assert ("grpc.enable_http_proxy", 0) in channel_options(address)
    assert "grpc.enable_http_proxy" not in dict(channel_options("10.0.0.1:1"))


async def test_a_port_in_use_is_named(unused_tcp_port: int) -> None:
    address = f"127.0.0.1:{unused_tcp_port}"
    server, second = (grpc.aio.server(options=server_options()) for _ in range(2))
    assert bind(server, address) == address
    await server.start()
    with pytest.raises(Unavailable, match=f"port {unused_tcp_port} is in use") as caught:
        bind(second, address)
    assert "--listen" in caught.value.hint
    await server.stop(None)
    assert bind(second, address) == address, "and free again at once when the first has gone"
    await second.stop(None)


async def test_an_address_of_another_machine_cannot_be_listened_at() -> None:
    server = grpc.aio.server(options=server_options())
    for address in ("192.0.2.1:7070", "no-such-host.invalid:7070"):
        with pytest.raises(Unavailable, match="cannot listen at"):
            bind(server, address)
    await server.stop(None)


@pytest.fixture
def unused_tcp_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def test_connections_of_grpc_are_bounded_and_those_without_a_handshake_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "CONNECTIONS_MAX", 5)
    monkeypatch.setattr(channel, "HANDSHAKE_MS_MAX", 300)
    server = grpc.aio.server(options=server_options())
    host, port = bind(server, "127.0.0.1:0").split(":")
    await server.start()
    with ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection((host, int(port)), 10.0))
            for _ in range(20)
        ]
        ends = [asyncio.to_thread(_ended, client) for client in clients]
        await asyncio.gather(*ends)  # the fifteen beyond the bound at once, the others later
    async with grpc.aio.insecure_channel(f"{host}:{port}") as fresh:
        await asyncio.wait_for(fresh.channel_ready(), 10.0)
    await server.stop(None)


def _ended(client: socket.socket) -> None:
    """Returns when the server has closed it; it may have written its settings before."""
    try:
        while client.recv(1 << 10):
            pass
    except ConnectionResetError:
        return
