"""One connection of a node to its controller, from the dial to its end.

Two tasks while it is open: one writes the reports that wait, one reads commands. Whatever ends it
is told as a MeshError: the controller's own, or Unavailable with what broke.
"""

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError

from mesh.domain.errors import InvalidInput, MeshError, Unavailable
from mesh.domain.messages import NodeCommand, NodeHello, NodeReport
from mesh.domain.node_rule import NodeRule
from mesh.runtime.link_life import NO_EPOCH, CellEpoch
from mesh.v1 import node_link_pb2 as pb
from mesh.v1.node_link_pb2_grpc import NodeLinkStub
from mesh.wire.channel import dial
from mesh.wire.codec import command_from_wire, report_to_wire, rule_of
from mesh.wire.credentials import credentials
from mesh.wire.errors import EndedCall, error_of, is_told
from mesh.wire.handshake import why_refused
from mesh.wire.mailbox import Mailbox
from mesh.wire.unread import refused, reports_written

EPOCH_KEY, CELL_KEY = "mesh-epoch", "mesh-cell"
"""In the metadata of a node's call: the highest epoch that it has obeyed, if any, and its cell."""

EPOCH_DIGITS_MAX = 9
"""PostgreSQL's advisory locks have 31 bits for an epoch."""

logger = logging.getLogger(__name__)

Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.NodeReport, pb.NodeCommand]"


def shown(obeyed: CellEpoch) -> tuple[tuple[str, str], ...]:
    """What the metadata of a node's call says of the leader that it has obeyed."""
    told = (EPOCH_KEY, str(obeyed.number)), (CELL_KEY, obeyed.cell)
    return told if obeyed.number else ()


def obeyed_by(context: Any) -> CellEpoch:
    """The latest leader that the node of a call has obeyed, as it says, if any."""
    told = dict(context.invocation_metadata() or ())
    said = str(told.get(EPOCH_KEY, ""))
    if not (said.isascii() and said.isdigit() and len(said) <= EPOCH_DIGITS_MAX):
        return NO_EPOCH
    return CellEpoch(int(said), str(told.get(CELL_KEY, "")))


class Connection:
    """An async context: leaving it closes the call and its channel."""

    def __init__(
        self, *, address: str, reports_max: int, welcome_s_max: float, epoch: CellEpoch = NO_EPOCH
    ) -> None:
        self.epoch = epoch
        """The highest that the node has obeyed; the controller's, once that has taken the node."""
        self.opened = False
        """The controller has taken the node."""
        self._address = address
        self._reports_max = reports_max
        self._welcome_s_max = welcome_s_max
        self._reports: Mailbox[NodeReport] = Mailbox(reports_max)
        self._channel = dial(address)
        connect: Any = NodeLinkStub(self._channel).Connect  # the stubs ask for an iterator
        self._call: Call = connect(metadata=(*(credentials().metadata or ()), *shown(epoch)))
        self._commands = aiter(self._call)
        self._closing: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> "Connection":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reports.close()
        self._call.cancel()
        await self._channel.close(None)

    async def open(self, hello: NodeHello) -> NodeRule:
        """Say hello and wait for the welcome, which has the rule that it is to run. Raises what the
        controller answers instead, or Unavailable when it does not answer in time.
        """
        greeting = asyncio.ensure_future(self._greet(hello))
        ends: list[asyncio.Future[Any]] = [greeting, self._closing]
        try:
            await asyncio.wait(
                ends, timeout=self._welcome_s_max, return_when=asyncio.FIRST_COMPLETED
            )
            if greeting.done():
                rule = greeting.result()
                self.opened = True
                return rule
        finally:
            greeting.cancel()
            await asyncio.gather(greeting, return_exceptions=True)
        if self._closing.done():
            raise Unavailable(self._closing.result())
        raise Unavailable(f"no welcome within {self._welcome_s_max:g} s")

    async def serve(self, on_command: Callable[[NodeCommand], None]) -> None:
        """Write and read until the connection ends; always raises, with the reason."""
        tasks = [
            asyncio.ensure_future(self._write()),
            asyncio.ensure_future(self._read(on_command)),
        ]
        ends: list[asyncio.Future[Any]] = [*tasks, self._closing]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            told = await asyncio.gather(*tasks, return_exceptions=True)
        if self._closing.done():
            raise Unavailable(self._closing.result())
        for error in told:
            if isinstance(error, Exception):
                raise error
        raise Unavailable("the controller closed the link")

    def send(self, report: NodeReport) -> None:
        """Queue a report, or give up when too many wait. Dropped before the welcome."""
        if self.opened and not self._reports.put(report):
            self.close(f"{self._reports_max} reports wait to be sent, which is the limit")

    def close(self, reason: str) -> None:
        """End `open` or `serve` with this reason."""
        if not self._closing.done():
            self._closing.set_result(reason)

    async def _greet(self, hello: NodeHello) -> NodeRule:
        try:
            greeting = report_to_wire(hello)
        except (TypeError, ValueError) as error:
            raise Unavailable(f"the hello cannot be sent: {error}") from error
        try:
            await self._call.write(greeting)
            answer = await anext(self._commands, None)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, DecodeError) as error:
            raise await self._ended(error) from error
        if answer is None or answer.WhichOneof("command") != "welcome":
            raise Unavailable("the controller's first word was no welcome")
        leads = CellEpoch(answer.welcome.epoch, answer.welcome.cell)
        if why := leads.why_not_after(self.epoch):
            raise Unavailable(why)
        self.epoch = leads._replace(cell=leads.cell or self.epoch.cell)
        return rule_of(answer.welcome)

    async def _write(self) -> None:
        try:
            while reports := await self._reports.take():
                for report in reports:
                    for message in reports_written(report):
                        await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._ended(error) from error

    async def _read(self, on_command: Callable[[NodeCommand], None]) -> None:
        try:
            async for message in self._commands:
                try:
                    command = command_from_wire(message)
                except InvalidInput as error:
                    self._refuse(message, error)
                else:
                    on_command(command)
        except (grpc.aio.AioRpcError, DecodeError) as error:
            raise await self._ended(error) from error

    def _refuse(self, command: pb.NodeCommand, error: InvalidInput) -> None:
        """Raises the error where nothing can be answered: what the controller believes of the node
        would not be so.
        """
        answer = refused(command, error)
        if answer is None:
            raise error
        logger.warning("a command was refused: %s", error.message)
        self.send(answer)

    async def _ended(self, error: Exception) -> MeshError:
        """What the controller said, or what broke."""
        match error:
            case DecodeError():
                return InvalidInput(f"the controller sent no valid command: {error}")
            case grpc.aio.AioRpcError():
                if not self.opened and not is_told(cast(EndedCall, error)):
                    refused = await asyncio.to_thread(why_refused, self._address, credentials().tls)
                    return refused or error_of(cast(EndedCall, error))
                return error_of(cast(EndedCall, error))
            case _:
                return Unavailable(await self._call.details() or "the call has ended")
