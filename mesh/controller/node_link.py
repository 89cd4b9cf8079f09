"""The controller's ends of the links: the NodeLink service, and the performer's NodeLinks port.

A node dials and says hello; the core takes it or closes the link. Then its reports become events
and the core's commands go down, from a bounded queue. A link ends once, for whatever reason comes
first, and the core is told unless it has asked for that itself.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from mesh.controller.kv_tickets import KvTickets
from mesh.domain.errors import InvalidInput, MeshError, Unavailable
from mesh.domain.events import ControllerEvent, NodeConnected, NodeDisconnected, NodeReported
from mesh.domain.ids import NodeId
from mesh.domain.limits import HEARTBEAT_S
from mesh.domain.messages import NodeCommand, NodeHello, NodeStarting
from mesh.domain.node_rule import NodeRule
from mesh.runtime.link_life import NO_EPOCH, CellEpoch
from mesh.v1 import node_link_pb2 as pb
from mesh.v1.node_link_pb2_grpc import NodeLinkServicer
from mesh.wire.codec import from_wire, report_from_wire, welcome
from mesh.wire.connection import obeyed_by
from mesh.wire.errors import error_named
from mesh.wire.mailbox import Mailbox
from mesh.wire.malformed import Malformed
from mesh.wire.unread import command_written, report_read

LINKS_MAX = 1024
HELLO_S_MAX = 5.0
"""From the call to the node's hello."""
COMMANDS_MAX = 10_000
"""At most so many commands wait to be sent; a node that takes them more slowly counts as gone."""

M = TypeVar("M")

logger = logging.getLogger(__name__)


class _Link:
    """`ended` holds why: an error for the node, and whether the core asked for it."""

    def __init__(self, link_id: int, epoch: CellEpoch) -> None:
        self.link_id = link_id
        self.epoch = epoch
        """What the node is told that it obeys."""
        self.commands: Mailbox[pb.NodeCommand] = Mailbox(COMMANDS_MAX)
        self.ended: asyncio.Future[MeshError] = asyncio.get_running_loop().create_future()
        self.core_knows = False

    def end(self, error: MeshError) -> None:
        if not self.ended.done():
            self.ended.set_result(error)


class NodeLinks(NodeLinkServicer):
    """Link ids are counted up and never used twice. It keeps what nodes say that have not joined
    yet, for as long as their calls last; the core does not know of them. Nodes obey no lower
    `epoch` than they have obeyed, and none of another cell; where it is of no lease (`leased`),
    those alone are told of it that have obeyed one, under which the registry was in PostgreSQL:
    whoever begins with an empty SQLite file has the nodes of the file before it. `later` is called
    with a higher epoch of this cell that a node has obeyed: a caller who shows what `may_join`
    wants.
    """

    def __init__(
        self,
        *,
        post: Callable[[ControllerEvent], None],
        epoch: CellEpoch = NO_EPOCH,
        leased: bool = False,
        later: Callable[[int], None] = lambda epoch: None,
        may_join: Callable[[Any], bool] = lambda context: False,
    ) -> None:
        self._post = post
        self._epoch = epoch
        self._leased = leased
        self._later = later
        self._may_join = may_join
        self._links: dict[int, _Link] = {}
        self._starting: dict[object, NodeStarting] = {}
        """By call, what each of them said last."""
        self._tickets = KvTickets()
        self._made = 0
        self._stopping = False

    def accept(self, link_id: int, rule: NodeRule) -> None:
        link = self._links.get(link_id)
        if link is not None:
            link.commands.put(welcome(HEARTBEAT_S, rule, link.epoch))

    def send(self, link_id: int, command: NodeCommand) -> None:
        link = self._links.get(link_id)
        if link is None:
            return
        try:
            message = command_written(self._tickets.drawn(command))
        except InvalidInput as error:
            # The node would do something else than the core believes.
            link.end(Unavailable(error.message))
            return
        if not isinstance(message, pb.NodeCommand):
            self._post(NodeReported(link_id=link_id, report=message))
        elif not link.commands.put(message):
            reason = f"{COMMANDS_MAX} commands wait to be sent, which is the limit"
            link.end(Unavailable(reason))

    def close(self, link_id: int, *, error: str, message: str, hint: str) -> None:
        link = self._links.get(link_id)
        if link is not None:
            link.core_knows = True
            link.end(error_named(error, message, hint=hint))

    def stop(self) -> None:
        """End all links and take no more."""
        self._stopping = True
        for link in self._links.values():
            link.core_knows = True
            link.end(Unavailable("the controller is stopping"))

    def starting(self) -> tuple[NodeStarting, ...]:
        """The nodes that have not joined yet, by name."""
        return tuple(sorted(self._starting.values(), key=lambda one: one.node_id))

    def why_not(self, context: Any) -> str:
        """Why the caller must not obey this controller: it has obeyed a later leader, or one of
        another cell, as it says. Empty where it may.
        """
        obeyed = obeyed_by(context)
        why = self._epoch.why_not_after(obeyed)
        # The epochs of other cells say nothing of this one, nor do those of no known cell.
        if why and obeyed.cell == self._epoch.cell and self._may_join(context):
            self._later(obeyed.number)
        return why

    async def Start(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[pb.NodeStarting | Malformed], context: Any
    ) -> None:
        call = object()
        try:
            async for message in request_iterator:
                if call not in self._starting and len(self._starting) >= LINKS_MAX:
                    raise Unavailable(f"{LINKS_MAX} nodes are starting, which is the limit")
                self._starting[call] = from_wire(_parsed(message), NodeStarting)
        finally:
            self._starting.pop(call, None)

    async def Connect(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[pb.NodeReport | Malformed], context: Any
    ) -> None:
        if self._stopping:
            raise Unavailable("the controller is stopping")
        if len(self._links) >= LINKS_MAX:
            raise Unavailable(f"{len(self._links)} nodes are linked, which is the limit")
        if why := self.why_not(context):
            raise Unavailable(
                why, hint="see that --join names one cell; to move the node here, start it again"
            )
        self._made += 1
        told = self._epoch if self._leased or obeyed_by(context).number else NO_EPOCH
        link = self._links[self._made] = _Link(self._made, told)
        try:
            hello = await _hello(request_iterator)
            await self._serve(link, hello, request_iterator, context)
        finally:
            del self._links[link.link_id]

    async def _serve(
        self,
        link: _Link,
        hello: NodeHello,
        reports: AsyncIterator[pb.NodeReport | Malformed],
        context: Any,
    ) -> None:
        """From the hello to the end. Raises what the node is told of that end."""
        tasks = [
            asyncio.ensure_future(_write(link, context)),
            asyncio.ensure_future(self._read(link, hello.node_id, reports)),
        ]
        reason = "the link broke"
        try:
            self._post(NodeConnected(link_id=link.link_id, hello=hello))
            ends: list[asyncio.Future[Any]] = [*tasks, link.ended]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not link.ended.done():
                reason = "the node closed the link"
                link.end(_why(tasks) or Unavailable(reason))
            reason = link.ended.result().message
            raise link.ended.result()
        finally:
            link.commands.close()
            for task in tasks:
                task.cancel()
            # Before anything is awaited: when a node dies, gRPC ends its reports and cancels this
            # call, too, which may come amid the wait below.
            if not link.core_knows:
                self._post(NodeDisconnected(link_id=link.link_id, reason=reason))
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(
        self, link: _Link, node_id: NodeId, reports: AsyncIterator[pb.NodeReport | Malformed]
    ) -> None:
        unknown = 0
        async for message in reports:
            report = report_read(_parsed(message))
            if report is None:
                unknown += 1
                if unknown == 1:
                    logger.warning("of %s's reports some are of no known kind", node_id)
                continue
            if isinstance(report, NodeHello):
                raise InvalidInput("a hello is the first report of a link, and no later one")
            if link.ended.done():
                return
            self._post(NodeReported(link_id=link.link_id, report=report))


async def _write(link: _Link, context: Any) -> None:
    while commands := await link.commands.take():
        for command in commands:
            await context.write(command)


async def _hello(reports: AsyncIterator[pb.NodeReport | Malformed]) -> NodeHello:
    """The node's first report. Raises InvalidInput when that is none, or does not come in time."""
    try:
        async with asyncio.timeout(HELLO_S_MAX):
            message = await anext(reports, None)
    except TimeoutError:
        raise InvalidInput(f"no hello within {HELLO_S_MAX:g} s") from None
    if message is None:
        raise InvalidInput("the link ended before a hello")
    hello = report_from_wire(_parsed(message))
    if not isinstance(hello, NodeHello):
        raise InvalidInput(f"the first report is {type(hello).__name__}; it must be a hello")
    return hello


def _parsed(message: M | Malformed) -> M:
    if isinstance(message, Malformed):
        raise InvalidInput(message.message)
    return message


def _why(tasks: "list[asyncio.Task[None]]") -> MeshError | None:
    """The first error among the tasks that are done. Anything but a MeshError is the network's."""
    for task in tasks:
        error = task.exception() if task.done() and not task.cancelled() else None
        if isinstance(error, MeshError):
            return error
        if error is not None:
            return Unavailable(f"the link broke: {error or type(error).__name__}")
    return None
