"""KV blocks from node to node, by a TCP connection of their own that the controller has no part in.

The node that takes a request over dials the node that it comes from, at the address in that node's
hello, and shows the ticket that the controller gave to both, which is good for at most four
connections. It is sent a header, and then each block with its number and digest. A connection that
breaks is dialled again, from the first missing block on. In a cell with TLS both ends show
certificates of nodes. A connection without a valid ticket is closed without an answer. Before:
`OfferKv` and `FetchKv` of the node core. After: the engine's export and import, in the compute
lane, some blocks at a time.
"""

import asyncio
import contextlib
import json
import logging
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any

from mesh.domain.actions import FetchKv
from mesh.domain.errors import EngineError, MeshError, Unavailable
from mesh.domain.ids import NodeId
from mesh.domain.limits import KV_MOVE_BYTES_MAX, KV_SLICE_BYTES
from mesh.domain.messages import OfferKv
from mesh.domain.steps import KvChunk, KvHeader
from mesh.domain.values import dataclass, replace
from mesh.runtime.engine import Engine
from mesh.runtime.kv_layout import checked_chunk
from mesh.runtime.node_actions import Fetched, KvFetched, Lane, Lanes
from mesh.wire.access import NODE_NAME
from mesh.wire.channel import format_address, listening_socket, parse_address
from mesh.wire.credentials import Tls
from mesh_nodes.lanes import call_on

CONNECTIONS_MAX = 8
"""Connections at one time; further ones are closed at once."""
OFFERS_MAX = 64
ASK_BYTES_MAX = 4096
HEADER_BYTES_MAX = 4096
ASK_S_MAX = 1.0
"""From the connection to the end of its question, the handshake of TLS included."""
DIAL_S_MAX = 2.0
SILENCE_S_MAX = 5.0
"""Neither end waits longer for the other to send, or to take, something."""
FETCH_S_MAX = 60.0
"""For all of a transfer, at the end that takes."""
DIALS_MAX = 4
"""Connections of one transfer: one that broke is dialled again."""
DIAL_PAUSE_S = 0.1
"""An offer may come to its node after the other node has come for it."""
_LENGTH = struct.Struct("!I")
_BLOCK = struct.Struct("!I16s")
"""The number of a block, and the digest of its pages, which follow."""
_ALL = b"\x01"
"""What the end that takes says when it has all."""

_WRONG = ValueError, TypeError, RecursionError
"""What reading a wrong question raises, as of brackets within brackets."""

log = logging.getLogger(__name__)


def reachable_host(controller: str) -> str:
    """The address of this machine by which it reaches the controller: other nodes of the cell reach
    it by the same. Raises Unavailable.
    """
    host, port = parse_address(controller)
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as to:
            to.connect(where)  # sends nothing
            return str(to.getsockname()[0])
    except OSError as error:
        raise Unavailable(f"{controller} cannot be reached: {error.strerror or error}") from error


@dataclass(slots=True, eq=False)
class _Offered:
    offer: OfferKv
    expires_s: float
    uses_left: int = DIALS_MAX
    in_use: bool = False
    first: int = 0
    """The first block of the last range that was asked for: no later one begins before it."""


class KvStream:
    """A node's end; see `mesh.runtime.node_actions.KvTransfers`. `address` is that of the listening
    socket. Threads of its own carry the bytes: at most CONNECTIONS_MAX send, and the controller
    bounds the transfers that come.
    """

    def __init__(
        self,
        *,
        node_id: NodeId,
        host: str,
        engine: Engine,
        lanes: Lanes,
        loop: asyncio.AbstractEventLoop,
        tls: Tls | None,
        held: Callable[[], None] = lambda: None,
    ) -> None:
        """Listens at a free port. `held` is called on the loop when `held_bytes` has changed.
        Raises Unavailable.
        """
        self._node_id = node_id
        self._engine = engine
        self._lanes = lanes
        self._loop = loop
        self._serving = None if tls is None else _context(ssl.PROTOCOL_TLS_SERVER, tls)
        self._dialling = None if tls is None else _context(ssl.PROTOCOL_TLS_CLIENT, tls)
        self._lock = threading.Lock()
        self._offers: dict[str, _Offered] = {}
        """By ticket."""
        self.held_bytes = 0
        """The memory of the transfers that come and are not in the engine yet, each taken whole."""
        self._held = held
        self._connections = 0
        self._closed = False
        self._listening = listening_socket(format_address(host, 0))
        self.address = format_address(host, self._listening.getsockname()[1])
        threading.Thread(target=self._accept, name="mesh-kv", daemon=True).start()

    def close(self) -> None:
        """Take no more connections; those that there are end with the process."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def offer(self, offer: OfferKv) -> None:
        now_s = time.monotonic()
        with self._lock:
            for ticket in [t for t, known in self._offers.items() if known.expires_s <= now_s]:
                del self._offers[ticket]
            while len(self._offers) >= OFFERS_MAX:
                del self._offers[next(iter(self._offers))]
            if offer.ticket:
                self._offers[offer.ticket] = _Offered(offer, now_s + offer.expires_s)

    def fetch(self, action: FetchKv, then: Fetched) -> Callable[[], None]:
        cancelled = threading.Event()

        def work() -> None:
            result: KvFetched | MeshError
            try:
                result = self._fetch(action, cancelled)
            except MeshError as error:
                result = error
            except Exception as error:
                log.exception("a transfer of KV blocks failed unexpectedly")
                result = EngineError(f"{type(error).__name__}: {error}")
            if not cancelled.is_set():
                call_on(self._loop, then, result)
            elif isinstance(result, KvFetched):
                result.release()

        threading.Thread(target=work, name="mesh-kv-fetch", daemon=True).start()
        return cancelled.set

    # The end that takes.

    def _fetch(self, action: FetchKv, cancelled: threading.Event) -> KvFetched:
        """All blocks, over as many connections as it may take. Their memory is held from the first
        header on, until the engine has them.
        """
        held_bytes = 0

        def hold(header: KvHeader) -> None:
            nonlocal held_bytes
            now_bytes = action.source.blocks * header.block_bytes
            if held_bytes not in (0, now_bytes):
                raise ValueError("blocks of another size come than before")
            self._hold(now_bytes - held_bytes)
            held_bytes = now_bytes

        try:
            fetched = self._come(action, cancelled, hold)
        except BaseException:
            self._hold(-held_bytes)
            raise
        return replace(fetched, release=partial(self._hold, -held_bytes))

    def _hold(self, more_bytes: int) -> None:
        if more_bytes:
            with self._lock:
                self.held_bytes += more_bytes
            call_on(self._loop, self._held)

    def _come(
        self, action: FetchKv, cancelled: threading.Event, hold: Callable[[KvHeader], None]
    ) -> KvFetched:
        began_s, source, came = time.monotonic(), action.source, list[KvChunk]()
        give_up_s = began_s + FETCH_S_MAX
        error: MeshError = Unavailable("it was given up")
        for dials in range(DIALS_MAX):
            if cancelled.wait(DIAL_PAUSE_S * dials):
                break
            try:
                with self._dial(source.address) as to:
                    _tell(
                        to,
                        {
                            "ticket": source.ticket,
                            "node": self._node_id,
                            "first": len(came),
                            "blocks": source.blocks - len(came),
                        },
                    )
                    header = _header(to, len(came), source.blocks, give_up_s)
                    hold(header)
                    for chunk in _chunks(to, header, give_up_s):
                        came.append(chunk)
                        if cancelled.is_set():
                            raise error
                    with contextlib.suppress(OSError):
                        to.sendall(_ALL)
                whole = KvHeader(**{**asdict(header), "first_block": 0, "blocks": source.blocks})
                return KvFetched(
                    header=whole,
                    chunks=came,
                    moved_bytes=sum(len(chunk.pages) for chunk in came),
                    elapsed_s=time.monotonic() - began_s,
                )
            except (OSError, ValueError) as broke:
                reason = f"{type(broke).__name__}: {broke}"
                error = Unavailable(f"no KV blocks come from {source.node_id}: {reason}")
        raise error

    def _dial(self, address: str) -> socket.socket:
        host, port = parse_address(address)
        to = socket.create_connection((host, port), DIAL_S_MAX)
        try:
            if self._dialling is not None:
                to = self._dialling.wrap_socket(to)
                _check_node(to)
            to.settimeout(SILENCE_S_MAX)
        except BaseException:
            to.close()
            raise
        return to

    # The end that gives.

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(DIAL_PAUSE_S)  # as when there are no descriptors left
                continue
            with self._lock:
                takes = self._connections < CONNECTIONS_MAX
                self._connections += takes
            if takes:
                threading.Thread(
                    target=self._serve, args=(connection,), name="mesh-kv-send", daemon=True
                ).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        """A connection that shows no valid ticket within ASK_S_MAX is closed."""
        offered, give_up_s = None, time.monotonic() + ASK_S_MAX
        try:
            connection.settimeout(ASK_S_MAX)
            if self._serving is not None:
                connection = self._serving.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
                _shake(connection)
                _check_node(connection)
            asked = json.loads(_read_sized(connection, ASK_BYTES_MAX, give_up_s))
            connection.settimeout(SILENCE_S_MAX)
            first, blocks = int(asked["first"]), int(asked["blocks"])
            offered = self._claim(asked, first)
            self._send(connection, offered, first, blocks)
        except (OSError, ArithmeticError, LookupError, MeshError, *_WRONG) as error:
            log.info("a transfer of KV blocks ends: %s", error)
        finally:
            with contextlib.suppress(OSError):
                connection.close()
            with self._lock:
                self._connections -= 1
                if offered is not None:
                    offered.in_use = False

    def _claim(self, asked: Any, first: int) -> _Offered:
        """What a ticket is good for: at most DIALS_MAX connections until it expires, none of which
        begins before the one before it. Raises Unavailable for any other.
        """
        with self._lock:
            offered = self._offers.get(asked["ticket"])
            good = offered is not None and not offered.in_use and offered.uses_left > 0
            if offered is None or not good or offered.offer.to != asked["node"]:
                raise Unavailable("nobody was offered that")
            if time.monotonic() >= offered.expires_s:
                raise Unavailable("an offer has expired")
            if first < offered.first:
                raise Unavailable(f"block {first} has been sent already")
            offered.first = first
            offered.in_use, offered.uses_left = True, offered.uses_left - 1
            return offered

    def _send(self, to: socket.socket, offered: _Offered, first: int, blocks: int) -> None:
        offer = offered.offer

        def begin() -> tuple[KvHeader, Iterator[KvChunk], list[KvChunk]]:
            header, chunks = self._engine.export_kv(
                offer.instance_id, offer.request_id, first, blocks
            )
            return header, chunks, some_of(header, chunks)

        def some_of(header: KvHeader, chunks: Iterator[KvChunk]) -> list[KvChunk]:
            return list(islice(chunks, max(KV_SLICE_BYTES // header.block_bytes, 1)))

        try:
            header, chunks, some = self._computed(begin)
        except EngineError as error:
            _tell(to, {"error": error.message})
            raise
        if header.blocks * header.block_bytes > KV_MOVE_BYTES_MAX:
            raise EngineError(f"{header.blocks} KV blocks are more than may go at a time")
        _tell(to, asdict(header))
        left = header.blocks
        while some:
            if time.monotonic() >= offered.expires_s:
                raise Unavailable("an offer has expired")
            for chunk in some:
                to.sendall(_BLOCK.pack(chunk.block, chunk.digest))
                to.sendall(chunk.pages)
            left -= len(some)
            some = self._computed(partial(some_of, header, chunks)) if left else []
        if to.recv(1) == _ALL:
            # Until the other end has all of it, it may have to come again.
            with self._lock:
                self._offers.pop(offer.ticket, None)

    def _computed(self, call: Callable[[], Any]) -> Any:
        """What the call yields in the compute lane, between two iterations. Raises MeshError."""
        results: SimpleQueue[Any] = SimpleQueue()

        def done(result: Any) -> None:
            results.put(result)

        self._lanes.run(Lane.COMPUTE, call, done)
        try:
            result = results.get(timeout=SILENCE_S_MAX)
        except Empty:
            raise Unavailable("the engine computes for too long") from None
        if isinstance(result, MeshError):
            raise result
        return result


def _context(protocol: int, tls: Tls) -> ssl.SSLContext:
    """Certificates of the cell's authority alone are trusted; what they are of is checked after the
    handshake, since nodes have no names in theirs.
    """
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=tls.authority.decode())
    context.load_cert_chain(tls.folder / f"{tls.part}.pem", tls.folder / f"{tls.part}.key")
    return context


def _shake(secured: ssl.SSLSocket) -> None:
    """The handshake, within ASK_S_MAX: the socket's own limit is for each of its bytes."""
    late = threading.Timer(ASK_S_MAX, socket.socket.shutdown, (secured, socket.SHUT_RDWR))
    late.start()
    try:
        secured.do_handshake()
    finally:
        late.cancel()


def _check_node(secured: socket.socket) -> None:
    """Raises ssl.SSLError where the other end is no node of the cell."""
    assert isinstance(secured, ssl.SSLSocket)
    shown: Any = secured.getpeercert() or {}
    names = [
        value for part in shown.get("subject", ()) for kind, value in part if kind == "commonName"
    ]
    if names != [NODE_NAME]:
        raise ssl.SSLError(f"the other end is {names}, and no node")


def _tell(to: socket.socket, said: dict[str, Any]) -> None:
    written = json.dumps(said).encode()
    to.sendall(_LENGTH.pack(len(written)) + written)


def _read_sized(of: socket.socket, most: int, give_up_s: float) -> bytes:
    (size,) = _LENGTH.unpack(_read(of, _LENGTH.size, give_up_s))
    if size > most:
        raise ValueError(f"{size} bytes are announced, {most} may be")
    return bytes(_read(of, size, give_up_s))


def _read(of: socket.socket, size: int, give_up_s: float) -> bytearray:
    whole = bytearray(size)
    view, begin = memoryview(whole), 0
    while begin < size:
        left_s = give_up_s - time.monotonic()
        if left_s <= 0.0:
            raise TimeoutError("it takes too long")
        of.settimeout(min(left_s, SILENCE_S_MAX))
        count = of.recv_into(view[begin:])
        if not count:
            raise ConnectionError("the other end has closed the connection")
        begin += count
    return whole


def _header(of: socket.socket, first: int, blocks: int, give_up_s: float) -> KvHeader:
    """Raises ValueError where it is not of what was asked for, EngineError where there is no such
    thing.
    """
    said = json.loads(_read_sized(of, HEADER_BYTES_MAX, give_up_s))
    if isinstance(said, dict) and "error" in said:
        raise EngineError(f"the other node hands no KV blocks over: {said['error']}")
    try:
        header = KvHeader(**said)
        asked = header.first_block == first and header.blocks == blocks - first
        fits = header.block_bytes > 0 and blocks * header.block_bytes <= KV_MOVE_BYTES_MAX
    except TypeError as error:
        raise ValueError(f"that is no header of KV blocks: {error}") from error
    if not (asked and fits):
        raise ValueError(f"blocks {first} to {blocks} were asked for, and others come")
    return header


def _chunks(of: socket.socket, header: KvHeader, give_up_s: float) -> Iterator[KvChunk]:
    """Raises ValueError for a block that is torn: it is asked for again."""
    for position in range(header.blocks):
        block, digest = _BLOCK.unpack(_read(of, _BLOCK.size, give_up_s))
        chunk = KvChunk(
            block=block, digest=digest, pages=bytes(_read(of, header.block_bytes, give_up_s))
        )
        try:
            yield checked_chunk(header, chunk, position)
        except EngineError as error:
            raise ValueError(error.message) from error
