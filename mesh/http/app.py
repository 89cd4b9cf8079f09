"""The routes of the HTTP edge, and what becomes of a request that fits none of them."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mesh import __version__
from mesh.domain.access import ANYONE, Caller
from mesh.domain.errors import InvalidInput, MeshError, NotFound, Unavailable
from mesh.domain.ids import DeploymentName
from mesh.domain.lifecycle import NodeState
from mesh.domain.views import CellSnapshot, DeploymentSnapshot
from mesh.http.access import Keys
from mesh.http.answers import ChatWriter, CompletionWriter
from mesh.http.batches import Batches, batch_routes
from mesh.http.bodies import ChatBody, CompletionBody, read
from mesh.http.embeddings import Embeddings, OllamaEmbed, Rerank
from mesh.http.exchange import Bodies
from mesh.http.feed import Feed
from mesh.http.files import file_routes
from mesh.http.generation import Generation, NewWriter, Read
from mesh.http.kept_responses import KeptResponses
from mesh.http.keyring import KeyStore, keyring
from mesh.http.lingering import Lingering
from mesh.http.message_answers import MessageWriter
from mesh.http.messages import read_messages
from mesh.http.models import Models
from mesh.http.ollama import Listed, Show, read_generate, read_ollama_chat, refuse
from mesh.http.openapi import document
from mesh.http.operating import Operate, operating_together
from mesh.http.page import Page
from mesh.http.reading import Reads, reading
from mesh.http.refusals import (
    Failure,
    dialect_of,
    encoded,
    error_headers,
    json_response,
    status_and_code,
)
from mesh.http.responses import CountInput, Responses
from mesh.http.sessions import SIGN_IN_BYTES_MAX, SIGN_INS_MAX, Session, Sessions, shown_in
from mesh.http.together import Gateway
from mesh.http.tokens import CountTokens, Detokenize, Tokenize
from mesh.http.viewing import CellEvents, cell_route
from mesh.runtime.operator import Operator
from mesh.wire.access import ROUTES, Gate

ABOUT = {
    "name": "mesh",
    "version": __version__,
    "description": "LLM inference by the protocols of OpenAI, whose clients take the path /v1 as "
    "their base, and of Anthropic.",
    "documentation": "/openapi.json",
}
EVENTS = "/api/v1/events"
EXPOSED = (
    "x-request-id",
    "request-id",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    "x-slo-grace-ms",
)
"""Headers of answers that pages of other origins may read."""


def application(
    *,
    gateway: Gateway,
    snapshot: Callable[[], CellSnapshot],
    find: Callable[[DeploymentName, Sequence[DeploymentSnapshot]], DeploymentSnapshot],
    metrics: Callable[[], Awaitable[bytes]],
    feed: Feed,
    operator: Operator,
    reads: Reads,
    keys: KeyStore | None = None,
    batches: Batches | None = None,
    page: bool = True,
    gate: Gate | None = None,
    hosts_allowed: frozenset[str] = frozenset(),
    origins: frozenset[str] = frozenset(),
) -> Starlette:
    """`find` finds a deployment by name among those given, and raises NotFound; `metrics` renders
    them in Prometheus' text format; `feed` is what viewers follow, `operator` does what they ask,
    `reads` is what they ask for beside it, `keys` the cell's, if it wants any; `batches` go on from
    now on; a front has neither; `page` is whether browsers get one; `hosts_allowed`,
    in lower case, and `origins`: see `access`.
    """
    models = Models(snapshot, find, int(time.time()))

    async def what(request: Request) -> Response:
        return json_response(ABOUT)

    described: list[bytes] = []
    describing = asyncio.Lock()

    async def openapi(request: Request) -> Response:
        async with describing:
            if not described:
                described.append(await asyncio.to_thread(lambda: encoded(document())))
        return Response(described[0], media_type="application/json")

    async def ping(request: Request) -> Response:
        return Response()

    async def release(request: Request) -> Response:
        return json_response({"version": __version__})

    async def live(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(request: Request) -> Response:
        if gateway.stopping:
            raise Unavailable("the controller is stopping")
        seen = snapshot()
        # A cell that says how many nodes it wants is called before it has any.
        if not seen.wanted and not any(node.state is NodeState.READY for node in seen.nodes):
            raise Unavailable("no node is ready", hint="`mesh nodes` shows those that there are")
        return await live(request)

    async def scrape(request: Request) -> Response:
        return Response(await metrics(), media_type="text/plain; version=0.0.4")

    gate = gate or Gate()
    bodies = Bodies()
    sessions = Sessions(time.monotonic)
    responses = Responses(KeptResponses(time.monotonic))
    listed = Listed(snapshot)
    counted = CountInput(gateway, responses, bodies)
    ranks = Rerank(gateway, bodies)

    def check_viewer(request: Request) -> Caller:
        return gate.check(sessions.authorization(request), ROUTES[EVENTS] or ()) or ANYONE

    def opened(request: Request) -> None:
        with suppress(MeshError):  # who may not view is told so later
            feed.expect(check_viewer(request))

    pages = Page(encoded(ABOUT), shown=page, opened=opened)

    calls: dict[str, ASGIApp] = {"/v1/embeddings": Embeddings(gateway, bodies)}

    def generates(path: str, read: Read, *, tells_stops: bool = False) -> Route:
        calls[path] = Generation(gateway, read, bodies, tells_stops=tells_stops)
        return Route(path, calls[path], methods=["POST"])

    routes = [
        Route("/", pages.root),
        Route("/page/{file:path}", pages.file),
        Route("/v1", what),
        generates("/v1/chat/completions", lambda raw: (read(ChatBody, raw), ChatWriter)),
        generates("/v1/completions", read_completion),
        generates(
            "/v1/messages", lambda raw: (read_messages(raw), MessageWriter), tells_stops=True
        ),
        Route("/v1/messages/count_tokens", CountTokens(gateway, bodies), methods=["POST"]),
        generates("/v1/responses", responses.read),
        Route("/v1/responses/input_tokens", counted, methods=["POST"]),
        Route("/v1/responses/{id}", responses.one, methods=["GET", "DELETE"]),
        Route("/v1/responses/{id}/cancel", responses.cancel, methods=["POST"]),
        Route("/v1/embeddings", calls["/v1/embeddings"], methods=["POST"]),
        *file_routes(None if batches is None else batches.store),
        *batch_routes(batches, bodies),
        *[Route(f"{path}/rerank", ranks, methods=["POST"]) for path in ("", "/v1", "/v2")],
        Route("/v1/models", models.list),
        Route("/v1/models/{model:path}", models.get),
        Route("/tokenize", Tokenize(gateway, bodies), methods=["POST"]),
        Route("/detokenize", Detokenize(gateway, bodies), methods=["POST"]),
        Route("/ping", ping, methods=["GET", "POST"]),
        Route("/version", release),
        cell_route(feed),
        Route(EVENTS, CellEvents(feed, check_viewer), methods=["GET"]),
        Route(
            "/api/v1/session",
            Session(sessions, gate, Bodies(bytes_max=SIGN_IN_BYTES_MAX, count_max=SIGN_INS_MAX)),
            methods=["GET", "POST", "DELETE"],
        ),
        Route("/api/v1/deployments/{model}/{verb}", Operate(operator, bodies), methods=["POST"]),
        generates("/api/chat", read_ollama_chat),
        generates("/api/generate", read_generate),
        Route("/api/tags", listed.tags),
        Route("/api/ps", listed.ps),
        Route("/api/embed", OllamaEmbed(gateway, bodies), methods=["POST"]),
        Route("/api/show", Show(gateway, bodies), methods=["POST"]),
        Route("/api/version", release),
        Route("/api/{unbuilt}", refuse, methods=["POST", "DELETE"]),
        *operating_together(operator, bodies, reads.threads),
        *reading(lambda: reads),
        *keyring(keys, bodies),
        Route("/healthz", live),
        Route("/readyz", ready),
        Route("/metrics", scrape),
        Route("/openapi.json", openapi),
    ]
    if batches is not None:
        batches.serve(calls, gateway.deployment)
    return assembled(routes, gate, sessions, hosts_allowed, origins)


def assembled(
    routes: list[Route],
    gate: Gate,
    sessions: Sessions,
    hosts_allowed: frozenset[str] = frozenset(),
    origins: frozenset[str] = frozenset(),
) -> Starlette:
    """The routes behind the gate, with an answer for each error."""
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(Lingering),
            Middleware(
                Keys,
                gate=gate,
                routes=routes,
                refusing=_keyless,
                hosts=hosts_allowed,
                origins=origins,
                sessions=sessions,
            ),
        ],
        exception_handlers={HTTPException: _unrouted, MeshError: _refused, Exception: _failed},
    )


def read_completion(raw: bytes) -> tuple[CompletionBody, NewWriter]:
    """Raises InvalidInput."""
    body = read(CompletionBody, raw)
    return body, partial(
        CompletionWriter,
        echo=bool(body.echo),
        only=body.max_tokens == 0,
        tells_prompt=body.prompt_logprobs is not None,
    )


def standing_by(why: Callable[[bool], MeshError], gate: Gate) -> ASGIApp:
    """Answers everything with an error, but that it lives. `why` is told whether the gate knows
    the caller.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if request.url.path == "/healthz":
            response = json_response({"status": "standing by"})
        else:
            response = _keyless(request, why(gate.knows(shown_in(request))))
            response.headers["retry-after"] = "1"
        await response(scope, receive, send)

    return answer


def shared(app: ASGIApp, origins: frozenset[str]) -> ASGIApp:
    """The same for pages of these origins, too. It goes around all else: a browser shows no key in
    its preflight, and lets a page read an error where it could have read the answer.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST", "DELETE"),
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=EXPOSED,
    )


async def _unrouted(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        missing = NotFound(f"there is no {request.url.path}")
        return _error_response(request, missing, 404, "not_found")
    response = _error_response(
        request,
        InvalidInput(f"{request.method} {request.url.path}: {error.detail}"),
        error.status_code,
        "method_not_allowed" if error.status_code == 405 else "invalid_request",
    )
    response.headers.update(error.headers or {})
    return response


async def _refused(request: Request, error: Exception) -> Response:
    return _keyless(request, error)


def _keyless(request: Request, error: Exception) -> Response:
    assert isinstance(error, MeshError)
    return _error_response(request, error, *status_and_code(error))


async def _failed(request: Request, error: Exception) -> Response:
    fault = MeshError(f"unexpected {type(error).__name__}: {error}")
    return _error_response(request, fault, *status_and_code(fault))


def _error_response(request: Request, error: MeshError, status: int, code: str) -> Response:
    failure = Failure(error=error, status=status, code=code)
    status, body = dialect_of(request.url.path).refusal(failure)
    response = json_response(body, status)
    response.raw_headers += error_headers(error)
    return response
