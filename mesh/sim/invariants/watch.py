"""What holds of a cell over time: memory commands follow each other, and nobody waits for long.

A recorder of one cell's decisions, through all of its controllers: `note` sees each of them, `look`
sees all of the cell, as often as its owner likes. Before: `checking`, and the tests' worlds.
After: nothing; a rule that is broken raises.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mesh.core.controller.core import ControllerCore
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.actions import SendCommand
from mesh.domain.events import NodeReported
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.limits import CellLimits
from mesh.domain.messages import (
    InstanceGone,
    InstanceLoaded,
    KvResized,
    LoadFailed,
    LoadInstance,
    ResizeKv,
    UnloadInstance,
)
from mesh.memory.station import LOADS, Reservation, ReservationKind
from mesh.sim.invariants.memory import said_bytes
from mesh.sim.invariants.rule import hold

Command = LoadInstance | ResizeKv | UnloadInstance
Answer = InstanceLoaded | LoadFailed | InstanceGone | KvResized
KINDS: dict[ReservationKind, type[Command]] = {
    ReservationKind.LOAD: LoadInstance,
    ReservationKind.WAKE: LoadInstance,
    ReservationKind.IMPORT: LoadInstance,
    ReservationKind.RESIZE: ResizeKv,
    ReservationKind.UNLOAD: UnloadInstance,
}


TAKE_ANY_PLACE = ("llm-mesh", "fcfs")
"""Policies under which nobody waits beside room that is there: others may have their reasons."""


class Watch:
    """Links of different controllers have different ids."""

    def __init__(self) -> None:
        self.checked: Counter[str] = Counter()
        """What was checked, how often."""
        self.seen: Counter[str] = Counter()
        """What was met, how often."""
        self._under_way: dict[tuple[int, InstanceId], Command] = {}
        """The commands that were sent over a link and not answered over it yet."""
        self._loads: set[InstanceId] = set()
        self._issued: set[tuple[int, int]] = set()
        self._started: set[tuple[int, int]] = set()
        """By link and sequence: a link has a station of its own."""
        self._short: set[InstanceId] = set()
        """Their last shrink failed, or met blocks in use."""
        self._overpromised: set[int] = set()
        """Links of nodes where that was, or that have less than they said, for as long as others
        are promised the memory.
        """
        self._overfull: dict[int, int] = {}
        """By link of a node that has less than it said, for as long as it holds more: how much."""
        self._capacity_bytes: dict[int, int] = {}
        """By link, for instances."""
        self._burdens: dict[int, _Burden] = {}
        """By link."""
        self._waiting_since_s: dict[RequestId, float] = {}
        """Heads of queues for which there seems to be a place."""

    def begin(self, core: ControllerCore) -> None:
        """Take what is under way for granted: its cell has run for a while."""
        for node in core.cell.nodes.values():
            for link_id, reservation in self._note_started(node):
                instance = node.instances[reservation.instance_id]
                kv_blocks = instance.footprint.kv_blocks(reservation.size)
                command: Command = UnloadInstance(instance_id=instance.instance_id)
                if reservation.kind is ReservationKind.RESIZE:
                    command = ResizeKv(instance_id=instance.instance_id, kv_blocks=kv_blocks)
                elif reservation.kind in LOADS and instance.to_load is not None:
                    command = instance.to_load
                self._under_way[link_id, instance.instance_id] = command
                self.checked["memory operations"] += 1
        waiting = {of.instance_id for n in core.cell.nodes.values() for of in n.station.waiting()}
        self._loads.update(name for name in core.cell.instances if name not in waiting)

    def note(self, core: ControllerCore, event: object, actions: Sequence[object]) -> None:
        """A decision has been made."""
        self.checked["decisions"] += 1
        links = core.cell.links
        touched: dict[int, None] = {}
        if isinstance(event, NodeReported):
            touched[event.link_id] = None
            if isinstance(event.report, Answer):
                self._note_answer(event.link_id, event.report)
        # What is told to a node that was lost in this very event is told to nobody.
        sent = [a for a in actions if isinstance(a, SendCommand) and a.link_id in links]
        touched.update((action.link_id, None) for action in sent)
        nodes = [links[link_id] for link_id in touched if link_id in links]
        commands = [(a.link_id, a.command) for a in sent if isinstance(a.command, Command)]
        self._check_reservations(core, nodes, commands)
        for node in nodes:
            self._check_promise(node)

    def look(self, core: ControllerCore, now_s: float) -> None:
        """Look at all of the cell. Whoever waits is tried again in time; the end of a request is
        looked at on its node alone, so that a place elsewhere may stay empty until then.
        """
        self.checked["looks"] += 1
        cell, limits = core.cell, core._limits
        self._check_reservations(core, cell.nodes.values(), ())
        for node in cell.nodes.values():
            self._check_promise(node)
            self._check_ease(node)
            _check_age(node, limits, now_s)
        before, self._waiting_since_s = self._waiting_since_s, {}
        for entry in cell.deployments.values():
            for request in entry.queue:
                waited_s, name = now_s - request.waits_since_s, request.original.request_id
                best = request.slo.best_effort
                longest_s = request.slo.ttft_s if best else limits.queue_wait_s_max
                longest_s += limits.place_retry_s
                loads = request.waits_for is not None and not request.waits_for.is_loaded
                hold(loads or waited_s <= longest_s, "{} waits for {:.1f} s", name, waited_s)
            if not entry.queue:
                continue
            retry_at_s = cell.retry_at_s
            hold((retry_at_s or 0.0) >= now_s, "{} is tried no more", entry.spec.name)
            head = entry.queue[0].original.request_id
            if entry.queue[0].slo.best_effort:
                continue  # it leaves places to others
            if core.policy.name in TAKE_ANY_PLACE and _has_place(core, entry, now_s):
                since_s = self._waiting_since_s[head] = before.get(head, now_s)
                soon = now_s <= since_s + limits.place_retry_s
                hold(soon, "{} waits for a place that is there, since {}", head, since_s)

    def _note_answer(self, link_id: int, said: Answer) -> None:
        of = link_id, said.instance_id
        before = self._under_way.get(of)
        self.seen["failed loads"] += isinstance(said, LoadFailed)
        if isinstance(said, InstanceLoaded) and isinstance(before, UnloadInstance):
            return  # its load was given up meanwhile; the end of that is still to come
        self._under_way.pop(of, None)
        if isinstance(said, KvResized):
            if not isinstance(before, ResizeKv):
                hold(False, "{} was resized, and nobody asked for that", of)
                return
            self.seen["failed resizes"] += bool(said.error)
            self._short.discard(said.instance_id)
            if said.kv_blocks > before.kv_blocks:
                self.seen["short shrinks"] += 1
                self._short.add(said.instance_id)
                self._overpromised.add(link_id)

    def _check_reservations(
        self, core: ControllerCore, nodes: Iterable[NodeEntry], sent: Sequence[tuple[int, Command]]
    ) -> None:
        """What the stations started was sent, once, and nothing else was but unloads of what nobody
        has in its books, or of what still loads.
        """
        started = [of for node in nodes for of in self._note_started(node)]
        for link_id, reservation in started:
            found = [
                c for at, c in sent if (at, c.instance_id) == (link_id, reservation.instance_id)
            ]
            told = len(found) == 1 and isinstance(found[0], KINDS[reservation.kind])
            hold(told, "{} has started, and its node was sent {}", reservation, found)
        of_station = {(at, reservation.instance_id) for at, reservation in started}
        for link_id, command in sent:
            of = link_id, command.instance_id
            before = self._under_way.get(of)
            if of in of_station:
                hold(before is None, "{} overlaps {}", command, before)
            else:
                given_up = before is None or isinstance(before, LoadInstance)
                known = core.cell.instances.get(command.instance_id)
                stray = isinstance(command, UnloadInstance) and (given_up or known is None)
                hold(stray, "{} was sent without the station", command)
                self.seen["loads given up"] += isinstance(before, LoadInstance)
            if isinstance(command, LoadInstance):
                hold(command.instance_id not in self._loads, "{} is loaded twice", of)
                self._loads.add(command.instance_id)
            self._under_way[of] = command
            self.checked["memory operations"] += 1

    def _note_started(self, node: NodeEntry) -> list[tuple[int, Reservation]]:
        started: list[tuple[int, Reservation]] = []
        for reservation in node.station.running_reservations():
            key = node.link_id, reservation.sequence
            if key in self._started:
                continue
            self._started.add(key)
            started.append((node.link_id, reservation))
            if key in self._issued:
                self.seen["woken"] += 1
            elif reservation.kind is ReservationKind.RESIZE:
                _check_shrink(node, reservation)
            if reservation.kind is ReservationKind.RESIZE:
                _count_resize(self.seen, node.instances[reservation.instance_id], reservation)
        for reservation in node.station.waiting():
            key = node.link_id, reservation.sequence
            hold(key not in self._started, "{} has started, and waits again", reservation)
            self.seen["waits"] += key not in self._issued
            self._issued.add(key)
        return started

    def _check_ease(self, node: NodeEntry) -> None:
        """A node that has got less to compute, or more memory, is asked again by those whom it has
        refused.
        """
        here: set[tuple[str, int]] = set()
        for name, instance in node.instances.items():
            here.add((name, 0))
            here.update((r, request.attempt) for r, request in instance.requests.items())
        before = self._burdens.get(node.link_id)
        self._burdens[node.link_id] = _Burden(node.version, frozenset(here), node.free_bytes)
        if before is not None and before.version == node.version:
            ended, more_bytes = before.holds - here, node.free_bytes - before.free_bytes
            hold(not ended, "{} has lost {} in one version", node.node_id, sorted(ended))
            hold(more_bytes <= 0, "{} has {} B more in one version", node.node_id, more_bytes)

    def _check_promise(self, node: NodeEntry) -> None:
        """No more is promised than there is, unless a node had to keep what was promised to others,
        or has less than it said, and then nothing is added to what it holds; a parked instance has
        given its cache back.
        """
        station, link_id = node.station, node.link_id
        said = said_bytes(node)
        if station.capacity_bytes < self._capacity_bytes.get(link_id, 0):
            self._overpromised.add(link_id)
            self._overfull[link_id] = station.tracked_bytes
        self._capacity_bytes[link_id] = station.capacity_bytes
        if station.tracked_bytes <= max(station.capacity_bytes, said):
            self._overfull.pop(link_id, None)
        else:
            most = self._overfull.get(link_id, 0)
            over = "{} holds {} B of {} B"
            hold(station.tracked_bytes <= most, over, node.node_id, station.tracked_bytes, most)
            self._overfull[link_id] = station.tracked_bytes
        if station.promised_bytes <= station.capacity_bytes:
            self._overpromised.discard(link_id)
        else:
            kept = link_id in self._overpromised
            hold(kept, "{} promised {} B too much", node.node_id, -station.free_bytes)
        for name, instance in node.instances.items():
            if instance.state is InstanceState.PARKED and name not in self._short:
                blocks = instance.promised_blocks
                hold(blocks == 1, "{} is parked with {} KV blocks", name, blocks)


class _Burden(NamedTuple):
    """What a node had to do when it was looked at last."""

    version: int
    holds: frozenset[tuple[str, int]]
    """Its instances, and the requests on them with their attempts."""
    free_bytes: int


def _check_age(node: NodeEntry, limits: CellLimits, now_s: float) -> None:
    """A node that is silent is given up in time, and so is a load that does not end."""
    silent_s = now_s - node.last_seen_s
    longest_s = limits.node_lease_s + limits.lease_check_s
    began = (node.iteration_started_s or 0.0) <= now_s
    hold(began, "{}: an iteration will begin at {}", node.node_id, node.iteration_started_s)
    hold(silent_s <= longest_s, "{} is silent for {:.1f} s", node.node_id, silent_s)
    for name, instance in node.instances.items():
        if instance.state is InstanceState.LOADING:
            loads_s = now_s - instance.load_started_s
            hold(loads_s <= limits.load_s_max, "{} loads for {:.1f} s", name, loads_s)


def _check_shrink(node: NodeEntry, reservation: Reservation) -> None:
    """A cache does not shrink below what its requests need. One that has waited may: for want of
    room they could not take its promise back meanwhile. And one may be let in once a shrink has
    begun: then the grow for it waits behind.
    """
    instance = node.instances[reservation.instance_id]
    footprint = instance.footprint
    if reservation.size_bytes < footprint.instance_bytes(instance.kv_blocks):
        needed_bytes = footprint.instance_bytes(max(instance.required_blocks, 1))
        enough = max(reservation.size_bytes, instance.promised_bytes) >= needed_bytes
        hold(enough, "{} takes blocks from the requests of {}", reservation, instance.instance_id)


def _count_resize(seen: Counter[str], instance: InstanceEntry, reservation: Reservation) -> None:
    size_bytes = instance.footprint.instance_bytes(instance.kv_blocks)
    seen["grows"] += reservation.size_bytes > size_bytes
    seen["shrinks"] += reservation.size_bytes < size_bytes


def _has_place(core: ControllerCore, entry: DeploymentEntry, now_s: float) -> bool:
    """Whether there seems to be a place for the head of a queue that nobody has refused: room in
    the cache of a loaded instance, all else being as it is, or a node with memory for another. One
    that was promised a load has its place.
    """
    head = entry.queue[0]
    if head.refusals.verdict or head.waits_for is not None:
        return False
    ready = [i for i in entry.instances.values() if i.takes_now and i.has_places_for(head)]
    if any(_has_room(core, instance, head) for instance in ready):
        return True
    return _could_be_loaded(core, entry, now_s)


def _has_room(core: ControllerCore, instance: InstanceEntry, request: RequestEntry) -> bool:
    blocks = instance.footprint.blocks_for(request.original.tokens_max)
    blocks = instance.required_blocks + (1 + len(request.mates)) * blocks
    size = core.policy.kv_of(blocks, instance.footprint.block_tokens, instance.context_tokens_max)
    return size.required_blocks <= instance.promised_blocks


def _could_be_loaded(core: ControllerCore, entry: DeploymentEntry, now_s: float) -> bool:
    """Whether a further instance, as large as all answers of any call may need it, would fit on a
    node.
    """
    deployment, answers = entry.deployment, 1 + len(entry.queue[0].mates)
    coming = any(i.state is InstanceState.LOADING for i in entry.instances.values())
    full = entry.replicas() >= entry.spec.scaling.replicas_max
    # The pause's own timer may be the next event of this very moment.
    if deployment is None or coming or full or now_s <= entry.paused_until_s:
        return False
    taken = [instance.node for instance in entry.instances.values()]
    for node in core.cell.nodes.values():
        footprint = node.footprint_of(deployment)
        blocks = answers * footprint.blocks_for(deployment.context_tokens_max)
        least = footprint.instance_bytes(blocks)
        free = node not in taken and node.node_id not in entry.avoided
        if free and node.takes(entry.spec) and node.free_bytes_for(deployment) >= least:
            return True
    return False
