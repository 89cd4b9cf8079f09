"""The node's end of its link: dials the controller, keeps the stream, dials again when it broke.

It owns the connection and the reports that wait to be sent; the agent owns what is said. One
connection at a time: hello, the controller's welcome, then reports up and commands down until
either end is gone. Reports are dropped while there is no connection: the hello of the next one says
what the node holds. Of several controllers it dials one after the other, until one takes it, and
leaves that when another one says that it leads.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress

from mesh.domain.errors import MeshError
from mesh.domain.messages import NodeCommand, NodeHello, NodeReport
from mesh.domain.node_rule import NodeRule
from mesh.runtime.link_life import LOOK_S, NO_EPOCH, LinkLife, LinkLimits
from mesh.wire.channel import dial
from mesh.wire.connection import Connection, shown
from mesh.wire.credentials import credentials
from mesh.wire.leader import WAITS, Look, look

logger = logging.getLogger(__name__)

REASONS_EACH_MAX = 4
"""So many reasons why there is no link are logged for each address, until there is one."""


class NodeLink:
    """`address` may be several, with commas between. `hello` is asked anew for every connection.
    The callbacks run on the loop of `run`: `on_open` when the controller has taken the node, with
    the rule that it is to run by, and `on_close` once after each `on_open`.
    """

    def __init__(
        self,
        *,
        address: str,
        hello: Callable[[], NodeHello],
        rng: random.Random,
        on_open: Callable[[NodeRule], None],
        on_command: Callable[[NodeCommand], None],
        on_close: Callable[[str], None],
        limits: LinkLimits | None = None,
    ) -> None:
        self._addresses = address.split(",")
        self._epoch = NO_EPOCH
        """The highest that it has obeyed."""
        self._hello = hello
        self._on_open = on_open
        self._on_command = on_command
        self._on_close = on_close
        self._limits = limits or LinkLimits()
        self._life = LinkLife(rng, self._limits, len(self._addresses))
        self._connection: Connection | None = None
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        """It is to stop, or another controller has begun to lead since it dialled."""
        self._doubled = False
        """Whether it was logged that two controllers lead."""
        self._logged: set[tuple[str, str]] = set()
        """Why there is no link, by the address, as far as it was logged since there was one."""

    def send(self, report: NodeReport) -> None:
        """Queue a report; never waits. Dropped while there is no connection."""
        if self._connection is not None:
            self._connection.send(report)

    def stop(self) -> None:
        """Ask for the end: `run` closes the connection and returns soon."""
        self._stopping.set()
        self._hurry.set()
        if self._connection is not None:
            self._connection.close("the node is stopping")

    async def run(self) -> None:
        """Keep the link until `stop`. Raises AlreadyExists when the name is taken by another node,
        InvalidInput when the controller cannot make sense of this one, Unauthenticated or Forbidden
        for its key: none of them heals by waiting.
        """
        looking = asyncio.create_task(self._look_for_leader())
        try:
            while not self._stopping.is_set():
                self._hurry.clear()
                address = self._addresses[self._life.dial()]
                error = await self._connect(address)
                if self._stopping.is_set():
                    return
                welcomed = self._life.welcomed
                pause_s = self._life.end(type(error).__name__)
                if pause_s is None:
                    raise error
                self._log(address, welcomed, error.message)
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._hurry.wait()
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    async def _connect(self, address: str) -> MeshError:
        """One connection from dial to end: why it ended."""
        connection = Connection(
            address=address,
            reports_max=self._limits.reports_max,
            welcome_s_max=self._limits.welcome_s_max,
            epoch=self._epoch,
        )
        self._connection = connection
        reason = "the link was cancelled"
        try:
            async with connection:
                rule = await connection.open(self._hello())
                self._epoch = connection.epoch
                self._life.welcome()
                self._on_open(rule)
                await connection.serve(self._on_command)
        except MeshError as error:
            reason = error.message
            return error
        finally:
            self._connection = None
            if connection.opened:
                self._on_close(reason)
        raise AssertionError("a link is served until it ends with an error")

    async def _look_for_leader(self) -> None:
        """Ask the other controllers whether they lead: one that hangs does not say that it does no
        more.
        """
        if len(self._addresses) > 1:
            async with asyncio.TaskGroup() as looks:
                for n in range(len(self._addresses)):
                    looks.create_task(self._look_at(n))

    async def _look_at(self, n: int) -> None:
        """Ask one address every LOOK_S whether it leads, and tell it what epoch this node obeys."""
        channel, left_s = dial(self._addresses[n]), LOOK_S
        try:
            while True:
                await asyncio.sleep(left_s)
                begun_s = time.monotonic()
                if n in self._life.others():
                    told = (WAITS, *credentials().metadata, *shown(self._epoch))
                    try:
                        self._looked(n, leads=await look(channel, *told) is Look.LEADS)
                    except Exception:  # without looks it would stay with one that hangs
                        logger.exception("%s was not looked at", self._addresses[n])
                left_s = max(begun_s + LOOK_S - time.monotonic(), 0.0)
        finally:
            await channel.close(None)

    def _looked(self, n: int, *, leads: bool) -> None:
        address, at = self._addresses[n], self._life.at
        if n == at:  # the link has moved there while it was asked
            return
        begun = self._life.looked(n, leads=leads)
        linked = self._connection is not None and self._connection.opened
        if leads and linked and not (begun or self._doubled):
            self._doubled = True
            both = f"{self._addresses[at]} has this node, and {address} leads, too"
            logger.warning("%s: they may be of two cells; --join names one's", both)
        if begun:
            self._hurry.set()
            if self._connection is not None:
                self._connection.close(f"the controller at {address} leads now")

    def _log(self, address: str, welcomed: bool, reason: str) -> None:
        if welcomed:
            self._logged.clear()
            logger.warning("link to %s broke: %s; dialling again", address, reason)
            return
        most = REASONS_EACH_MAX * len(self._addresses)
        if (address, reason) not in self._logged and len(self._logged) < most:
            self._logged.add((address, reason))
            logger.warning("no link to %s yet: %s; dialling on", address, reason)
