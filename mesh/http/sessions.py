"""Sessions of the page on a cell that wants keys: who has shown a key need not show it again.

A browser keeps a random token in a cookie that no script can read. The key stays in the
controller's memory, and is looked at with each request, so that a revoked one opens nothing. What
changes something carries a second token in a header, which pages of other origins cannot read.
Before: `access`, which asks for what a session stands for, and the routes. After: the gate.
"""

import hmac
import secrets
from collections import Counter
from collections.abc import Callable

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mesh.domain.access import Caller, Role
from mesh.domain.errors import Forbidden, Unauthenticated
from mesh.domain.values import dataclass
from mesh.http.bodies import read
from mesh.http.exchange import Bodies, Endpoint, Exchange
from mesh.http.refusals import encoded
from mesh.http.tools import Strict
from mesh.wire.access import Gate

COOKIE = "mesh_session"
"""The port follows: a browser sends the cookies of a host to all of its ports."""
TOKEN_HEADER = "x-mesh-csrf"
SESSION_S_MAX = 12 * 3600.0
SESSIONS_MAX = 1_000
"""Beyond that the oldest of the key that has the most ends."""
SIGN_INS_MAX, SIGN_IN_BYTES_MAX = 64, 64 << 10
"""Bodies of those who sign in that are being read, and their bytes: anybody may send them, and an
address has a tenant's share of them.
"""
SIGN_IN_S_MAX = 2.0
"""For such a body, which is one packet."""
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
ROLES = frozenset({Role.ADMIN, Role.TENANT})
_TOKEN_BYTES = 32
_SHOWN_CHARS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    authorization: str
    csrf: str
    until_s: float


class Sessions:
    """`now_s` is a monotonic clock in seconds."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._open: dict[str, _Session] = {}

    def begin(self, authorization: str) -> tuple[str, str]:
        """A new session: its cookie's value and its token for changes."""
        now_s = self._now_s()
        self._open = {token: one for token, one in self._open.items() if one.until_s > now_s}
        if len(self._open) >= SESSIONS_MAX:
            ((most, _),) = Counter(one.authorization for one in self._open.values()).most_common(1)
            oldest = (t for t, one in self._open.items() if one.authorization == most)
            del self._open[next(oldest)]
        token, csrf = secrets.token_urlsafe(_TOKEN_BYTES), secrets.token_urlsafe(_TOKEN_BYTES)
        until_s = now_s + SESSION_S_MAX
        self._open[token] = _Session(authorization=authorization, csrf=csrf, until_s=until_s)
        return token, csrf

    def end(self, request: Request) -> None:
        self._open.pop(request.cookies.get(cookie_of(request), ""), None)

    def of(self, request: Request) -> _Session | None:
        """The session of a request's cookie; `None` where there is none, or where it is over."""
        found = self._open.get(request.cookies.get(cookie_of(request), ""))
        return found if found is not None and found.until_s > self._now_s() else None

    def authorization(self, request: Request) -> str | None:
        """What the request shows: its own key, or its session's. Raises Forbidden for a change by a
        session without its token, or from another origin.
        """
        own = shown_in(request)
        session = None if own is not None else self.of(request)
        if session is None:
            return own
        check_origin(request)
        given = request.headers.get(TOKEN_HEADER, "")
        if request.method not in SAFE and not hmac.compare_digest(
            given.encode(), session.csrf.encode()
        ):
            raise Forbidden(
                f"a change by a session needs its token in the header {TOKEN_HEADER}",
                hint="reload the page",
            )
        return session.authorization


def cookie_of(request: Request) -> str:
    """The name of its session's cookie, by the port that the browser has asked."""
    port = request.headers.get("host", "").rpartition(":")[2]
    return f"{COOKIE}_{port}" if port.isdecimal() else COOKIE


def shown_in(request: Request) -> str | None:
    """The header, or a key by the header that Anthropic's clients have for it."""
    given, key = request.headers.get("authorization"), request.headers.get("x-api-key")
    return f"Bearer {key}" if given is None and key is not None else given


class _SignIn(Strict):
    key: str = Field(min_length=1, max_length=400)


class Session(Endpoint):
    """GET says whose session it is, POST begins one by a key, DELETE ends it.
    It is open to all: who is nobody learns that.
    """

    def __init__(self, sessions: Sessions, gate: Gate, bodies: Bodies) -> None:
        self._sessions = sessions
        self._gate = gate
        self._bodies = bodies

    async def answer(self, exchange: Exchange, request: Request) -> None:
        if request.method == "POST":
            check_origin(request)
            peer = request.client.host if request.client else ""
            async with exchange.body(self._bodies, SIGN_IN_S_MAX, of=peer) as raw:
                authorization = f"Bearer {read(_SignIn, raw).key}"
            caller = self._gate.check(authorization, ROLES)
            token, csrf = self._sessions.begin(authorization)
            response = _whose(caller, wants_keys=self._gate.wants_keys, csrf=csrf)
            response.set_cookie(
                cookie_of(request),
                token,
                max_age=int(SESSION_S_MAX),
                httponly=True,
                samesite="strict",
                secure=request.url.scheme == "https",
            )
        elif request.method == "DELETE":
            self._sessions.authorization(request)
            self._sessions.end(request)
            response = _whose(None, wants_keys=self._gate.wants_keys)
            response.delete_cookie(cookie_of(request), httponly=True, samesite="strict")
        else:
            response = self._by_cookie(request)
        await exchange.respond(response)

    def _by_cookie(self, request: Request) -> Response:
        if not self._gate.wants_keys:
            return _whose(Caller(), wants_keys=False)
        session = self._sessions.of(request)
        if session is None:
            return _whose(None, wants_keys=True)
        try:
            caller = self._gate.check(session.authorization, ROLES)
        except (Unauthenticated, Forbidden):
            self._sessions.end(request)
            return _whose(None, wants_keys=True)
        return _whose(caller, wants_keys=True, csrf=session.csrf)


def check_origin(request: Request) -> None:
    """Changes are for pages of this very origin, and for clients that are no pages. Raises
    Forbidden.
    """
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
        raise Forbidden(
            f"a page of {origin[:_SHOWN_CHARS]!r} may change nothing here",
            hint="open the page of this cell itself",
        )


def _whose(caller: Caller | None, *, wants_keys: bool, csrf: str = "") -> Response:
    whose = {
        "wants_keys": wants_keys,
        "role": None if caller is None else caller.role,
        "tenant": None if caller is None else caller.tenant,
        "csrf": csrf,
    }
    return Response(
        encoded(whose), media_type="application/json", headers={"cache-control": "no-store"}
    )
