"""The key of an HTTP request: whose it is, or why it is not answered. Before all routes."""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mesh.domain.access import Role
from mesh.domain.errors import MeshError, Unauthenticated
from mesh.wire.access import ROUTES, Gate

Told = Callable[[Request, Exception], Response]


class Keys:
    """ASGI middleware. What fits no route is an operator's, as is a route of no table."""

    def __init__(self, app: ASGIApp, *, gate: Gate, routes: list[Route], told: Told) -> None:
        self._app = app
        self._gate = gate
        self._routes = routes
        self._told = told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._gate.wants_keys:
            roles = self._roles(scope)
            request = Request(scope)
            try:
                if roles is not None:
                    self._gate.admit(request.headers.get("authorization"), roles)
            except MeshError as error:
                response = self._told(request, error)
                if isinstance(error, Unauthenticated):
                    response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _roles(self, scope: Scope) -> frozenset[Role] | None:
        for route in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                return ROUTES.get(route.path, frozenset({Role.ADMIN}))
        return frozenset({Role.ADMIN})
