"""Links as clock entries: what is said on one arrives after a delay, in the order it was said.

It owns which links are open. Nothing is encoded: commands and reports are carried as the values
that they are. Before: `ControllerPerformer` and the nodes. After: the controller's host and the
nodes' hosts, by events.
"""

from collections.abc import Callable
from typing import Protocol

from mesh.domain.events import ControllerEvent, NodeConnected, NodeReported
from mesh.domain.messages import NodeCommand, NodeHello, NodeReport
from mesh.domain.node_events import CommandReceived, LinkClosed, LinkOpened, NodeEvent
from mesh.domain.reasons import TurnRule
from mesh.runtime.clock import Clock


class NodeEnd(Protocol):
    """The node behind a link."""

    def hello(self) -> NodeHello: ...

    def tell(self, event: NodeEvent) -> None: ...


class VirtualLinks:
    """The controller's ends (see `mesh.runtime.controller_actions.NodeLinks`) and the nodes'."""

    def __init__(self, clock: Clock, delay_s: float) -> None:
        self._clock = clock
        self._delay_s = delay_s
        self._ends: dict[int, NodeEnd] = {}
        """Of open links, by their ids."""
        self._made = 0
        self.tell: Callable[[ControllerEvent], None] = _unbound

    def dial(self, node: NodeEnd) -> int:
        """Open a link; its id. The controller hears of it after the delay."""
        self._made += 1
        link_id, hello = self._made, node.hello()
        self._ends[link_id] = node
        self._later(lambda: self.tell(NodeConnected(link_id=link_id, hello=hello)))
        return link_id

    def report(self, link_id: int, report: NodeReport) -> None:
        """From the node. What is said on a closed link is lost."""
        if link_id in self._ends:
            self._later(lambda: self._reported(link_id, report))

    def accept(self, link_id: int, turns: TurnRule) -> None:
        self._to_node(link_id, LinkOpened(turns=turns))

    def send(self, link_id: int, command: NodeCommand) -> None:
        self._to_node(link_id, CommandReceived(command=command))

    def close(self, link_id: int, *, error: str, message: str, hint: str) -> None:
        node = self._ends.pop(link_id, None)
        if node is not None:
            self._later(lambda: node.tell(LinkClosed(reason=message)))

    def _reported(self, link_id: int, report: NodeReport) -> None:
        if link_id in self._ends:
            self.tell(NodeReported(link_id=link_id, report=report))

    def _to_node(self, link_id: int, event: NodeEvent) -> None:
        def arrive() -> None:
            node = self._ends.get(link_id)
            if node is not None:
                node.tell(event)

        self._later(arrive)

    def _later(self, call: Callable[[], None]) -> None:
        self._clock.call_at(self._clock.now_s() + self._delay_s, call)


def _unbound(event: ControllerEvent) -> None:
    raise RuntimeError(f"the links have no controller yet, so {type(event).__name__} is lost")
