"""What an operator does at a front: done by the cells, for whom the caller is.

A deployment goes to its home cells, as many as `spec.cells` says, and every other change to each
cell that has it. A cell that is away gets what it lacks once it is back (`cells.FrontCells`); but
nothing is deleted while one is, since it would bring it back. Before: `mesh.controller.control` and
the page. After: the cells.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
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
from mesh.domain.views import CellSnapshot, Prospect
from mesh.front.cells import FrontCells
from mesh.runtime.operator import Replies
from mesh.v1 import control_pb2 as pb
from mesh.v1 import model_pb2
from mesh.wire.access import caller, said_for
from mesh.wire.codec import to_wire

_Said = ReplyProgress | ReplyDone | MeshError


class FrontOperating:
    """`snapshot` is what the caller may see of the cells."""

    def __init__(
        self, cells: FrontCells, snapshot: Callable[[], CellSnapshot], replaying: Replaying
    ) -> None:
        self._cells = cells
        self._snapshot = snapshot
        self._replaying = replaying

    def deploy(self, given: DeploymentSpec) -> Replies:
        """Raises InvalidInput, AlreadyExists for the name of another tenant, and Unavailable where
        none of the home cells can be asked.
        """
        check_spec(given)
        if given.cells > len(self._cells.links):
            raise InvalidInput(
                f"cells is {given.cells}; this front is before {len(self._cells.links)}",
                hint="lower spec.cells, or name more with --cells",
            )
        asks, known = caller(), self._cells.spec(given.name)
        if known is not None and not asks.may_see(known):
            raise AlreadyExists(f"the name {given.name!r} is taken", hint="choose another one")
        own = given.tenant if asks.role is Role.ADMIN else asks.tenant
        tenant, edition = own if known is None else known.tenant, 1
        if known is not None:
            same = replace(known, edition=0) == replace(given, tenant=tenant, edition=0)
            edition = known.edition + (not same)
        spec = replace(given, tenant=tenant, edition=edition)
        having, led = self._cells.specs(spec.name), set(self._cells.led)
        homes = ranked(spec.name, self._cells.links)[: spec.cells]
        wanted = list(dict.fromkeys([*homes, *having]))
        away = [cell for cell in wanted if cell not in led]
        asked = [cell for cell in wanted if cell in led]
        if not asked:
            raise Unavailable(
                f"the cells of {spec.name!r} are away: {', '.join(away)}",
                hint="try again when one of them answers; `mesh nodes` shows which do",
            )
        request = pb.DeployRequest(spec=to_wire(spec, model_pb2.DeploymentSpec))
        return self._in_each(asked, "Deploy", request, away=away)

    def prospect(self, spec: DeploymentSpec) -> Prospect:
        raise Unavailable("what would become of a deployment is a cell's to say", hint="ask a cell")

    async def replay(self, name: DeploymentName, of: DeploymentName | None) -> Replies:
        message = await self._replaying.replay(name, name if of is None else of)
        yield ReplyDone(operation_id=OperationId(""), message=message)

    def load(self, name: DeploymentName) -> Replies:
        """In its first cell: the others load it when that is full."""
        return self._in_each(self._having(name)[:1], "Load", pb.LoadRequest(name=name))

    def unload(self, name: DeploymentName) -> Replies:
        return self._in_each(self._having(name), "Unload", pb.UnloadRequest(name=name))

    def delete(self, name: DeploymentName) -> Replies:
        """Raises Unavailable while a cell that may have it is away."""
        here, spec = self._having(name), self._cells.spec(name)
        may_have = ranked(name, self._cells.links)[: spec.cells if spec is not None else 1]
        led = set(self._cells.led)
        away = [
            one for one in {**dict.fromkeys(may_have), **self._cells.specs(name)} if one not in led
        ]
        if away:
            raise Unavailable(
                f"{', '.join(away)}, which may have {name!r}, is away, and would bring it back",
                hint="delete it when all of its cells answer, or leave that cell out of --cells",
            )
        return self._in_each(here, "Delete", pb.DeleteRequest(name=name))

    def undo(self, name: DeploymentName, to: int | None) -> Replies:
        return self._in_each(self._having(name), "Undo", pb.UndoRequest(name=name, to=to))

    def profile(self, name: DeploymentName, node_id: NodeId | None) -> Replies:
        cells = self._having(name)[:1]
        if node_id is not None:
            cell, node_id = self._node(node_id)
            cells = [cell]
        return self._in_each(cells, "Profile", pb.ProfileRequest(name=name, node_id=node_id))

    def scale(
        self,
        name: DeploymentName,
        *,
        replicas_min: int | None,
        replicas_max: int | None,
        keep_alive_s: float | None,
    ) -> Replies:
        request = pb.ScaleRequest(
            name=name,
            replicas_min=replicas_min,
            replicas_max=replicas_max,
            keep_alive_s=keep_alive_s,
        )
        return self._in_each(self._having(name), "Scale", request)

    def drain(self, node_id: NodeId, *, undo: bool) -> Replies:
        cell, node = self._node(node_id)
        return self._in_each([cell], "Drain", pb.DrainRequest(node_id=node, undo=undo))

    def _having(self, name: DeploymentName) -> list[CellName]:
        """The cells that have a deployment and can be asked, its home cells first. Raises NotFound,
        or Unavailable where there is none.
        """
        find_deployment(name, self._snapshot())
        having, led = self._cells.specs(name), self._cells.led
        found = [cell for cell in ranked(name, self._cells.links) if cell in having and cell in led]
        if not found:
            raise Unavailable(f"the cells of {name!r} are away: {', '.join(having)}")
        return found

    def _node(self, node_id: NodeId) -> tuple[CellName, NodeId]:
        """A node as its cell knows it. Raises NotFound."""
        cell, _, node = node_id.partition("/")
        if CellName(cell) not in self._cells.links:
            raise NotFound(
                f"there is no node {node_id[:100]!r}", hint="at a front nodes are named CELL/NODE"
            )
        return CellName(cell), NodeId(node)

    async def _in_each(
        self, cells: Sequence[CellName], method: str, request: Any, *, away: Sequence[str] = ()
    ) -> AsyncGenerator[ReplyProgress | ReplyDone, None]:
        """The same in several cells at once. Raises the first error, once all have ended; it says
        what the others have done.
        """
        shown, told = said_for(caller()), asyncio.Queue[tuple[CellName, _Said]](64)

        async def run(cell: CellName) -> None:
            end: _Said = MeshError("it ended without an answer")
            try:
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
            await told.put((cell, end))

        runs = [asyncio.create_task(run(cell)) for cell in cells]
        done: dict[CellName, str] = {}
        failed: dict[CellName, MeshError] = {}
        try:
            while len(done) + len(failed) < len(cells):
                cell, said = await told.get()
                if isinstance(said, MeshError):
                    failed[cell] = said
                elif isinstance(said, ReplyDone):
                    done[cell] = said.message
                else:
                    yield replace(said, phase=f"{cell}: {said.phase}")
        finally:
            for task in runs:
                task.cancel()
            await asyncio.gather(*runs, return_exceptions=True)
        if failed:
            first, error = next(iter(failed.items()))
            others = f"; done in {', '.join(done)}" if done else ""
            error.message = f"{first}: {error.message}{others}"
            raise error
        if len(cells) == 1 and not away:
            message = done[cells[0]]
        else:
            message = "; ".join(f"{said} in {cell}" for cell, said in done.items())
        if away:
            message += f"; {', '.join(away)} is away, and gets it when it is back"
        yield ReplyDone(operation_id=OperationId(""), message=message)
