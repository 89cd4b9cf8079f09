"""When places are expected to come free on the nodes of a deployment: as those that run there end.

An answer is expected to become as long as those of its deployment have been, and a token of it to
take as long as one decode of every instance of its node. Before: the instances' books. After:
`deadlines`, which refuses at once whoever would get a place too late, and says when to come again.
"""

from collections.abc import Iterator
from math import inf

from mesh.core.controller.instances.loading_lane import loads_end_s
from mesh.core.controller.instances.node_schedule import round_s
from mesh.core.controller.state.cell import Cell
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry

LEFT_SHARE_LEAST = 0.25
"""A request is expected to have at least this share of a mean answer left: it may be longer than
the mean.
"""
APART_SHARE = 1.25
"""Clients that are told to come again are spread out by this much of the mean time between two
ends.
"""


class Departures:
    """From the nodes of a deployment's instances; worked out when it is first asked for."""

    def __init__(self, cell: Cell, entry: DeploymentEntry, now_s: float) -> None:
        self._cell = cell
        self._entry = entry
        self._now_s = now_s
        self._ends_s: list[float] | None = None

    def at_s(self, ahead: int) -> float:
        """When one more place has come free than so many who wait will have taken; infinite if
        fewer run.
        """
        ends_s = self._ends()
        return ends_s[ahead] if ahead < len(ends_s) else inf

    @property
    def apart_s(self) -> float:
        """Seconds from one end to the next, over those that run."""
        ends_s = self._ends()
        if not ends_s:
            return 0.0
        return APART_SHARE * max(ends_s[-1] - self._now_s, 0.0) / len(ends_s)

    def _ends(self) -> list[float]:
        if self._ends_s is None:
            nodes = {i.node.node_id: i.node for i in self._entry.instances.values()}
            self._ends_s = sorted(end for node in nodes.values() for end in self._ends_on(node))
        return self._ends_s

    def _ends_on(self, node: NodeEntry) -> Iterator[float]:
        token_s = round_s(node, self._now_s)
        ready_s = loads_end_s(node, self._now_s)
        for instance in node.instances.values():
            begun_s = ready_s.get(instance.instance_id, self._now_s)
            for request in (instance.coming or instance.requests).values():
                yield begun_s + self._left(instance, request) * token_s

    def _left(self, instance: InstanceEntry, request: RequestEntry) -> float:
        """Tokens that an answer is expected to get yet."""
        most = request.original.sampling.max_tokens
        owner = self._cell.deployments.get(instance.deployment)
        mean = min(owner.history.mean_tokens, most) if owner is not None else most
        return max(mean - len(request.output_tokens), mean * LEFT_SHARE_LEAST)
