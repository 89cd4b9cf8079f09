"""The key of an HTTP request: whose it is, or why it is not answered. Before all routes.

Where no key is wanted, a page that a browser on this machine shows must not reach the cell by a
name of its own that leads here (DNS rebinding): over the loopback only names of the loopback count,
and those that the operator allows. Pages of origins that the operator allows may ask.
"""

from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mesh.domain.access import Role
from mesh.domain.errors import Forbidden, MeshError, Unauthenticated
from mesh.http.sessions import Sessions
from mesh.wire.access import ROUTES, Gate
from mesh.wire.channel import is_loopback

Refusing = Callable[[Request, Exception], Response]

ANY_ORIGIN = "*"
_SHOWN_CHARS = 100


class Keys:
    """ASGI middleware. What fits no route is an operator's, as is a route of no table."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        gate: Gate,
        routes: list[Route],
        refusing: Refusing,
        hosts: frozenset[str],
        origins: frozenset[str],
        sessions: Sessions,
    ) -> None:
        self._app = app
        self._sessions = sessions
        self._hosts = hosts
        self._origins = origins
        self._gate = gate
        self._routes = routes
        self._refusing = refusing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope)
            try:
                self._check(request)
            except MeshError as error:
                response = self._refusing(request, error)
                if isinstance(error, Unauthenticated):
                    response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, request: Request) -> None:
        if not self._gate.wants_keys:
            _check_names(request, self._hosts, self._origins)
            return
        roles = self._roles(request.scope)
        if roles is not None:
            self._gate.admit(self._sessions.authorization(request), roles)

    def _roles(self, scope: Scope) -> frozenset[Role] | None:
        for route in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                return ROUTES.get(route.path, frozenset({Role.ADMIN}))
        return frozenset({Role.ADMIN})


def _check_names(request: Request, hosts_allowed: frozenset[str], origins: frozenset[str]) -> None:
    """Raises Forbidden."""
    server = request.scope.get("server")
    # A listener on [::] has the addresses of IPv4 within those of IPv6.
    if server is None or not is_loopback(server[0].removeprefix("::ffff:")):
        return
    for header, is_ours in (("host", _leads_here), ("origin", _is_loopback)):
        given = request.headers.get(header)
        if header == "origin" and not origins.isdisjoint((given, ANY_ORIGIN)):
            continue
        host = "" if given is None else _host_of(given)
        if given is not None and host not in hosts_allowed and not is_ours(host):
            raise Forbidden(
                f"the {header} {given[:_SHOWN_CHARS]!r} is no name of this machine's loopback",
                hint="ask for 127.0.0.1 or localhost, or start the controller with "
                "--http-host-allowed NAME or --keys; --http-cors ORIGIN lets a page ask",
            )


def _host_of(given: str) -> str:
    """The host in a URL, or in a host with its port; empty where there is none."""
    try:
        return urlsplit(given if "//" in given else f"//{given}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def _leads_here(host: str) -> bool:
    """An address cannot be made to lead elsewhere than it does."""
    return _is_loopback(host) or _address(host) is not None


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None
