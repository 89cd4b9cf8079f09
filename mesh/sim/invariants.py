"""What holds of a virtual cell at any time, and once it has come to rest, whatever went wrong.

A recorder of the controller's decisions: after each one the books of the node that it is about are
added up anew and held against its engine, and reservations must follow each other. A few times
a virtual second everything else is looked at. What is broken raises RuleBroken, or AssertionError
where callers notice it (`callers`). Before: `checking`. After: `books`.
"""

from collections import Counter
from collections.abc import Sequence

from mesh.core.controller.state.node import NodeEntry
from mesh.domain.actions import SendCommand
from mesh.domain.events import NodeReported
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.lifecycle import InstanceState, NodeState, RequestState
from mesh.domain.messages import (
    InstanceGone,
    InstanceLoaded,
    KvResized,
    LoadFailed,
    LoadInstance,
    ResizeKv,
    UnloadInstance,
)
from mesh.sim.books import check_books, check_engine, hold
from mesh.sim.cluster import VirtualCell
from mesh.sim.node import VirtualNode

LOOK_S = 0.25
"""Between two looks at all of the cell."""
ORPHANED_S = 20.0
"""A node may compute for so long for nobody: until an abort that is as late as any has come through
and the calls before it have ended.
"""

Operation = LoadInstance | ResizeKv | UnloadInstance
Answer = InstanceLoaded | LoadFailed | InstanceGone | KvResized


class Invariants:
    """One cell's. Its `record` is for the cell's recorders; `attach` follows once there is one."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        """What was checked, how often."""
        self._cell: VirtualCell | None = None
        self._under_way: dict[tuple[int, InstanceId], Operation] = {}
        """Sent over a link, and not answered by what came back over it."""
        self._loads: set[InstanceId] = set()
        self._overpromised: set[int] = set()
        """Links of nodes where a shrink failed or met blocks in use, for as long as others are
        promised the memory.
        """
        self._orphans: dict[tuple[int, RequestId], float] = {}
        """By link: what a node computes and the controller does not have there, since when."""

    def attach(self, cell: VirtualCell) -> None:
        """Look at this cell from now on, for as long as its clock runs."""
        self._cell = cell
        self._look(cell)

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        self.seen["decisions"] += 1
        if isinstance(event, NodeReported) and isinstance(event.report, Answer):
            self._note_answer(event.link_id, event.report)
        for action in actions:
            if isinstance(action, SendCommand) and isinstance(action.command, Operation):
                self._note_command(action.link_id, action.command)
        cell = self._cell
        if cell is None:
            return
        nodes = cell.core.cell.links
        if isinstance(event, NodeReported):
            node = nodes.get(event.link_id)
            if node is not None:
                self._check_node(cell, node)
        else:
            for node in nodes.values():
                self._check_books(node)

    def _note_answer(self, link_id: int, said: Answer) -> None:
        of = link_id, said.instance_id
        before = self._under_way.get(of)
        if isinstance(said, InstanceLoaded) and isinstance(before, UnloadInstance):
            return  # its load was given up meanwhile; the end of that is still to come
        if isinstance(said, KvResized):
            hold(isinstance(before, ResizeKv), "{} was resized, and nobody asked for that", of)
            if isinstance(before, ResizeKv) and said.kv_blocks > before.kv_blocks:
                self._overpromised.add(link_id)
        self._under_way.pop(of, None)

    def _note_command(self, link_id: int, command: Operation) -> None:
        of = link_id, command.instance_id
        before = self._under_way.get(of)
        if isinstance(command, LoadInstance):
            hold(command.instance_id not in self._loads, "{} is loaded twice", of)
            self._loads.add(command.instance_id)
        if not isinstance(command, UnloadInstance):
            hold(before is None, "{} overlaps {}", command, before)
        self._under_way[of] = command
        self.seen["memory operations"] += 1

    def _check_books(self, node: NodeEntry) -> None:
        """Beside what holds always: no more is promised than there is, unless a node had to keep
        what was promised to others.
        """
        check_books(node)
        station, link_id = node.station, node.link_id
        if station.promised_bytes <= station.capacity_bytes:
            self._overpromised.discard(link_id)
        else:
            rule = link_id in self._overpromised
            hold(rule, "{} promised {} B too much", node.node_id, -station.free_bytes)

    def _check_node(self, cell: VirtualCell, node: NodeEntry) -> None:
        self._check_books(node)
        for made in cell.nodes:
            if made.agent.link_id == node.link_id:
                check_engine(node, made.engine.memory())

    def _look(self, cell: VirtualCell) -> None:
        cell.clock.call_at(cell.clock.now_s() + LOOK_S, lambda: self._look(cell))
        self.seen["looks"] += 1
        for made in cell.nodes:
            _check_memory(made)
        if cell.controller.alive:
            _check_requests(cell)
            for node in cell.core.cell.nodes.values():
                self._check_node(cell, node)
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


def _check_memory(made: VirtualNode) -> None:
    held = made.engine.held_bytes()
    limit = made.plan.hello.memory_bytes - made.plan.hello.base_bytes
    hold(held <= limit, "{} holds {} B of {} B", made.node_id, held, limit)
    hold(not made.engine_faults.overbooked, "{}: {}", made.node_id, made.engine_faults.overbooked)


def _check_requests(cell: VirtualCell) -> None:
    """Who waits for an answer is queued or running, in one place; nobody waits for too long."""
    core, limits, now_s = cell.core.cell, cell.plan.limits, cell.clock.now_s()
    open_ids = sorted(cell.callers.open_ids())
    hold(sorted(core.requests) == open_ids, "requests {}, not {}", sorted(core.requests), open_ids)
    places = [request.original.request_id for d in core.deployments.values() for request in d.queue]
    places += [request_id for i in core.instances.values() for request_id in i.requests]
    hold(sorted(places) == open_ids, "requests in {}, not {}", sorted(places), open_ids)
    longest_s = limits.queue_wait_s_max + limits.place_retry_s
    linked = list(core.links.values()) == list(core.nodes.values())
    hold(linked, "links are to {} nodes of {}", len(core.links), len(core.nodes))
    for name, entry in core.deployments.items():
        most = entry.spec.scaling.replicas_max
        hold(entry.replicas() <= most, "{} has {} instances of {}", name, entry.replicas(), most)
        for request in entry.queue:
            hold(
                request.state is RequestState.QUEUED,
                "{} is {}",
                request.original.request_id,
                request.state,
            )
            waited_s = now_s - request.queued_at_s
            hold(
                waited_s <= longest_s,
                "{} waits for {:.1f} s",
                request.original.request_id,
                waited_s,
            )


def check_rest(cell: VirtualCell) -> None:
    """Once all faults are over and all requests have ended, nothing is left under way."""
    core = cell.core.cell
    hold(cell.controller.alive, "no controller runs")
    hold(not core.requests, "requests are stuck: {}", list(core.requests))
    hold(not core.operations, "operations are stuck: {}", list(core.operations))
    for made in cell.nodes:
        node = core.nodes.get(made.node_id)
        if node is None or node.link_id != made.agent.link_id or not made.agent.welcomed:
            hold(False, "{} has not joined the cell again", made.node_id)
        else:
            _check_idle(made, node)


def _check_idle(made: VirtualNode, node: NodeEntry) -> None:
    station, name = node.station, made.node_id
    under_way = (*station.running_reservations(), *station.waiting())
    hold(node.state is NodeState.READY, "{} is {}", name, node.state)
    hold(not under_way, "{}: operations are stuck: {}", name, under_way)
    hold(not made.engine.has_requests(), "{} computes for nobody", name)
    found = {memory.instance_id: memory for memory in made.engine.memory()}
    hold(
        set(found) == set(node.instances),
        "{} has {}, not {}",
        name,
        set(found),
        set(node.instances),
    )
    for instance_id, instance in node.instances.items():
        state = instance.state
        rests = state in (InstanceState.READY, InstanceState.PARKED)
        hold(rests, "{} is {} for ever", instance_id, state)
        blocks, real = instance.kv_blocks, found[instance_id].kv_blocks
        hold(blocks == real, "{} has {} KV blocks, not {}", instance_id, real, blocks)
        used = instance.kv_blocks_used
        hold(not used, "{} uses {} KV blocks for nobody", instance_id, used)
