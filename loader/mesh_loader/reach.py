"""Which addresses a fetch may connect to: public ones, and those that the operator has named.

A source is a tenant's text, and what answers it can send the fetch on to anywhere. So every name
is resolved here, once, each address is checked, and the connection goes to a checked address: a
name that leads elsewhere at its second resolution (DNS rebinding) gains nothing. Before:
`http_download`, `hub_download` and `s3_download`, at every hop. The operator's names come from
`mesh.domain.source_rules`.
"""

import socket
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from urllib.parse import unquote

from mesh.domain.errors import InvalidInput
from mesh.domain.source_rules import names_host
from mesh.domain.values import dataclass

REDIRECTS_MAX = 5
"""From the source to its content. Hubs and mirrors need two or three."""
ADDRESSES_MAX = 8
"""At most so many addresses of one name are tried, one after the other."""
_SHOWN_CHARS = 100
_IPV6_UNICAST = IPv6Network("2000::/3")
"""What is routed in public; all else is local, reserved or a way to write an IPv4 address."""
_NAT64 = IPv6Network("64:ff9b::/96")
_NOT_PUBLIC = (
    IPv4Network("192.0.0.0/24"),
    IPv4Network("192.88.99.0/24"),
    IPv6Network("2002::/16"),
    IPv6Network("3fff::/20"),
)
"""Beside what `ipaddress` of all supported Pythons calls private, reserved or multicast."""


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether an address is neither loopback, link-local, private, shared, multicast nor reserved,
    by itself or as the IPv4 address that it stands for."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address in _NAT64:
            return is_public(IPv4Address(address.packed[-4:]))
        if address not in _IPV6_UNICAST:
            return False
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_reserved
        and not any(address in network for network in _NOT_PUBLIC)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Where one fetch may go. `named`: the operator's hosts; see `SourceRules.named_hosts`."""

    named: tuple[str, ...] = ()

    def of(self, host: str, port: int) -> "Reach":
        """The reach of a fetch that begins at this host. One that begins at a host which the
        operator has not named gets to no private address by any redirect."""
        return self if names_host(self.named, host, port) else NOWHERE_PRIVATE

    def addresses(self, host: str, port: int) -> list[str]:
        """Checked addresses of a host, to connect to. Raises InvalidInput where one of them is not
        public and the operator has not named the host, or where this can be no name, and OSError
        where the name has none.
        """
        # In a URL the % before a zone is written as one that is escaped.
        bare = unquote(host.strip("[]").rstrip("."))
        try:
            found = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)
        except ValueError as error:  # an empty label, or one of more than 63 characters
            raise InvalidInput(
                f"{host[:_SHOWN_CHARS]!r} is no name of a host", hint="check the URL"
            ) from error
        addresses = list(dict.fromkeys(str(one[4][0]) for one in found))[:ADDRESSES_MAX]
        if names_host(self.named, bare, port):
            return addresses
        for address in addresses:
            # The zone behind a % is the machine's own name for one of its links.
            plain = ip_address(address.partition("%")[0])
            if not is_public(plain) and not names_host(self.named, str(plain), port):
                raise refusal(bare)
        return addresses

    def check(self, host: str, port: int) -> None:
        """As `addresses`, for a connection that a proxy makes, which resolves names by itself: what
        this machine cannot resolve is left to it."""
        try:
            self.addresses(host, port)
        except OSError:
            return


NOWHERE_PRIVATE = Reach()


def refusal(host: str) -> InvalidInput:
    """Names no address: who asks need not learn how this machine resolves its names."""
    return InvalidInput(
        f"{host} is at an address that is not public, from which nothing is fetched",
        hint="the operator of the node allows a host by --sources admin=all,http://HOST",
    )
