"""How mesh dials and serves gRPC: addresses, channel and server options, a port that is ours alone.

No environment proxy is asked for anything on this machine, a port in use is an error rather than
shared, and dead peers are found by keepalive pings.
"""

import errno
import os
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import grpc

from mesh.domain.errors import InvalidInput, Unavailable
from mesh.wire.credentials import Tls, credentials

MESSAGE_BYTES_MAX = 64 << 20
"""A tokenizer crosses the link in one message; the largest known are near 40 MiB."""
KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
REDIAL_MS_MIN = 100
REDIAL_MS_MAX = 1_000
BACKLOG_MAX = 1024
"""Connections that wait to be taken."""
CONNECTIONS_MAX = 4096
"""The most gRPC connections of a controller, those of nodes included: each has one to look who
leads, and one for its link.
"""
STREAMS_MAX = 4096
"""Calls at one time on a connection."""
CALLS_MAX = 4 * STREAMS_MAX
"""Calls of one stream of many (`InvokeMany`) that have not ended, and messages that its caller has
yet to read; a front gives up a stream on which so many calls and cancellations wait to be sent.
"""
HANDSHAKE_MS_MAX = 10_000
"""For the handshake of TLS, and for that of HTTP/2."""
RESTING_MS_MAX = 120_000
"""A connection without a call is closed then; a channel dials again with its next call."""
_LOOPBACK = ("localhost", "ip6-localhost", "::1")

Options = tuple[tuple[str, int], ...]


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `[IPV6]:PORT`. Raises InvalidInput for anything else."""
    host, separator, port = text.strip().rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    unbracketed = ":" in bare and bare == host
    valid = bool(separator and bare) and not unbracketed and port.isascii() and port.isdigit()
    if not valid or int(port) > 65535:
        raise InvalidInput(
            f"{text!r} is no address", hint="write it as HOST:PORT, like 127.0.0.1:7070"
        )
    return bare, int(port)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches it."""
    return host in _LOOPBACK or host.startswith("127.")


def channel_options(address: str) -> Options:
    """Options for a channel to `address`."""
    host, _ = parse_address(address)
    loopback = is_loopback(host)
    return (
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        # A dial of its own for every channel: none waits out the back-off of another's.
        ("grpc.use_local_subchannel_pool", 1),
        # Whoever polls for a controller that is starting sees it soon: gRPC alone would wait longer
        # after each failure, up to two minutes.
        ("grpc.initial_reconnect_backoff_ms", REDIAL_MS_MIN),
        ("grpc.max_reconnect_backoff_ms", REDIAL_MS_MAX),
        *((("grpc.enable_http_proxy", 0),) if loopback else ()),
    )


def server_options() -> Options:
    return (
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        # Peers may ping as often as we do without being sent away for it.
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
        # What anybody can have without a key.
        ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
        ("grpc.max_concurrent_streams", STREAMS_MAX),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS_MAX),
        ("grpc.http2.settings_timeout", HANDSHAKE_MS_MAX),
        ("grpc.max_connection_idle_ms", RESTING_MS_MAX),
    )


def dial(address: str) -> grpc.aio.Channel:
    """An asyncio channel; it connects when it is first used. Raises InvalidInput."""
    options, tls = channel_options(address), credentials().tls
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, _shown(tls), options=options)


def dial_blocking(address: str) -> grpc.Channel:
    """The same for threads; every call shows this process' key."""
    options, tls = channel_options(address), credentials().tls
    if tls is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        channel = grpc.secure_channel(address, _shown(tls), options=options)
    shown = credentials().metadata
    return grpc.intercept_channel(channel, _Showing(shown)) if shown else channel


def _shown(tls: Tls) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)


class _Details(NamedTuple):
    """The details of a call, as gRPC's interceptors hand them on."""

    method: str
    timeout: float | None
    metadata: Sequence[tuple[str, str | bytes]] | None
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class _Showing(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    """Adds metadata to every call."""

    def __init__(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._metadata = metadata

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._shown(details), request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._shown(details), request)

    def _shown(self, details: Any) -> _Details:
        given = details.metadata or ()
        return _Details(
            method=details.method,
            timeout=details.timeout,
            metadata=(*given, *self._metadata),
            credentials=details.credentials,
            wait_for_ready=details.wait_for_ready,
            compression=details.compression,
        )


def bind(server: grpc.aio.Server, address: str, tls: Tls | None = None) -> str:
    """Listen at `address`, where port 0 takes a free one; returns the address bound. With `tls`
    both ends show certificates of one authority.

    Raises InvalidInput for no address, Unavailable when the port is taken or not ours to take.
    """
    host, port = parse_address(address)
    # Bound and let go: the kernel says why not in one word, where gRPC writes a page to stderr.
    listening_socket(address).close()
    try:
        if tls is None:
            bound = server.add_insecure_port(format_address(host, port))
        else:
            pair = [(tls.key, tls.certificate)]
            mutual = grpc.ssl_server_credentials(pair, tls.authority, require_client_auth=True)
            bound = server.add_secure_port(format_address(host, port), mutual)
    except RuntimeError as error:
        raise Unavailable(
            f"cannot listen at {address}", hint="choose another address with --listen"
        ) from error
    return format_address(host, bound)


def listening_socket(address: str, option: str = "--listen") -> socket.socket:
    """A socket that listens at `address`, where port 0 takes a free one; `option` is that by which
    it was given.

    Raises InvalidInput for no address, Unavailable when the port is taken or not ours to take.
    """
    host, port = parse_address(address)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(where)
            listening.listen(BACKLOG_MAX)
        except OSError:
            listening.close()
            raise
    except socket.gaierror as error:
        raise Unavailable(
            f"cannot listen at {format_address(host, port)}: no such host",
            hint="give an address of this machine, like 127.0.0.1 or 0.0.0.0",
        ) from error
    except OSError as error:
        raise _cannot_listen(host, port, option, error) from error
    return listening


def _cannot_listen(host: str, port: int, option: str, error: OSError) -> Unavailable:
    where = format_address(host, port)
    if error.errno == errno.EADDRINUSE:
        return Unavailable(
            f"port {port} is in use: cannot listen at {where}",
            hint=f"stop what listens there, or choose another port with {option}",
        )
    reason = os.strerror(error.errno).lower() if error.errno else str(error)
    return Unavailable(
        f"cannot listen at {where}: {reason}", hint=f"choose another address with {option}"
    )
