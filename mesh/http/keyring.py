"""`/api/v1/keys`: what an operator of a cell with keys does with them, for the page.

A new key is told once, in the answer to its making. Before: the routes. After: the controller's
book of keys.
"""

import asyncio
import time
from typing import Literal, Protocol

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mesh.domain.access import NOBODY, Key, Role, TenantName
from mesh.domain.errors import NotFound
from mesh.http.bodies import read
from mesh.http.exchange import Bodies, Endpoint, Exchange
from mesh.http.refusals import encoded, json_response
from mesh.http.sessions import check_origin
from mesh.http.tools import Strict
from mesh.report.plain import plain, plain_fields

DAY_S = 86_400.0
DAYS_MAX = 36_500
HEADERS = {"cache-control": "no-store"}


class KeyStore(Protocol):
    """The keys of a cell. Its methods wait for the disk, and may be called from any thread."""

    def create(
        self, role: Role, tenant: TenantName, *, expires_unix_s: float | None = None
    ) -> tuple[str, Key]: ...

    def revoke(self, key_id: str) -> None: ...

    def all_keys(self) -> tuple[Key, ...]: ...


class _Create(Strict):
    role: Literal["admin", "tenant", "node"] = "tenant"
    tenant: str = ""
    days: float | None = Field(default=None, gt=0, le=DAYS_MAX)
    """Until it expires; `null` for never."""


class _Keyring(Endpoint):
    """GET lists the keys, POST makes one."""

    def __init__(self, store: KeyStore | None, bodies: Bodies) -> None:
        self._store = store
        self._bodies = bodies

    async def answer(self, exchange: Exchange, request: Request) -> None:
        store = found(self._store)
        if request.method == "POST":
            check_origin(request)
            async with exchange.body(self._bodies) as raw:
                asked = read(_Create, raw)
            until_s = None if asked.days is None else time.time() + asked.days * DAY_S
            tenant = TenantName(asked.tenant) if asked.tenant else NOBODY
            secret, key = await asyncio.to_thread(
                store.create, Role(asked.role), tenant, expires_unix_s=until_s
            )
            body = encoded({"key": secret, **plain_fields(key)})
        else:
            body = encoded(plain(await asyncio.to_thread(store.all_keys)))
        await exchange.respond(Response(body, media_type="application/json", headers=HEADERS))


def keyring(store: KeyStore | None, bodies: Bodies) -> list[Route]:
    """The routes. Without a store, on a cell that wants no keys, they say so."""

    async def revoke(request: Request) -> Response:
        check_origin(request)
        key_id = request.path_params["key_id"]
        await asyncio.to_thread(found(store).revoke, key_id)
        return json_response({"message": f"{key_id} was revoked"})

    return [
        Route("/api/v1/keys", _Keyring(store, bodies), methods=["GET", "POST"]),
        Route("/api/v1/keys/{key_id}/revoke", revoke, methods=["POST"]),
    ]


def found(store: KeyStore | None) -> KeyStore:
    """Raises NotFound."""
    if store is None:
        raise NotFound(
            "this cell wants no keys", hint="`mesh up --keys` and `mesh controller --keys` do"
        )
    return store
