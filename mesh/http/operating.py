"""`/api/v1/deployments/NAME/VERB`: what an operator does with a deployment, for the page.

The answer comes when it is done; how far it is meanwhile stands in the cell's state. A client that
leaves cancels what can be cancelled. Before: the routes. After: the controller's `operating`.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from mesh.domain.actions import ReplyDone, ReplyProgress
from mesh.domain.errors import NotFound
from mesh.domain.ids import DeploymentName, NodeId
from mesh.http.bodies import read
from mesh.http.exchange import Bodies, Exchange
from mesh.http.refusals import encoded
from mesh.http.sessions import check_origin
from mesh.http.tools import Strict

Replies = AsyncGenerator[ReplyProgress | ReplyDone, None]
_SHOWN_CHARS = 100


class Operator(Protocol):
    """What the controller does; each raises errors of the tree before it begins."""

    def load(self, name: DeploymentName) -> Replies: ...

    def unload(self, name: DeploymentName) -> Replies: ...

    def delete(self, name: DeploymentName) -> Replies: ...

    def undo(self, name: DeploymentName, to: int | None) -> Replies: ...

    def profile(self, name: DeploymentName, node_id: NodeId | None) -> Replies: ...

    def scale(
        self,
        name: DeploymentName,
        *,
        replicas_min: int | None,
        replicas_max: int | None,
        keep_alive_s: float | None,
    ) -> Replies: ...


class _Nothing(Strict):
    """A verb without further words."""


class _Undo(Strict):
    to: int | None = None


class _Profile(Strict):
    node_id: str | None = None


class _Scale(Strict):
    replicas_min: int | None = None
    replicas_max: int | None = None
    keep_alive_s: float | None = None


class Operate:
    """An ASGI application."""

    def __init__(self, operator: Operator, bodies: Bodies) -> None:
        self._bodies = bodies
        self._operator = operator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._bodies)
        request = Request(scope)
        async with exchange.answering():
            check_origin(request)
            async with exchange.body() as raw:
                given = raw
            name = DeploymentName(request.path_params["model"])
            with exchange.watched(lambda _: None):
                message = ""
                async with aclosing(self._begun(name, request, given)) as replies:
                    async for reply in replies:
                        message = reply.message if isinstance(reply, ReplyDone) else ""
                await exchange.json(encoded({"message": message}))

    def _begun(self, name: DeploymentName, request: Request, given: bytes) -> Replies:
        """Raises NotFound for no verb of ours, and InvalidInput for a body that is none of its."""
        operator = self._operator
        match request.path_params["verb"]:
            case "load":
                read(_Nothing, given)
                return operator.load(name)
            case "unload":
                read(_Nothing, given)
                return operator.unload(name)
            case "delete":
                read(_Nothing, given)
                return operator.delete(name)
            case "undo":
                return operator.undo(name, read(_Undo, given).to)
            case "profile":
                node_id = read(_Profile, given).node_id
                return operator.profile(name, None if node_id is None else NodeId(node_id))
            case "scale":
                return operator.scale(name, **read(_Scale, given).model_dump())
            case _:
                raise NotFound(
                    f"there is no {request.url.path[:_SHOWN_CHARS]}",
                    hint="verbs: load, unload, scale, profile, undo, delete",
                )
