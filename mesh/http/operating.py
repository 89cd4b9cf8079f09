"""`/api/v1/deployments/NAME/VERB`: what an operator does with a deployment, for the page; and
`/deploy` and `/prospect`, which take manifests.

The answer comes when it is done; how far it is meanwhile stands in the cell's state. A client that
leaves cancels what can be cancelled. Before: the routes. After: the controller's `operating`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from starlette.requests import Request
from starlette.routing import Route

from mesh.domain.actions import ReplyDone
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import MeshError, NotFound
from mesh.domain.ids import DeploymentName, NodeId
from mesh.http.bodies import read
from mesh.http.exchange import Bodies, Endpoint, Exchange
from mesh.http.refusals import encoded
from mesh.http.sessions import check_origin
from mesh.http.tools import Strict
from mesh.manifest.specs import read_manifests
from mesh.report.plain import Plain, plain
from mesh.runtime.operator import Operator, Replies
from mesh.wire.work_threads import WorkThreads

_SHOWN_CHARS = 100

logger = logging.getLogger(__name__)


class _Nothing(Strict):
    """A verb without further words."""


class _Manifest(Strict):
    manifest: str
    """The file's text."""
    file: str = "manifest"
    """Its name, for messages."""


class _Replay(Strict):
    of: str | None = None


class _Undo(Strict):
    to: int | None = None


class _Profile(Strict):
    node_id: str | None = None


class _Scale(Strict):
    replicas_min: int | None = None
    replicas_max: int | None = None
    keep_alive_s: float | None = None


class Operate(Endpoint):
    """One verb on one deployment."""

    def __init__(self, operator: Operator, bodies: Bodies) -> None:
        self._bodies = bodies
        self._operator = operator

    async def answer(self, exchange: Exchange, request: Request) -> None:
        check_origin(request)
        async with exchange.body(self._bodies) as raw:
            given = raw
        name = DeploymentName(request.path_params["model"])
        with exchange.watched(lambda _: None):
            message = ""
            async with aclosing(self._begun(name, request, given)) as replies:
                async for reply in replies:
                    message = reply.text if isinstance(reply, ReplyDone) else ""
            await exchange.json(encoded({"message": message}))

    def _begun(self, name: DeploymentName, request: Request, given: bytes) -> Replies:
        """Raises NotFound for no verb of ours, and InvalidInput for a body that is none of its."""
        operator = self._operator
        alone = {"load": operator.load, "unload": operator.unload, "delete": operator.delete}
        match request.path_params["verb"]:
            case verb if verb in alone:
                read(_Nothing, given)
                return alone[verb](name)
            case "undo":
                return operator.undo(name, read(_Undo, given).to)
            case "profile":
                node_id = read(_Profile, given).node_id
                return operator.profile(name, None if node_id is None else NodeId(node_id))
            case "scale":
                return operator.scale(name, **read(_Scale, given).model_dump())
            case "replay":
                of = read(_Replay, given).of
                return operator.replay(name, None if of is None else DeploymentName(of))
            case _:
                raise NotFound(
                    f"there is no {request.url.path[:_SHOWN_CHARS]}",
                    hint="verbs: load, unload, scale, profile, undo, replay, delete",
                )


class OperateAll(Endpoint):
    """A file of manifests, which is read as a whole before anything is done
    with it. `each` does it with one deployment and says what came of it; one that fails does not
    keep the others from being tried. Files are read in `threads`, since 256 KiB take seconds.
    """

    def __init__(
        self,
        each: Callable[[DeploymentSpec], Awaitable[Plain]],
        bodies: Bodies,
        threads: WorkThreads,
    ) -> None:
        self._each = each
        self._bodies = bodies
        self._threads = threads

    async def answer(self, exchange: Exchange, request: Request) -> None:
        check_origin(request)
        specs = await self._specs(exchange)
        if specs is None:
            return
        with exchange.watched(lambda _: None):
            answers: list[Plain] = []
            for spec in specs:
                answers.append(await self._tried(spec))
                await asyncio.sleep(0)  # tokens of calls go out in between
            await exchange.json(encoded({"deployments": answers}))

    async def _specs(self, exchange: Exchange) -> list[DeploymentSpec] | None:
        """The deployments of the file, or `None` where its client has left. The body stays counted
        until the file is read.
        """
        specs = None
        async with exchange.body(self._bodies) as raw:
            with exchange.watched(lambda _: None), self._threads.place():
                specs = await self._threads.run(_read_file, raw)
        return specs

    async def _tried(self, spec: DeploymentSpec) -> Plain:
        name = str(spec.name)
        try:
            return {"name": name, "done": await self._each(spec)}
        except MeshError as error:
            return {"name": name, "error": {"message": error.message, "hint": error.hint}}
        except Exception:
            logger.exception("%s of a manifest failed", name)
            hint = "the controller's log has it"
            return {"name": name, "error": {"message": "an internal error", "hint": hint}}


def _read_file(raw: bytes) -> list[DeploymentSpec]:
    """Raises InvalidInput."""
    given = read(_Manifest, raw)
    return read_manifests([(given.file[:_SHOWN_CHARS], given.manifest.encode(errors="replace"))])


def operating_together(operator: Operator, bodies: Bodies, threads: WorkThreads) -> list[Route]:
    async def deploy(spec: DeploymentSpec) -> Plain:
        message = ""
        async with aclosing(operator.deploy(spec)) as replies:
            async for reply in replies:
                message = reply.text if isinstance(reply, ReplyDone) else ""
        return message or "deployed"

    async def prospect(spec: DeploymentSpec) -> Plain:
        return plain(operator.prospect(spec))

    return [
        Route("/api/v1/deploy", OperateAll(deploy, bodies, threads), methods=["POST"]),
        Route("/api/v1/prospect", OperateAll(prospect, bodies, threads), methods=["POST"]),
    ]
