"""A virtual cell held to the invariants: after each decision, and a few times a virtual second.

A recorder of the controller's decisions: after each one the books of the node that it is about are
added up anew and held against its engine, and memory commands must follow each other. A few times
a virtual second everything is looked at. What is broken raises RuleBroken, or AssertionError where
callers notice it (`callers`). Before: `checking`. After: `invariants`.
"""

from collections import Counter
from collections.abc import Sequence

from mesh.core.controller.state.node import NodeEntry
from mesh.domain.events import NodeReported
from mesh.domain.ids import RequestId
from mesh.runtime.link_life import CellEpoch
from mesh.sim.cluster import VirtualCell
from mesh.sim.invariants import (
    Watch,
    check_blocks,
    check_books,
    check_cell,
    check_engine,
    check_node_core,
    hold,
)
from mesh.sim.invariants import check_rest as check_cell_at_rest
from mesh.sim.invariants.cell import check_callers
from mesh.sim.links import NodeEnd
from mesh.sim.node import VirtualNode

LOOK_S = 0.25
"""Between two looks at all of the cell."""


ORPHANED_S = 20.0
"""A node may compute for so long for nobody: until an abort that is as late as any has come through
and the calls before it have ended.
"""


class CellChecks:
    """One cell's. Its `record` is for the cell's recorders; `attach` follows once there is one."""

    def __init__(self) -> None:
        self._watch = Watch()
        self._cell: VirtualCell | None = None
        self._orphans: dict[tuple[int, RequestId], float] = {}
        """By link: what a node computes and the controller does not have there, since when."""
        self._obeyed: dict[NodeEnd, int] = {}
        """The epoch that each run of a node has obeyed last."""

    @property
    def done(self) -> Counter[str]:
        """What was checked, how often."""
        return self._watch.checked

    def attach(self, cell: VirtualCell) -> None:
        """Look at this cell from now on, for as long as its clock runs."""
        self._cell = cell
        self._watch.begin(cell.core)
        cell.links.obeys = self._check_epoch
        self._look(cell)

    def _check_epoch(self, node: NodeEnd, epoch: CellEpoch) -> None:
        before = self._obeyed.get(node, 0)
        rule = epoch.number >= before
        hold(rule, "{} obeys epoch {} after {}", node.node_id, epoch.number, before)
        self._obeyed[node] = epoch.number
        self.done["commands"] += 1

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        cell = self._cell
        if cell is None:
            self.done["decisions"] += 1
            return
        self._watch.note(cell.core, event, actions)
        nodes = cell.core.cell.links
        if isinstance(event, NodeReported):
            node = nodes.get(event.link_id)
            if node is not None:
                _check_node(cell, node)
        else:
            for node in nodes.values():
                check_books(node)

    def _look(self, cell: VirtualCell) -> None:
        now_s = cell.clock.now_s()
        cell.clock.call_at(now_s + LOOK_S, lambda: self._look(cell))
        for made in cell.nodes:
            _check_memory(made)
            if made.agent.alive:
                check_node_core(made.agent.core)
        if cell.controller.alive and not cell.controller.is_frozen:
            check_cell(cell.core, now_s)
            check_callers(cell.core.cell, cell.callers.unanswered_ids())
            self._watch.look(cell.core, now_s)
            for node in cell.core.cell.nodes.values():
                _check_node(cell, node)
        self._check_orphans(cell)

    def _check_orphans(self, cell: VirtualCell) -> None:
        now_s, before, self._orphans = cell.clock.now_s(), self._orphans, {}
        for made in cell.nodes:
            link_id = made.agent.link_id
            node = cell.core.cell.links.get(link_id) if link_id is not None else None
            if node is None or not cell.links.is_whole(node.link_id):
                continue
            known = {r for instance in node.instances.values() for r in instance.requests}
            for request_id in made.engine.request_ids():
                if request_id not in known:
                    of = node.link_id, request_id
                    since_s = self._orphans[of] = before.get(of, now_s)
                    rule = now_s - since_s <= ORPHANED_S
                    hold(rule, "{} computes {} for nobody", made.node_id, request_id)


def _check_node(cell: VirtualCell, node: NodeEntry) -> None:
    check_books(node)
    for made in cell.nodes:
        if made.agent.link_id == node.link_id:
            check_engine(node, made.engine.memory())


def _check_memory(made: VirtualNode) -> None:
    check_blocks(made.engine)
    held = made.engine.held_bytes()
    limit = made.plan.hello.memory_bytes - made.plan.hello.base_bytes
    hold(held <= limit, "{} holds {} B of {} B", made.node_id, held, limit)
    hold(not made.engine_faults.overbooked, "{}: {}", made.node_id, made.engine_faults.overbooked)


def check_rest(cell: VirtualCell) -> None:
    """Once all faults are over and all requests have ended, nothing is left under way."""
    hold(cell.controller.alive, "no controller runs")
    leading = [controller.at for controller in cell.controllers if controller.alive]
    hold(len(leading) == 1, "controllers {} lead", leading)
    core = cell.core.cell
    for made in cell.nodes:
        if made.plan.comes_s is not None and not made.agent.alive:
            continue
        node = core.nodes.get(made.node_id)
        joined = (
            node is not None and node.link_id == made.agent.link_id and made.agent.life.welcomed
        )
        hold(joined, "{} has not joined the cell again", made.node_id)
    engines = {made.node_id: made.engine for made in cell.nodes if made.agent.alive}
    check_cell_at_rest(core, engines)
