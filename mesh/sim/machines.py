"""Machines of a virtual cell that come and go as the cell wants them, as those of a cluster do.

Of each kind the first one comes first and the last one goes first; one that goes is drained.
Before: the controller's core, which says how many nodes it wants. After: nodes that start and
leave.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite

from mesh.domain.ids import NodeId
from mesh.domain.reasons import DeviceKind
from mesh.domain.views import NodesWanted
from mesh.sim.clock import HeapClock
from mesh.sim.node import VirtualNode

ASK_S = 5.0
"""How often the cell is asked how many nodes it wants."""


class Machines:
    """`nodes` are all of the cell's; those with `comes_s` are its machines. `wanted` is asked of
    the controller; it is empty where there is none, or where it does not say.
    """

    def __init__(
        self,
        nodes: Sequence[VirtualNode],
        clock: HeapClock,
        wanted: Callable[[], Sequence[NodesWanted]],
    ) -> None:
        self._clock = clock
        self._wanted = wanted
        self._coming: set[NodeId] = set()
        self._machines: dict[DeviceKind, list[VirtualNode]] = {}
        self._fixed: dict[DeviceKind, int] = {}
        for node in nodes:
            device = node.plan.hello.device
            if node.plan.comes_s is None:
                self._fixed[device] = self._fixed.get(device, 0) + 1
            else:
                self._machines.setdefault(device, []).append(node)
        if self._machines:
            self._ask()

    def _ask(self) -> None:
        for kind in self._wanted():
            due = kind.wanted - self._fixed.get(kind.device, 0)
            for number, node in enumerate(self._machines.get(kind.device, ())):
                if number >= due:
                    self._coming.discard(node.node_id)
                    node.agent.leave()
                elif not node.agent.alive and node.node_id not in self._coming:
                    self._fetch(node)
        self._clock.call_at(self._clock.now_s() + ASK_S, self._ask)

    def _fetch(self, node: VirtualNode) -> None:
        comes_s = node.plan.comes_s
        self._coming.add(node.node_id)
        if comes_s is not None and isfinite(comes_s):
            self._clock.call_at(self._clock.now_s() + comes_s, partial(self._come, node))

    def _come(self, node: VirtualNode) -> None:
        if node.node_id in self._coming:
            self._coming.discard(node.node_id)
            node.restart()
