"""What an operator does at a front: done by the cells, for whom the caller is.

A deployment goes to its home cells, as many as `spec.cells` says, and every other change to each
cell that has it; each cell checks it as if the caller had come to it. What a cell did not do is
told, and done by the same command again: a front by itself deploys, changes and deletes nothing.
Before: `mesh.controller.control` and the page. After: the cells.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from mesh.controller.lookup import find_deployment
from mesh.controller.replaying import Replaying
from mesh.core.front import ranked
from mesh.domain.access import Role
from mesh.domain.actions import ReplyDone, ReplyProgress
from mesh.domain.checks import check_spec
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import AlreadyExists, InvalidInput, MeshError, NotFound, Unavailable
from mesh.domain.ids import CellName, DeploymentName, NodeId, OperationId
from mesh.domain.revision import RevisionState, public
from mesh.domain.values import replace
from mesh.domain.views import Arrivals, Deployed, DeploymentSnapshot, InstancePlan, Prospect
from mesh.front.cells import FrontCells
from mesh.runtime.operator import Replies
from mesh.v1 import control_pb2 as pb
from mesh.v1 import model_pb2
from mesh.wire.access import caller, said_for
from mesh.wire.codec import to_wire

_Said = ReplyProgress | ReplyDone | MeshError
_COMING = (RevisionState.IMPORTING, RevisionState.STARTING)

logger = logging.getLogger(__name__)


class FrontOperating:
    """`seen` gives the deployments that the caller may see."""

    def __init__(
        self, cells: FrontCells, seen: Callable[[], Sequence[Deployed]], replaying: Replaying
    ) -> None:
        self._cells = cells
        self._seen = seen
        self._replaying = replaying

    async def deploy(self, given: DeploymentSpec) -> Replies:
        """Raises InvalidInput, AlreadyExists for the name of another tenant, and what a cell has
        raised that did not take it.
        """
        check_spec(given)
        if given.cells > len(self._cells.links):
            raise InvalidInput(
                f"cells is {given.cells}; this front is before {len(self._cells.links)}",
                hint="lower spec.cells, or name more with --cells",
            )
        await self._cells.refresh()
        asks, known = caller(), self._cells.specs(given.name)
        if not all(map(asks.may_see, known.values())):
            raise AlreadyExists(f"the name {given.name!r} is taken", hint="choose another one")
        _check_one_tenant(given.name, known)
        if asks.role is not Role.ADMIN:
            given = replace(given, tenant=asks.tenant)
        for spec in known.values():
            given = replace(given, tenant=spec.tenant)  # what an operator changes stays whose it is
        homes = ranked(given.name, self._cells.links)[: given.cells]
        request = pb.DeployRequest(spec=to_wire(given, model_pb2.DeploymentSpec))
        asked = dict.fromkeys([*homes, *known], request)
        again = "`mesh deploy` with the same manifest"
        async for reply in self._in_each(asked, again):
            yield reply

    def prospect(self, spec: DeploymentSpec) -> Prospect:
        raise InvalidInput(
            "a front does not foresee what would become of a deployment",
            hint="ask a controller of one of its cells: --controller HOST:PORT",
        )

    def plan(self, name: DeploymentName, calls: Arrivals | None) -> InstancePlan:
        raise InvalidInput(
            "a front plans no instances: each of its cells has nodes of its own",
            hint="ask a controller of one of its cells: --controller HOST:PORT",
        )

    async def replay(self, name: DeploymentName, of: DeploymentName | None) -> Replies:
        message = await self._replaying.replay(name, name if of is None else of)
        yield ReplyDone(operation_id=OperationId(""), message=message)

    async def load(self, name: DeploymentName) -> Replies:
        """In its first cell: the others load it when that is full."""
        cell = self._first(await self._having(name))
        async for reply in self._in_each({cell: pb.LoadRequest(name=name)}):
            yield reply

    async def unload(self, name: DeploymentName) -> Replies:
        asked = dict.fromkeys(await self._having(name), pb.UnloadRequest(name=name))
        async for reply in self._in_each(asked, f"`mesh unload {name}`"):
            yield reply

    async def delete(self, name: DeploymentName) -> Replies:
        """In each cell that has it, or may have it since it was not seen yet."""
        await self._cells.refresh()
        unseen = [link.name for link in self._cells.links.values() if not link.listed]
        own = self._own(name)
        if not own and not unseen:
            find_deployment(name, self._seen())
        asked = dict.fromkeys([*own, *unseen], pb.DeleteRequest(name=name))
        async for reply in self._in_each(asked, f"`mesh delete {name}`"):
            yield reply

    async def undo(self, name: DeploymentName, to: int | None) -> Replies:
        """Numbers of revisions are each cell's own: what `to` means is looked up where the caller
        sees it, in the first cell. Each goes back to its own revision of that spec, and where it
        has had none the spec is deployed.
        """
        having = await self._having(name)
        meant = _meant(having[self._first(having)], to)
        asked = {cell: _way_back(one, meant) for cell, one in having.items()}
        number = "" if to is None else f" --to {to}"
        again = f"`mesh rollout undo {name}{number}`, or `mesh deploy` with what it is to be"
        async for reply in self._in_each(asked, again):
            yield reply

    async def profile(
        self,
        name: DeploymentName,
        node_id: NodeId | None,
        *,
        operators: bool = False,
        cores: tuple[int, ...] = (),
    ) -> Replies:
        cell = self._first(await self._having(name))
        if node_id is not None:
            cell, node_id = self._node(node_id)
        request = pb.ProfileRequest(name=name, node_id=node_id, operators=operators, cores=cores)
        async for reply in self._in_each({cell: request}):
            yield reply

    async def scale(
        self,
        name: DeploymentName,
        *,
        replicas_min: int | None,
        replicas_max: int | None,
        keep_alive_s: float | None,
        revision: int | None = None,
    ) -> Replies:
        request = pb.ScaleRequest(
            name=name,
            replicas_min=replicas_min,
            replicas_max=replicas_max,
            keep_alive_s=keep_alive_s,
            revision=revision,
        )
        asked = dict.fromkeys(await self._having(name), request)
        async for reply in self._in_each(asked, f"`mesh scale {name} …` as before"):
            yield reply

    async def drain(self, node_id: NodeId, *, undo: bool) -> Replies:
        cell, node = self._node(node_id)
        asked = {cell: pb.DrainRequest(node_id=node, undo=undo)}
        async for reply in self._in_each(asked):
            yield reply

    def _own(self, name: DeploymentName) -> dict[CellName, DeploymentSnapshot]:
        """The cells in which the caller has it, as far as they have been seen, the first home cell
        first. Raises AlreadyExists where an operator may mean those of several tenants.
        """
        specs = self._cells.specs(name)
        own = {cell: spec for cell, spec in specs.items() if caller().may_see(spec)}
        _check_one_tenant(name, own)
        return {cell: self._cells.links[cell].deployments[name] for cell in own}

    async def _having(self, name: DeploymentName) -> dict[CellName, DeploymentSnapshot]:
        """What `_own` gives, of the cells as they are now. Raises NotFound, too."""
        await self._cells.refresh()
        own = self._own(name)
        if not own:
            find_deployment(name, self._seen())
            raise Unavailable(f"{name!r} is being deleted", hint="try again")
        return own

    def _first(self, having: Mapping[CellName, DeploymentSnapshot]) -> CellName:
        """The first that answers, if one does."""
        return next((cell for cell in having if self._cells.links[cell].leader), next(iter(having)))

    def _node(self, node_id: NodeId) -> tuple[CellName, NodeId]:
        """A node as its cell knows it. Raises NotFound."""
        cell, _, node = node_id.partition("/")
        if CellName(cell) not in self._cells.links:
            raise NotFound(
                f"there is no node {node_id[:100]!r}", hint="at a front nodes are named CELL/NODE"
            )
        return CellName(cell), NodeId(node)

    async def _in_each(self, asked: Mapping[CellName, Any], again: str = "") -> Replies:
        """The same in several cells at once, with the request of each, or what is said without
        asking it; `again` is the command that repeats it. Raises an error once all have ended where
        one has: it says which cells have done it, and why the others have not.
        """
        shown, told = said_for(caller()), asyncio.Queue[tuple[CellName, _Said]](64)

        async def run(cell: CellName, request: Any) -> None:
            end: _Said = MeshError("it ended without an answer")
            try:
                if isinstance(request, ReplyDone):
                    await told.put((cell, request))
                    return
                method = type(request).__name__.removesuffix("Request")
                operation = self._cells.links[cell].operate(method, request, shown)
                async with aclosing(operation) as replies:
                    async for reply in replies:
                        if isinstance(reply, ReplyDone):
                            end = reply
                        else:
                            await told.put((cell, reply))
                await self._cells.links[cell].list()  # so that the front knows what it has done
            except MeshError as error:
                end = error
                if isinstance(request, pb.DeleteRequest) and isinstance(error, NotFound):
                    end = ReplyDone(operation_id=OperationId(""), message="not there")
            except Exception as error:
                logger.exception("%s in %s failed", type(request).__name__, cell)
                end = MeshError(f"unexpected {type(error).__name__}: {error}")
            await told.put((cell, end))

        runs = [asyncio.create_task(run(cell, request)) for cell, request in asked.items()]
        done: dict[CellName, ReplyDone] = {}
        failed: dict[CellName, MeshError] = {}
        try:
            while len(done) + len(failed) < len(asked):
                cell, said = await told.get()
                if isinstance(said, MeshError):
                    failed[cell] = said
                elif isinstance(said, ReplyDone):
                    done[cell] = said
                else:
                    yield replace(said, phase=f"{cell}: {said.phase}")
        finally:
            for task in runs:
                task.cancel()
            await asyncio.gather(*runs, return_exceptions=True)
        messages = [f"{done[cell].message} in {cell}" for cell in asked if cell in done]
        if failed:
            error = failed[next(cell for cell in asked if cell in failed)]
            whys = [f"not in {cell}: {failed[cell].message}" for cell in asked if cell in failed]
            error.message = "; ".join([*messages, *whys])
            if done and again:
                error.hint = f"repeat it when {', '.join(failed)} can do it, too: {again}"
            raise error
        if len(asked) == 1:
            yield done[next(iter(asked))]
            return
        amiss = "; ".join(f"{cell}: {done[cell].amiss}" for cell in asked if done[cell].amiss)
        yield ReplyDone(operation_id=OperationId(""), message="; ".join(messages), amiss=amiss)


def _check_one_tenant(name: DeploymentName, specs: Mapping[CellName, DeploymentSpec]) -> None:
    """Raises AlreadyExists where a name is of several tenants, in one cell each."""
    if len({spec.tenant for spec in specs.values()}) > 1:
        said = ", ".join(f"{spec.tenant or 'nobody'} in {cell}" for cell, spec in specs.items())
        raise AlreadyExists(
            f"{name!r} is of several tenants: {said}",
            hint="delete all but one of them at a controller of its cell, or choose another name",
        )


def _meant(shown: DeploymentSnapshot, to: int | None) -> DeploymentSpec:
    """What revision `to` was, or what served before. Raises NotFound."""
    if to is None and any(one.state in _COMING for one in shown.revisions):
        return shown.spec
    for one in reversed(shown.revisions):
        if one.number == to or (to is None and one.state is RevisionState.PAST):
            return public(one.spec)
    which = "earlier revision" if to is None else f"revision {to}"
    known = ", ".join(str(one.number) for one in shown.revisions)
    raise NotFound(
        f"{shown.spec.name!r} has no {which} to go back to", hint=f"there is {known or 'none'}"
    )


def _way_back(one: DeploymentSnapshot, meant: DeploymentSpec) -> Any:
    """How a cell gets back to a spec: what it is asked, or what is said without asking it."""
    coming = [r for r in one.revisions if r.state in _COMING]
    if one.spec == meant:
        if coming:
            return pb.UndoRequest(name=meant.name)
        return ReplyDone(operation_id=OperationId(""), message="unchanged")
    for revision in reversed(one.revisions):
        if public(revision.spec) == meant and revision.state is not RevisionState.IMPORTING:
            return pb.UndoRequest(name=meant.name, to=revision.number)
    return pb.DeployRequest(spec=to_wire(meant, model_pb2.DeploymentSpec))
