"""Makes the faults of a run happen: each occurrence becomes a call on the clock of its cell.

What it can do is what can happen to a live cell, and it does it from outside: to a node's machine,
its engine and its link, to the controller's process, to a client. It counts what it did. Before:
`faults`. After: `cluster` runs on.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from mesh.domain.events import DrainRequested
from mesh.domain.ids import OperationId
from mesh.sim.cluster import VirtualCell
from mesh.sim.faults import LEASES, Fault, FaultKind
from mesh.sim.kv_links import Torn
from mesh.sim.node import VirtualNode


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
            case FaultKind.BREAK_STREAM:
                did = self._break_stream(fault)
            case FaultKind.LOSE:
                did = self._lose(fault, node)
            case FaultKind.TEAR:
                did = self._tear(fault)
            case FaultKind.DRAIN:
                did = self._drain(fault)
            case FaultKind.STORE_AWAY | FaultKind.CUT_NODE | FaultKind.RESTORE:
                did = self._disturb_standby(fault)
            case _ if fault.kind in LEASES:
                did = self._disturb_leader(fault)
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
        controller, kills = self._cell.controller, fault.kind is FaultKind.KILL_CONTROLLER
        did = controller.alive and (kills or not controller.is_frozen)
        if did:
            end = controller.kill if kills else controller.stop
            end()
            self._later(fault, controller.start)
        return did

    def _disturb_standby(self, fault: Fault) -> bool:
        """What meets both controllers, or one of them."""
        cell = self._cell
        match fault.kind:
            case FaultKind.STORE_AWAY:
                cell.store.away += 1
                self._later(fault, self._store_back)
            case FaultKind.CUT_NODE:
                at = int(fault.chance * len(cell.controllers))
                cell.links.cut(fault.node_id, at, node_s=fault.size)
                self._later(fault, partial(cell.links.mend, fault.node_id, at))
            case _:
                # The leader last: nobody is to follow it.
                for controller in sorted(cell.controllers, key=lambda one: one.is_last):
                    controller.kill()
                    self._later(fault, controller.start)
                cell.store.restore(int(fault.chance * cell.store.starts))
        return True

    def _store_reached(self, at: int) -> None:
        self._cell.store.cut_from -= Counter([at])

    def _store_back(self) -> None:
        self._cell.store.away -= 1

    def _disturb_leader(self, fault: Fault) -> bool:
        cell, leader = self._cell, self._cell.controller
        if not leader.alive or leader.is_frozen or leader.at in cell.cut_off:
            return False
        match fault.kind:
            case FaultKind.CUT_STORE:
                cell.store.cut_from[leader.at] += 1
                self._later(fault, partial(self._store_reached, leader.at))
            case FaultKind.CUT_LEADER:
                cell.cut(leader.at, node_s=fault.size)
                self._later(fault, partial(cell.mend, leader.at))
            case FaultKind.FREEZE_LEADER:
                self._later(fault, leader.freeze(renews_first=fault.chance < 0.5))
            case _:
                leader.lose_sessions()
        return True

    def _cancel(self, fault: Fault) -> bool:
        """Whom a controller does not hear now goes later."""
        waiting = self._cell.callers.open_ids()
        if not waiting:
            return False
        request_id = waiting[int(fault.chance * len(waiting))]
        answering = self._cell.answering(request_id)
        did = not answering.is_frozen and answering.at not in self._cell.cut_off
        if did:
            self._cell.cancel(request_id)
        return did

    def _break_stream(self, fault: Fault) -> bool:
        """The controller finds out at once, or when the client asks again."""
        waiting = self._cell.callers.keyed_ids()
        did = bool(waiting) and self._cell.is_reached
        if did:
            request_id = waiting[int(fault.chance * len(waiting))]
            ask = self._cell.break_stream(request_id, felt=fault.chance < 0.5)
            self._later(fault, ask)
        return did

    def _lose(self, fault: Fault, node: VirtualNode) -> bool:
        loaded = node.engine.memory()
        if loaded:
            node.engine.lose(loaded[int(fault.chance * len(loaded))].instance_id)
        return bool(loaded)

    def _tear(self, fault: Fault) -> bool:
        links = self._cell.kv_links
        links.tear(fault.node_id, Torn.LOST if fault.chance < 0.5 else Torn.CHANGED)
        self._later(fault, partial(links.tear, fault.node_id, None))
        return True

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
