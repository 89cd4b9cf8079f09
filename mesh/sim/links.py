"""Links as clock entries: what is said on one arrives after a delay, in the order it was said.

It owns the links and how well they are: one can break, fall silent, or be late, as a gRPC stream
can; no message ever overtakes another of its direction, and none comes after one that was lost.
Nothing is encoded: commands and reports are carried as the values that they are. Before:
`ControllerPerformer` and the nodes. After: the controller's host and the nodes, by events.
"""

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from mesh.domain.events import ControllerEvent, NodeConnected, NodeDisconnected, NodeReported
from mesh.domain.ids import NodeId
from mesh.domain.messages import NodeCommand, NodeHello, NodeReport
from mesh.domain.node_rule import NodeRule
from mesh.domain.values import dataclass
from mesh.runtime.clock import Clock
from mesh.runtime.link_life import NO_EPOCH, CellEpoch


class NodeEnd(Protocol):
    """The node behind a link. `closed` is told once, of a link that the node has not left."""

    node_id: NodeId

    def accepted(self, link_id: int, rule: NodeRule, epoch: CellEpoch) -> None: ...

    def commanded(self, link_id: int, command: NodeCommand) -> None: ...

    def closed(self, link_id: int, error: str, reason: str) -> None:
        """`error` is the class name in mesh.domain.errors."""
        ...


class ControllerEnd(Protocol):
    """The controller behind a link, which is at one of several addresses."""

    at: int

    @property
    def cell_epoch(self) -> CellEpoch: ...

    @property
    def is_frozen(self) -> bool: ...

    def takes(self, obeyed: CellEpoch) -> bool:
        """Whether it leads a node that has obeyed that one."""
        ...

    def tell(self, event: ControllerEvent) -> None: ...


@dataclass(slots=True, eq=False)
class _Link:
    node: NodeEnd
    controller: ControllerEnd
    epoch: CellEpoch
    """The controller's, when it was dialled."""
    at_controller: bool = True
    """The controller's end is open."""
    at_node: bool = True
    up: bool = True
    """What the node says gets through; so does what is on its way."""
    down: bool = True
    up_s: float = 0.0
    """When the last report that is on its way arrives."""
    down_s: float = 0.0


class VirtualLinks:
    """The controller's ends (see `mesh.runtime.controller_actions.NodeLinks`) and the nodes'."""

    def __init__(self, clock: Clock, delay_s: float, addresses: int = 1) -> None:
        self._clock = clock
        self._delay_s = delay_s
        self.addresses = addresses
        self._ends: list[ControllerEnd | None] = [None] * addresses
        """The controllers that lead, as far as they know, by their addresses."""
        self._cut: Counter[tuple[NodeId, int]] = Counter()
        """The nodes that cannot reach a controller, and for how many faults."""
        self.obeys: Callable[[NodeEnd, CellEpoch], None] = lambda node, epoch: None
        """Is told of each command that comes to a node."""
        self._late_s: dict[NodeId, float] = {}
        """By how much the messages of a node take longer, each way."""
        self._links: dict[int, _Link] = {}
        """Those of which one end at least is open."""
        self._made = 0

    def open(self, end: ControllerEnd) -> None:
        """A controller answers dials from now on."""
        self._ends[end.at] = end

    def leads(self, node_id: NodeId, at: int, obeyed: CellEpoch) -> bool:
        """Whether a node finds that the controller there leads one that has obeyed that epoch."""
        end = self._ends[at]
        return end is not None and (node_id, at) not in self._cut and end.takes(obeyed)

    def dial(
        self, node: NodeEnd, hello: NodeHello, at: int = 0, obeyed: CellEpoch = NO_EPOCH
    ) -> int | None:
        """Open a link; its id, and the controller hears of it after the delay. None where nobody
        answers. It may be refused when it has come.
        """
        end = self._ends[at]
        if end is None or (node.node_id, at) in self._cut:
            return None
        self._made += 1
        link_id = self._made
        link = self._links[link_id] = _Link(node, end, end.cell_epoch)

        def come() -> None:
            if self._cut and (node.node_id, at) in self._cut:
                return
            if obeyed.number and not end.is_frozen and not end.takes(obeyed):
                reason = "another controller leads"
                self.close(link_id, error="Unavailable", message=reason, hint="")
                return
            self._tell(link, NodeConnected(link_id=link_id, hello=hello))

        self._up(link, come)
        return link_id

    def report(self, link_id: int, report: NodeReport) -> None:
        """From the node. What is said on a closed link is lost."""
        link = self._links.get(link_id)
        if link is not None and link.at_node:
            self._up(link, lambda: self._tell(link, NodeReported(link_id=link_id, report=report)))

    def leave(self, link_id: int, *, silently: bool = False) -> None:
        """The node's end closes. The controller gets what is on its way, then hears of the end,
        unless the node goes without a word.
        """
        link = self._links.get(link_id)
        if link is None or not link.at_node:
            return
        link.at_node = False
        if silently:
            link.up = link.down = False
        else:
            self._up(link, lambda: self._disconnected(link_id, "the node closed the link"))
        self._settle(link_id)

    def is_whole(self, link_id: int) -> bool:
        """Whether all that is said on it gets through."""
        link = self._links.get(link_id)
        return link is not None and link.at_controller and link.at_node and link.up and link.down

    # The controller's port.

    def accept(self, link_id: int, rule: NodeRule) -> None:
        link = self._links.get(link_id)
        if link is not None and link.at_controller:
            self._down(link, lambda: link.node.accepted(link_id, rule, link.epoch))

    def send(self, link_id: int, command: NodeCommand) -> None:
        link = self._links.get(link_id)
        if link is not None and link.at_controller:

            def come() -> None:
                self.obeys(link.node, link.epoch)
                link.node.commanded(link_id, command)

            self._down(link, come)

    def close(self, link_id: int, *, error: str, message: str, hint: str) -> None:
        link = self._links.get(link_id)
        if link is not None and link.at_controller:
            link.at_controller = False
            self._down(link, lambda: self._closed(link_id, error, message))
            self._settle(link_id)

    def hang_up(self, end: ControllerEnd, reason: str) -> None:
        """A controller is gone: its ends of all links close, and no new one is answered."""
        self._ends[end.at] = None
        for link_id, link in list(self._links.items()):
            if link.controller is end:
                self.close(link_id, error="Unavailable", message=reason, hint="")

    # What can go wrong.

    def break_link(self, link_id: int, *, node_s: float, controller_s: float) -> None:
        """Lose what is on its way and all that follows. Both ends hear of it, each after so many
        seconds, unless they have closed by then.
        """
        link = self._links.get(link_id)
        if link is None:
            return
        link.up = link.down = False
        now_s, reason = self._clock.now_s(), "the link broke"
        self._clock.call_at(now_s + node_s, lambda: self._closed(link_id, "Unavailable", reason))
        self._clock.call_at(now_s + controller_s, lambda: self._disconnected(link_id, reason))

    def silence(self, link_id: int, *, up: bool, down: bool, node_s: float) -> None:
        """From now on, nothing gets through in these directions, and nobody is told. The node
        finds that out by itself after so many seconds; the controller has its lease.
        """
        link = self._links.get(link_id)
        if link is None:
            return
        link.up, link.down = link.up and not up, link.down and not down
        reason = "the controller does not answer"
        self._clock.call_at(
            self._clock.now_s() + node_s, lambda: self._closed(link_id, "Unavailable", reason)
        )

    def cut(self, node_id: NodeId, at: int, *, node_s: float) -> None:
        """A node reaches the controller at an address no more, until it is mended as often."""
        self._cut[node_id, at] += 1
        for link_id, link in list(self._links.items()):
            if link.node.node_id == node_id and link.controller.at == at:
                self.silence(link_id, up=True, down=True, node_s=node_s)

    def mend(self, node_id: NodeId, at: int) -> None:
        self._cut -= Counter([(node_id, at)])

    def delay(self, node_id: NodeId, late_s: float) -> None:
        """All that is said to a node and by it takes so much longer from now on."""
        self._late_s[node_id] = late_s

    def _up(self, link: _Link, call: Callable[[], None]) -> None:
        """To the controller, behind all that was said before."""
        if link.up:
            link.up_s = max(link.up_s, self._arrival_s(link))
            self._clock.call_at(link.up_s, lambda: call() if link.up else None)

    def _down(self, link: _Link, call: Callable[[], None]) -> None:
        if link.down:
            link.down_s = max(link.down_s, self._arrival_s(link))
            self._clock.call_at(link.down_s, lambda: call() if link.down and link.at_node else None)

    def _arrival_s(self, link: _Link) -> float:
        late_s = self._late_s.get(link.node.node_id, 0.0) if self._late_s else 0.0
        return self._clock.now_s() + self._delay_s + late_s

    def _tell(self, link: _Link, event: ControllerEvent) -> None:
        if link.at_controller:
            link.controller.tell(event)

    def _closed(self, link_id: int, error: str, reason: str) -> None:
        link = self._links.get(link_id)
        if link is not None and link.at_node:
            link.at_node = False
            self._settle(link_id)
            link.node.closed(link_id, error, reason)

    def _disconnected(self, link_id: int, reason: str) -> None:
        link = self._links.get(link_id)
        if link is not None and link.at_controller:
            self._tell(link, NodeDisconnected(link_id=link_id, reason=reason))
            link.at_controller = False
            self._settle(link_id)

    def _settle(self, link_id: int) -> None:
        """Forget a link of which nothing is left."""
        link = self._links[link_id]
        if not link.at_node and not link.at_controller:
            del self._links[link_id]
