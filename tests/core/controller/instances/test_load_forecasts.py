"""Forecasts and execution of loads agree: a node's loads end in the order and at the times that
were forecast, after any history of loads, resizes and unloads, as long as nothing new comes.

`MESH_LOAD_FORECASTS` says how many histories are tried; 10,000 need `--timeout 0`.
"""

import os
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.core.controller.instances.loading_lane import PlannedLoad, loads_end_s, slot_for
from mesh.domain.ids import InstanceId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.model import NOTHING
from mesh.domain.steps import LoadTier
from mesh.memory.shares import Share
from mesh.memory.station import LOADS, Reservation, ReservationKind
from tests.core.controller.state.entries import Entries
from tests.memory.stations import sized

HISTORIES = int(os.environ.get("MESH_LOAD_FORECASTS") or 200)
CAPACITY = 24
NAMES = tuple(f"i{number}" for number in range(8))
STEP = st.tuples(
    st.sampled_from(("issue", "issue", "issue", "unload", "end", "cancel")),
    st.sampled_from(NAMES),
    st.integers(1, 9),
    st.integers(0, 4),
)
"""What is done, to which instance, its size in bytes and when that is needed."""


class Node:
    """A node of the controller's books, whose reservations the test issues and ends."""

    def __init__(self, shared: int) -> None:
        self.entries = Entries()
        self.node = self.entries.node
        self.entries.cell.remove_instance(self.entries.instance)
        self.station = self.node.station
        self.station.limit(CAPACITY)
        self.shared = shared
        self.now_s = 1.0

    def share(self, name: str) -> Share | None:
        """Half of the instances have weights in common."""
        return Share(key="m", size_bytes=self.shared) if NAMES.index(name) % 2 else None

    def issue(self, name: str, size_bytes: int, needed_s: float) -> None:
        instance, number = self.node.instances.get(InstanceId(name)), NAMES.index(name)
        if instance is not None and instance.state is InstanceState.UNLOADING:
            return
        kind = ReservationKind.RESIZE if instance is not None else LOADS[number % 4 % len(LOADS)]
        share, instance_id = self.share(name), InstanceId(name)
        size = sized(size_bytes, share)
        started = self.station.issue(kind, instance_id, size, needed_s, share)
        if started is None:
            return
        if instance is None:
            instance = self.entries.an_instance(name, self.node)
            instance.state = InstanceState.LOADING
            instance.note_needed(needed_s)
            instance.plan_load(1.0 + number % 3)
        self.began(started)

    def unload(self, name: str) -> None:
        instance = self.node.instances.get(InstanceId(name))
        if instance is None or instance.state is InstanceState.UNLOADING:
            return
        started: Iterable[Reservation] = ()
        if instance.state is InstanceState.READY:
            started = (
                self.station.issue(ReservationKind.UNLOAD, instance.instance_id, NOTHING, 0.0) or ()
            )
        elif self.station.running(instance.instance_id):
            started = self.station.cancel(instance.instance_id)
        else:
            self.forget(name)
            return
        instance.state = InstanceState.UNLOADING
        self.began(started)

    def forget(self, name: str) -> None:
        self.entries.cell.remove_instance(self.node.instances[InstanceId(name)])
        self.began(self.station.forget(InstanceId(name)))

    def began(self, reservations: Iterable[Reservation]) -> None:
        for reservation in reservations:
            if reservation.kind in LOADS:
                self.node.instances[reservation.instance_id].load_started_s = self.now_s

    def end(self, reservation: Reservation) -> None:
        """What runs is done."""
        instance = self.node.instances[reservation.instance_id]
        given_up = reservation.kind in LOADS and instance.state is InstanceState.UNLOADING
        if given_up or not reservation.size_bytes:
            self.forget(instance.instance_id)
            return
        if reservation.kind in LOADS:
            instance.note_loaded(LoadTier.DISK, self.now_s)
        self.began(self.station.done(reservation.instance_id, reservation.size))

    def execute(self) -> dict[str, float]:
        """Run everything to its end, resizes and unloads in no time, and tell when loads ended.
        Each forecast on the way says the same of the loads that are left.
        """
        ended: dict[str, float] = {}
        forecast = loads_end_s(self.node, self.now_s)
        while running := self.station.running_reservations():
            short = [r for r in running if r.kind not in LOADS]
            if short:
                self.end(short[0])
                continue
            at_s, reservation = min(((self._ends_s(r), r) for r in running), key=lambda r: r[0])
            left = {name: end_s for name, end_s in forecast.items() if name not in ended}
            # A load that has ended this moment and is not done yet would count as overdue.
            if at_s > self.now_s:
                assert loads_end_s(self.node, self.now_s) == left
            ended[reservation.instance_id] = self.now_s = at_s
            self.end(reservation)
        return ended

    def _ends_s(self, load: Reservation) -> float:
        instance = self.node.instances[load.instance_id]
        return instance.load_started_s + instance.load_s


def after(shared: int, history: Iterable[tuple[str, str, int, int]]) -> Node:
    node = Node(shared)
    for what, name, size_bytes, needed_s in history:
        running = node.station.running(InstanceId(name))
        match what:
            case "issue":
                node.issue(name, size_bytes, float(needed_s))
            case "unload":
                node.unload(name)
            case "end" if running is not None:
                node.end(running)
            case "cancel" if (instance := node.node.instances.get(InstanceId(name))) is not None:
                if instance.state is InstanceState.READY:
                    node.began(node.station.cancel(InstanceId(name)))
    return node


@settings(max_examples=HISTORIES)
@given(shared=st.integers(1, 4), history=st.lists(STEP, max_size=40))
def test_loads_end_as_forecast(shared: int, history: list[tuple[str, str, int, int]]) -> None:
    node = after(shared, history)
    forecast = loads_end_s(node.node, node.now_s)
    ended = node.execute()
    assert ended == forecast
    for kind_of in range(4):
        names = [n for n in forecast if NAMES.index(n) % 4 % len(LOADS) == kind_of]
        assert names == [n for n in ended if n in names], "in that order"


@settings(max_examples=HISTORIES // 3)
@given(
    history=st.lists(STEP, max_size=40),
    kind=st.sampled_from(LOADS),
    needed_s=st.integers(0, 4),
)
def test_one_more_load_ends_as_forecast_or_is_promised_later(
    history: list[tuple[str, str, int, int]], kind: ReservationKind, needed_s: int
) -> None:
    node = after(3, history)
    ready_s = slot_for(
        node.node, PlannedLoad(kind=kind, load_s=2.0), float(needed_s), node.now_s
    ).ready_s
    newcomer = InstanceId("one-more")
    started = node.station.issue(kind, newcomer, NOTHING, float(needed_s))
    assert started is not None
    instance = node.entries.an_instance(newcomer, node.node)
    instance.state = InstanceState.LOADING
    instance.plan_load(2.0)
    node.began(started)
    assert node.execute()[newcomer] <= ready_s
