"""`/api/v1/requests`, `/trace`, `/usage`, `/manifest` and `/report`: what the page reads beside the
feed, and what ends a request; and `/nodes/wanted`, which whoever starts nodes reads.

Before: the routes. After: the controller's `viewed`.
"""

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mesh.domain.access import Caller
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName
from mesh.domain.usage import HOUR_S, Usage, UsageBy, usage_by
from mesh.domain.views import ProfileView
from mesh.http.exchange import until_left
from mesh.http.page import HEADERS
from mesh.http.refusals import encoded, json_response
from mesh.http.sessions import check_origin
from mesh.http.viewing import InPieces
from mesh.manifest.specs import written
from mesh.report.cell_page import page
from mesh.report.cell_report import CellReport
from mesh.report.plain import Plain, json_pieces, plain, plain_json
from mesh.runtime.turns import in_turns
from mesh.wire.access import caller
from mesh.wire.work_threads import WorkThreads

AFTER_MAX = 2**53
USAGE_S_MAX = 400 * 24 * 3600.0
_SHOWN_CHARS = 40


class Reads(Protocol):
    """What the controller tells each caller."""

    @property
    def threads(self) -> WorkThreads: ...

    async def requests(self, asks: Caller, after: int) -> dict[str, object]: ...

    async def request(self, asks: Caller, request_id: str) -> dict[str, object]: ...

    def end(self, asks: Caller, request_id: str) -> None: ...

    def specs(self, asks: Caller, name: DeploymentName | None) -> list[DeploymentSpec]: ...

    def profiles(self, asks: Caller, name: DeploymentName) -> list[ProfileView]: ...

    def wanted(self) -> dict[str, Plain]: ...

    def trace(self, asks: Caller) -> Iterator[Plain]: ...

    async def usage(
        self, asks: Caller, since_unix_s: float, by: UsageBy | None
    ) -> Sequence[Usage]: ...

    async def report(self, asks: Caller, since_s: float) -> CellReport: ...


def reading(reads: Callable[[], Reads]) -> list[Route]:
    """The routes; `reads` gives what is read now."""

    async def requests(request: Request) -> list[bytes]:
        after = _number(request, "after", 0, AFTER_MAX)
        told = await reads().requests(caller(), int(after))
        return await in_turns(json_pieces(told, depth=2))

    async def one(request: Request) -> list[bytes]:
        told = await reads().request(caller(), request.path_params["request_id"])
        return await in_turns(json_pieces(told, depth=1))

    async def cancel(request: Request) -> Response:
        check_origin(request)
        request_id = request.path_params["request_id"]
        reads().end(caller(), request_id)
        return json_response({"message": f"{request_id} was cancelled"})

    async def manifest(request: Request, read: Reads) -> Response:
        name = request.query_params.get("name")
        named = {"content-disposition": 'attachment; filename="mesh-deployments.yaml"'}
        specs = read.specs(caller(), None if name is None else DeploymentName(name))
        text = await read.threads.run(written, specs)
        return Response(text, media_type="application/yaml", headers=named)

    async def profiles(request: Request) -> Response:
        name = DeploymentName(request.path_params["model"])
        told = plain_json(reads().profiles(caller(), name))
        return Response(told, media_type="application/json")

    async def wanted(request: Request) -> Response:
        return json_response(reads().wanted())

    async def trace(request: Request, read: Reads) -> Response:
        body = await read.threads.run(_trace, read.trace(caller()))
        named = {"content-disposition": 'attachment; filename="mesh-trace.json"'}
        return Response(body, media_type="application/json", headers=named)

    async def usage(request: Request, read: Reads) -> Response:
        since_s = _number(request, "since_s", 24 * 3600.0, USAGE_S_MAX)
        by = usage_by(request.query_params.get("by", UsageBy.DEPLOYMENT.value))
        found = await read.usage(caller(), time.time() - since_s, by)
        body = await read.threads.run(_listed, map(plain, found))
        return Response(body, media_type="application/json")

    async def report(request: Request, read: Reads) -> Response:
        since_s = _number(request, "since_s", HOUR_S, USAGE_S_MAX)
        return json_response(plain(await read.report(caller(), since_s)))

    async def report_page(request: Request, read: Reads) -> Response:
        since_s = _number(request, "since_s", HOUR_S, USAGE_S_MAX)
        text = await read.threads.run(page, await read.report(caller(), since_s))
        named = {"content-disposition": 'attachment; filename="mesh-report.html"'}
        return Response(text, media_type="text/html; charset=utf-8", headers={**HEADERS, **named})

    def placed(make: Callable[[Request, Reads], Awaitable[Response]]) -> Callable[..., object]:
        """The endpoint, in a place for work in threads until its client leaves."""

        async def endpoint(request: Request) -> Response:
            read = reads()
            answer: Response | None = None
            with until_left(request.scope), read.threads.place():
                answer = await make(request, read)
            return answer or Response()  # nobody reads an empty one: the client has left

        return endpoint

    return [
        Route("/api/v1/manifest", placed(manifest), methods=["GET"]),
        Route("/api/v1/deployments/{model}/profiles", profiles, methods=["GET"]),
        Route("/api/v1/report", placed(report), methods=["GET"]),
        Route("/api/v1/report.html", placed(report_page), methods=["GET"]),
        Route("/api/v1/nodes/wanted", wanted, methods=["GET"]),
        Route("/api/v1/requests", InPieces(requests), methods=["GET"]),
        Route("/api/v1/requests/{request_id}", InPieces(one), methods=["GET"]),
        Route("/api/v1/requests/{request_id}/cancel", cancel, methods=["POST"]),
        Route("/api/v1/trace", placed(trace), methods=["GET"]),
        Route("/api/v1/usage", placed(usage), methods=["GET"]),
    ]


def _number(request: Request, name: str, otherwise: float, most: float) -> float:
    """Raises InvalidInput for what is no number from 0 to `most`."""
    given = request.query_params.get(name)
    if given is None:
        return otherwise
    try:
        found = float(given)
    except ValueError:
        found = -1.0
    if not 0 <= found <= most:
        raise InvalidInput(
            f"{name}={given[:_SHOWN_CHARS]!r} is no number from 0 to {most:g}",
            hint=f"leave {name} out, or give such a number",
        )
    return found


def _trace(events: Iterator[Plain]) -> bytes:
    return b'{"displayTimeUnit": "ms", "traceEvents": %b}' % _listed(events)


def _listed(entries: Iterator[Plain]) -> bytes:
    """One by one: within one call of json no other thread of the interpreter runs."""
    return b"[" + b",".join(map(encoded, entries)) + b"]"
