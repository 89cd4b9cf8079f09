"""The connections of the HTTP server: how many there are, and which of them rest.

A connection rests while it has no request whose head has come: amid its handshake, before its first
request and between two. Those are what anybody can have without a key, so they are bounded, by peer
and in all; beyond a bound the one that has rested longest, of the peer that has most, is closed.
`HttpServer` owns a book of them; its protocol says when one works and when it rests.
"""

import asyncio
import gc
import socket
from contextlib import suppress
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import Any

CONNECTIONS_MAX = 8192
RESTING_MAX = 1024
RESTING_BY_PEER_MAX = 512
"""A proxy before the controller is one peer."""
HANDSHAKE_S_MAX = 10.0
SECURED_ENDED_MAX = 256
"""Connections with TLS that have ended before the collector looks for them: asyncio leaves each as
a cycle of some 300 KB, which are few objects, so that by itself it would not look for long."""
TAKEN_IN_A_ROW_MAX = 64
"""Then those beyond a bound are closed, and requests are answered, before more are taken."""
COLLECT_AFTER_S = 0.1
"""The collector waits this long, so that connections which have just ended are nobody's any
more.
"""


class Connections:
    """The book. For the loop's thread alone."""

    def __init__(
        self,
        *,
        connections_max: int = CONNECTIONS_MAX,
        resting_max: int = RESTING_MAX,
        resting_by_peer_max: int = RESTING_BY_PEER_MAX,
        secured: bool = False,
    ) -> None:
        """`secured`: they are of TLS."""
        self._secured = secured
        self._ended = 0
        """The connections that ended since the collector was last asked to look."""
        self._connections_max = connections_max
        self._resting_max = resting_max
        self._resting_by_peer_max = resting_by_peer_max
        self._taken: dict[int, Taken] = {}
        """By file descriptor."""
        self._resting: dict[str, dict[int, None]] = {}
        """By peer, those that have rested longest first."""

    def __len__(self) -> int:
        return len(self._taken)

    @property
    def resting(self) -> int:
        return sum(map(len, self._resting.values()))

    def begins(self, taken: "Taken") -> None:
        """One was taken. It is closed at once where there are too many and none rests."""
        number = taken.fileno()
        self._taken[number] = taken
        self.rests(number)
        if len(self._taken) > self._connections_max:
            self._shed(max(self._resting, key=lambda peer: len(self._resting[peer])))

    def made(self, number: int) -> None:
        """Its handshake, if any, is over."""
        if number in self._taken:
            self._taken[number].expiry.cancel()

    def rests(self, number: int) -> None:
        taken = self._taken.get(number)
        if taken is None:
            return
        of_peer = self._resting.setdefault(taken.peer, {})
        of_peer.pop(number, None)
        of_peer[number] = None
        if len(of_peer) > self._resting_by_peer_max:
            self._shed(taken.peer)
        elif self.resting > self._resting_max:
            self._shed(max(self._resting, key=lambda peer: len(self._resting[peer])))

    def works(self, number: int) -> None:
        taken = self._taken.get(number)
        of_peer = self._resting.get(taken.peer, {}) if taken else {}
        of_peer.pop(number, None)
        if taken and not of_peer:
            self._resting.pop(taken.peer, None)
        if taken:
            taken.has_asked = True

    def ends(self, number: int) -> None:
        self.works(number)
        taken = self._taken.pop(number, None)
        if taken is None:
            return
        taken.expiry.cancel()
        self._ended += 1
        if self._secured and self._ended >= SECURED_ENDED_MAX:
            self._ended = 0
            asyncio.get_running_loop().call_later(COLLECT_AFTER_S, gc.collect)

    def _shed(self, peer: str) -> None:
        """Close one of this peer's that rest."""
        of_peer = self._resting[peer]
        number = min(of_peer, key=lambda resting: self._taken[resting].has_asked)
        self.works(number)
        self._taken[number].hang_up()


class Listening(socket.socket):
    """A listening socket that enters in the book what it takes. `listening` is given up for it."""

    def __init__(self, listening: socket.socket, book: Connections) -> None:
        super().__init__(fileno=listening.detach())
        self._book = book

    def listen(self, backlog: int = 0) -> None:
        """It does already; asyncio takes as many in a row as it says here."""

    def accept(self) -> tuple[socket.socket, Any]:
        number, address = self._accept()  # type: ignore[attr-defined]
        taken = Taken(number, peer_of(address), self._book)
        taken.setblocking(self.gettimeout() is None)
        self._book.begins(taken)
        return taken, address


class Taken(socket.socket):
    """A connection that was taken. The book loses it when its transport closes it."""

    def __init__(self, number: int, peer: str, book: Connections) -> None:
        super().__init__(fileno=number)
        self.peer = peer
        self.has_asked = False
        self._book = book
        loop = asyncio.get_running_loop()
        self.expiry = loop.call_later(HANDSHAKE_S_MAX, self.hang_up)

    def hang_up(self) -> None:
        """Its transport reads the end, and closes it."""
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self.fileno() >= 0:
            self._book.ends(self.fileno())
        super().close()


def peer_of(address: Any) -> str:
    """Who has the address: of IPv6 its network of 64 bits, which a machine has for itself."""
    try:
        host = ip_address(str(address[0]).partition("%")[0])
    except (ValueError, IndexError, TypeError):
        return str(address)
    if not isinstance(host, IPv6Address):
        return str(host)
    if host.ipv4_mapped is not None:
        return str(host.ipv4_mapped)
    return str(IPv6Network((host, 64), strict=False))
