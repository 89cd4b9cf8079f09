"""A run under faults with everything checked: what holds of any cell must hold of this one.

It puts cell, workload, faults and invariants together, runs them to the end, and waits until the
cell has come to rest. What is broken ends the run at once. Before: `mesh sim --check`, tests, the
bench. After: `invariants`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from mesh.core.controller.state.node import NodeEntry
from mesh.domain.events import DrainRequested, NodeReported
from mesh.domain.ids import OperationId, RequestId
from mesh.domain.outcome import Outcome
from mesh.runtime.host import Recorder
from mesh.runtime.journal import ControllerStart
from mesh.sim.cluster import Arrival, CellPlan, VirtualCell
from mesh.sim.faults import Fault, FaultKind
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

    @property
    def done(self) -> Counter[str]:
        """What was checked, how often."""
        return self._watch.checked

    def attach(self, cell: VirtualCell) -> None:
        """Look at this cell from now on, for as long as its clock runs."""
        self._cell = cell
        self._watch.begin(cell.core)
        self._look(cell)

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
        if cell.controller.alive:
            check_cell(cell.core, now_s)
            check_callers(cell.core.cell, cell.callers.open_ids())
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
    core = cell.core.cell
    for made in cell.nodes:
        node = core.nodes.get(made.node_id)
        joined = (
            node is not None and node.link_id == made.agent.link_id and made.agent.life.welcomed
        )
        hold(joined, "{} has not joined the cell again", made.node_id)
    check_cell_at_rest(core, {made.node_id: made.engine for made in cell.nodes})


class Injection:
    """Puts faults on the clock of a cell at the start of its workload."""

    def __init__(self, cell: VirtualCell, faults: Sequence[Fault]) -> None:
        self._cell = cell
        self._nodes = {node.node_id: node for node in cell.nodes}
        self.done: Counter[FaultKind] = Counter()
        """Faults that met something: a crash of a node that is down is none."""
        for fault in faults:
            cell.clock.call_at(cell.started_s + fault.at_s, partial(self._inject, fault))

    def _inject(self, fault: Fault) -> None:
        node = self._nodes[fault.node_id]
        match fault.kind:
            case FaultKind.CRASH | FaultKind.VANISH:
                did = self._crash(fault, node)
            case FaultKind.BREAK | FaultKind.SILENCE | FaultKind.LATE | FaultKind.STALL:
                did = self._disturb_link(fault, node)
            case FaultKind.KILL_CONTROLLER | FaultKind.STOP_CONTROLLER:
                did = self._end_controller(fault)
            case FaultKind.CANCEL:
                did = self._cancel(fault)
            case FaultKind.LOSE:
                did = self._lose(fault, node)
            case FaultKind.DRAIN:
                did = self._drain(fault)
            case _:
                did = self._ail(fault, node)
        self.done[fault.kind] += did

    def _crash(self, fault: Fault, node: VirtualNode) -> bool:
        did = node.agent.alive
        if did:
            node.crash(silently=fault.kind is FaultKind.VANISH)
            self._later(fault, node.restart)
        return did

    def _disturb_link(self, fault: Fault, node: VirtualNode) -> bool:
        links, link_id = self._cell.links, node.agent.link_id
        if fault.kind in (FaultKind.LATE, FaultKind.STALL):
            links.delay(node.node_id, fault.size)
            self._later(fault, partial(links.delay, node.node_id, 0.0))
            return True
        if link_id is None:
            return False
        if fault.kind is FaultKind.BREAK:
            links.break_link(link_id, node_s=fault.size, controller_s=fault.chance)
        else:
            up, down = fault.chance < 0.7, fault.chance > 0.3
            links.silence(link_id, up=up, down=down, node_s=fault.size)
        return True

    def _end_controller(self, fault: Fault) -> bool:
        controller = self._cell.controller
        did = controller.alive
        if did:
            end = controller.kill if fault.kind is FaultKind.KILL_CONTROLLER else controller.stop
            end()
            self._later(fault, controller.start)
        return did

    def _cancel(self, fault: Fault) -> bool:
        waiting = self._cell.callers.open_ids()
        if waiting:
            self._cell.cancel(waiting[int(fault.chance * len(waiting))])
        return bool(waiting)

    def _lose(self, fault: Fault, node: VirtualNode) -> bool:
        loaded = node.engine.memory()
        if loaded:
            node.engine.lose(loaded[int(fault.chance * len(loaded))].instance_id)
        return bool(loaded)

    def _drain(self, fault: Fault) -> bool:
        controller = self._cell.controller
        known = controller.alive and fault.node_id in controller.core.cell.nodes
        if known:
            self._turn(fault, undo=False)
            self._later(fault, partial(self._turn, fault, undo=True))
        return known

    def _turn(self, fault: Fault, *, undo: bool) -> None:
        """A controller that has died since knows of no drain."""
        if self._cell.controller.alive:
            asked = OperationId(f"{'undo' if undo else 'drain'}-{fault.node_id}-{fault.at_s}")
            drain = DrainRequested(operation_id=asked, node_id=fault.node_id, undo=undo)
            self._cell.controller.tell(drain)

    def _ail(self, fault: Fault, node: VirtualNode) -> bool:
        node.engine_faults.strike(fault.kind, fault.size)
        self._later(fault, partial(node.engine_faults.heal, fault.kind))
        return True

    def _later(self, fault: Fault, call: Callable[[], None]) -> None:
        self._cell.clock.call_at(self._cell.started_s + fault.until_s, call)


STUCK_S = 150.0
"""From the last fault, or a later arrival, to the first token at the latest: a lease, a few waits
in a queue, and the time to compute.
"""
REST_S = 60.0
"""From the last end until nothing is under way: slow loads end by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCounts:
    """What a run had."""

    faults: tuple[tuple[str, int], ...]
    """By kind."""
    checks: tuple[tuple[str, int], ...]
    """What was checked, how often; none when nothing was."""


class FaultyRun:
    """A cell, and what goes wrong in it. `check`: hold it to the invariants."""

    def __init__(
        self,
        plan: CellPlan,
        faults: Sequence[Fault] = (),
        *,
        check: bool,
        started: Callable[[ControllerStart], Sequence[Recorder]] = lambda start: (),
    ) -> None:
        self._checks = CellChecks() if check else None
        recorders = () if self._checks is None else (self._checks,)
        self.cell = VirtualCell(plan, recorders=recorders, started=started)
        self._injection = Injection(self.cell, faults)
        last_s = max((fault.until_s for fault in faults), default=0.0)
        self._over_s = self.cell.started_s + last_s
        self.virtual_s = 0.0
        """From the start of the workload to the last end."""
        if self._checks is not None:
            self._checks.attach(self.cell)
            self._check_progress()

    def run(
        self, workload: Iterable[Arrival], told: Callable[[float], None] = lambda at_s: None
    ) -> tuple[Outcome, ...]:
        """As `VirtualCell.run`; checked, until the cell has come to rest.

        Raises RuleBroken, or what else a fault of mesh raises.
        """
        outcomes = self.cell.run(workload, told)
        self.virtual_s = self.cell.clock.now_s() - self.cell.started_s
        if self._checks is not None:
            rest_s = max(self.cell.clock.now_s(), self._over_s)
            self.cell.clock.run_until(rest_s + REST_S)
            check_rest(self.cell)
        return outcomes

    def counts(self) -> FaultCounts:
        checks = () if self._checks is None else sorted(self._checks.done.items())
        return FaultCounts(
            faults=tuple((k.value, n) for k in FaultKind if (n := self._injection.done[k])),
            checks=tuple(checks),
        )

    def _check_progress(self) -> None:
        """Again and again; a fault may hold requests up for as long as there are faults."""
        clock = self.cell.clock
        stuck = self.cell.callers.stuck_ids(self._over_s, STUCK_S)
        hold(not stuck, "requests are stuck: {}", stuck)
        clock.call_at(clock.now_s() + 1.0, self._check_progress)
