"""The controller core under watch: its books of memory, and the commands that it sends, are held
to their rules after every event, and what happened is counted.
"""

from collections import Counter
from collections.abc import Sequence

from mesh.core.controller.core import ControllerCore
from mesh.core.controller.state.node import NodeEntry
from mesh.domain.actions import ControllerAction, SendCommand
from mesh.domain.events import (
    ControllerEvent,
    InvokeRequested,
    KeepAliveExpired,
    NodeReported,
    PlaceRetryDue,
)
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.messages import (
    InstanceGone,
    InstanceLoaded,
    KvResized,
    LoadFailed,
    LoadInstance,
    ResizeKv,
    TokensReport,
    UnloadInstance,
)
from mesh.memory.station import Reservation, ReservationKind
from tests.core.world.books import check_books
from tests.core.world.kept import check_refusals

Operation = LoadInstance | ResizeKv | UnloadInstance
KINDS: dict[ReservationKind, type[Operation]] = {
    ReservationKind.LOAD: LoadInstance,
    ReservationKind.RESIZE: ResizeKv,
    ReservationKind.UNLOAD: UnloadInstance,
}


class WatchedCore:
    """Passes events on to the core, and fails when a rule is broken."""

    def __init__(self, core: ControllerCore, seen: Counter[str]) -> None:
        self.core = core
        self.seen = seen
        self._under_way: dict[tuple[int, InstanceId], Operation] = {}
        """Sent over a link, and not answered by what came back over it."""
        self._issued: set[tuple[int, int]] = set()
        self._started: set[tuple[int, int]] = set()
        """By link and sequence: a link has a station of its own."""
        self._short: set[InstanceId] = set()
        """Their last shrink failed, or met blocks in use."""
        self._overpromised: set[int] = set()
        """Links of nodes where that was, for as long as others are promised the memory."""

    def handle(self, event: ControllerEvent, now_s: float) -> list[ControllerAction]:
        cell = self.core.cell
        states = {i: instance.state for i, instance in cell.instances.items()}
        evictions = {r: held.evictions for r, held in cell.requests.items()}
        known = {i: instance.kv_blocks for i, instance in cell.instances.items()}
        self._note_answer(event)
        actions = self.core.handle(event, now_s)
        self.seen["controller events"] += 1
        for node in cell.nodes.values():
            check_books(node)
            if node.station.promised_bytes <= node.station.capacity_bytes:
                self._overpromised.discard(node.link_id)
            else:
                assert node.link_id in self._overpromised
        for instance_id, instance in cell.instances.items():
            if instance.state is InstanceState.PARKED and instance_id not in self._short:
                assert instance.promised_blocks == 1
        self._check_commands(actions, known)
        check_refusals(self.core, now_s)
        self._count(event, states, evictions)
        return actions

    def _note_answer(self, event: ControllerEvent) -> None:
        if not isinstance(event, NodeReported):
            return
        said = event.report
        if isinstance(said, InstanceLoaded | LoadFailed | InstanceGone | KvResized):
            of = (event.link_id, said.instance_id)
            before = self._under_way.get(of)
            if not (isinstance(said, InstanceLoaded) and isinstance(before, UnloadInstance)):
                self._under_way.pop(of, None)
            self.seen["failed loads"] += isinstance(said, LoadFailed)
            if isinstance(said, KvResized):
                assert isinstance(before, ResizeKv), "nobody asked for that"
                self._note_resized(event.link_id, said, before)

    def _note_resized(self, link_id: int, said: KvResized, asked: ResizeKv) -> None:
        self.seen["failed resizes"] += bool(said.error)
        self._short.discard(said.instance_id)
        if said.kv_blocks > asked.kv_blocks:
            self.seen["short shrinks"] += 1
            self._short.add(said.instance_id)
            self._overpromised.add(link_id)

    def _check_commands(
        self, actions: Sequence[ControllerAction], known: dict[InstanceId, int]
    ) -> None:
        """What the station started was sent, once, and nothing else was but unloads of what nobody
        has in its books, or of what still loads.
        """
        sent: list[tuple[int, Operation]] = []
        for action in actions:
            if not isinstance(action, SendCommand) or action.link_id not in self.core.cell.links:
                continue  # the node was lost in this very turn
            if isinstance(action.command, Operation):
                sent.append((action.link_id, action.command))
        started = self._note_started()
        for link_id, reservation in started:
            (command,) = [
                c for at, c in sent if at == link_id and c.instance_id == reservation.instance_id
            ]
            assert isinstance(command, KINDS[reservation.kind])
        of_station = {(at, reservation.instance_id) for at, reservation in started}
        for link_id, command in sent:
            of = (link_id, command.instance_id)
            instance = self.core.cell.instances.get(command.instance_id)
            before = self._under_way.get(of)
            if of not in of_station:
                assert isinstance(command, UnloadInstance), "sent without the station"
                assert instance is None or isinstance(before, LoadInstance) or before is None
                self.seen["loads given up"] += isinstance(before, LoadInstance)
            else:
                assert before is None, f"{command} overlaps {before}"
                assert instance is not None
                self._count_resize(command, known)
            self._under_way[of] = command

    def _note_started(self) -> list[tuple[int, Reservation]]:
        started: list[tuple[int, Reservation]] = []
        for node in self.core.cell.nodes.values():
            for reservation in node.station.running_reservations():
                key = (node.link_id, reservation.sequence)
                if key not in self._started:
                    self._started.add(key)
                    started.append((node.link_id, reservation))
                    if key in self._issued:
                        self.seen["woken"] += 1
                    elif reservation.kind is ReservationKind.RESIZE:
                        _check_shrink(node, reservation)
            for reservation in node.station.waiting():
                key = (node.link_id, reservation.sequence)
                assert key not in self._started, "a reservation that has started waits again"
                self.seen["waits"] += key not in self._issued
                self._issued.add(key)
        return started

    def _count_resize(self, command: Operation, known: dict[InstanceId, int]) -> None:
        if isinstance(command, ResizeKv):
            before = known.get(command.instance_id, command.kv_blocks)
            self.seen["grows"] += command.kv_blocks > before
            self.seen["shrinks"] += command.kv_blocks < before

    def _count(
        self,
        event: ControllerEvent,
        states: dict[InstanceId, InstanceState],
        evictions: dict[RequestId, int],
    ) -> None:
        cell = self.core.cell
        for instance_id, instance in cell.instances.items():
            before, after = states.get(instance_id), instance.state
            loaded = before in (InstanceState.READY, InstanceState.PARKED)
            self.seen["parks"] += after is InstanceState.PARKED and after is not before
            resumed = before is InstanceState.PARKED and after is InstanceState.READY
            self.seen["resumes"] += resumed
            if loaded and after is InstanceState.UNLOADING:
                wanted = isinstance(event, InvokeRequested | PlaceRetryDue)
                self.seen["reclaims"] += wanted
                self.seen["expiries"] += isinstance(event, KeepAliveExpired)
        for request_id, held in cell.requests.items():
            self.seen["evictions"] += held.evictions > evictions.get(request_id, 0)
        if isinstance(event, NodeReported) and isinstance(event.report, TokensReport):
            self.seen["starvations"] += bool(event.report.starved)


def _check_shrink(node: NodeEntry, reservation: Reservation) -> None:
    """A cache does not shrink below what its requests need. One that has waited may: for want of
    room they could not take its promise back meanwhile. And one may be let in once a shrink has
    begun: then the grow for it waits behind.
    """
    instance = node.instances[reservation.instance_id]
    footprint = instance.footprint
    if reservation.size_bytes < footprint.instance_bytes(instance.kv_blocks):
        needed_bytes = footprint.instance_bytes(max(instance.required_blocks, 1))
        assert max(reservation.size_bytes, instance.promised_bytes) >= needed_bytes
