"""Loads of a node, one after the other: when they end, and who may go before whom."""

import os
from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.core.controller.instances.node_schedule import (
    OVERDUE_SHARE,
    PlannedLoad,
    lane_ends_s,
    loads_end_s,
    slot_for,
)
from mesh.core.controller.state.instance import InstanceEntry
from mesh.domain.actions import RefuseRequest, TellAccepted
from mesh.domain.events import LoadRequested
from mesh.domain.ids import DeploymentName, InstanceId, ModelId, OperationId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.messages import Heartbeat, LoadInstance, UnloadInstance
from mesh.domain.model import NOTHING
from mesh.domain.reasons import RefusalReason, Verdict
from mesh.domain.slo import ColdStart, Slo
from mesh.domain.steps import HeldModel, LoadRate, LoadTier
from mesh.memory.shared_weights import SharedWeights
from mesh.memory.station import LOADS, Reservation, ReservationKind
from mesh.policy import interface
from mesh.policy.llm_mesh import LLM_MESH
from mesh.policy.plans import Plan, Start
from tests.core.admission import instance as loaded
from tests.core.admission import node as node_with
from tests.core.cells import (
    MIB,
    MODEL,
    CellUnderTest,
    commands,
    deployment,
    hello,
    of_kind,
    one_node,
    only,
    request,
)
from tests.core.controller.state.entries import Entries
from tests.memory.stations import sized

BY_LENGTH = Slo(ttft_s=2.5, ttft_tokens_per_s=50.0)
"""A prompt of 400 tokens has 8 s to its first token."""


def cell_that_loads(
    slo: Slo = BY_LENGTH, nodes: int = 1, *, shares_weights: bool = False
) -> CellUnderTest:
    """Loads take 1 s; that of `first` has begun, on one of the nodes."""
    names = ("first", "patient", "next")
    cell = CellUnderTest(*(deployment(name, slo=slo) for name in names))
    rate = LoadRate(fixed_s=1.0, bytes_per_s=inf)
    for number in range(nodes):
        name = f"n{number}"
        cell.join(
            replace(
                hello(name, run_id=name, memory_bytes=8 << 30),
                load_rates=((LoadTier.DISK, rate),),
                shares_weights=shares_weights,
            )
        )
    assert len(commands(cell.invoke(request("r0", of="first")), LoadInstance)) == 1
    return cell


def test_a_load_ends_when_it_was_expected_to_until_it_is_overdue() -> None:
    cell = cell_that_loads()
    (node,) = cell.core.cell.nodes.values()
    for now_s, end_s in ((100.9, 101.0), (101.5, 101.5 + OVERDUE_SHARE)):
        assert list(loads_end_s(node, now_s).values()) == [end_s]


def test_weights_that_are_still_being_loaded_are_shared_after_that_load_and_not_before() -> None:
    cell = cell_that_loads(shares_weights=True)
    (node,) = cell.core.cell.nodes.values()
    assert [node.station.load_kind(name) for name in node.instances] == [ReservationKind.LOAD]
    cell.invoke(request("r1", of="patient", prompt=(1,) * 400))
    assert {node.station.load_kind(name) for name in node.instances} == {ReservationKind.LOAD}
    first_s, second_s = loads_end_s(node, cell.now_s).values()
    assert first_s == cell.now_s + 1.0
    assert first_s < second_s < first_s + 0.5, "it maps what the first has loaded"


def test_a_load_that_is_needed_sooner_goes_first() -> None:
    cell = cell_that_loads()
    cell.invoke(request("r1", of="patient", prompt=(1,) * 400))
    assert only(cell.invoke(request("r2", of="next")), TellAccepted).grace_s == 0.0
    (node,) = cell.core.cell.nodes.values()
    assert [i.split("-")[0] for i in loads_end_s(node, cell.now_s)] == ["first", "next", "patient"]


def test_a_load_keeps_its_place_for_whoever_was_promised_it_later_and_needs_it_sooner() -> None:
    cell = cell_that_loads()
    cell.invoke(request("r1", of="patient", prompt=(1,) * 400))
    assert only(cell.invoke(request("r2", of="patient")), TellAccepted).grace_s == 0.0
    asked = cell.invoke(request("r3", of="next"))
    assert all(told.grace_s > 0.0 for told in of_kind(asked, TellAccepted))
    (node,) = cell.core.cell.nodes.values()
    order = [i.split("-")[0] for i in loads_end_s(node, cell.now_s)]
    assert order[:2] == ["first", "patient"]
    assert [w.instance_id.split("-")[0] for w in node.station.waiting()] == order[1:]


@pytest.mark.parametrize(
    ("ttft_s", "nodes", "apart"), [(2.2, 2, True), (2.2, 1, False), (4, 2, False)]
)
def test_who_could_hardly_be_in_time_behind_another_load_gets_a_free_link_if_there_is_one(
    ttft_s: float, nodes: int, apart: bool
) -> None:
    """Behind the other one a load ends after 2 s. Else the fuller node is the better one."""
    cell = cell_that_loads(Slo(ttft_s=ttft_s), nodes)
    assert only(cell.invoke(request("r1", of="next")), TellAccepted).grace_s == 0.0
    used = {instance.node.node_id for instance in cell.core.cell.instances.values()}
    assert len(used) == (2 if apart else 1)


SHARED_RATES = (
    (LoadTier.DISK, LoadRate(fixed_s=1.0, bytes_per_s=inf)),
    (LoadTier.HOST, LoadRate(fixed_s=0.25, bytes_per_s=inf)),
)


def test_who_shares_weights_is_promised_them_when_their_load_is_over_and_not_before() -> None:
    """Loads take 1 s, and 0.25 s with weights that are there."""
    cell, link = one_node(
        *(deployment(name, slo=BY_LENGTH) for name in ("a", "b")),
        node=replace(hello(), shares_weights=True, load_rates=SHARED_RATES),
    )
    (first,) = commands(cell.invoke(request("r1", of="a")), LoadInstance)
    assert not commands(cell.invoke(request("r2", of="b")), LoadInstance)
    (node,) = cell.core.cell.nodes.values()
    assert list(loads_end_s(node, cell.now_s).values()) == [101.0, 101.25]
    cell.now_s = 101.0
    (second,) = commands(cell.loaded(link, first.instance_id), LoadInstance)
    assert second.deployment == "b"
    assert node.source_of(deployment("c")) == (LoadTier.HOST, ReservationKind.WAKE)


def test_a_load_does_not_take_the_place_of_the_instance_whose_weights_it_takes() -> None:
    """Two instances idle alike on a node that has no room for a third."""
    other = replace(MODEL, model_id=ModelId("other"))
    cell = CellUnderTest(deployment("a"), deployment("b"), replace(deployment("x"), model=other))
    idle = loaded("a1", "a"), replace(loaded("x1", "x"), model_id=other.model_id)
    cell.join(replace(node_with("n1", *idle, memory_bytes=640 * MIB), shares_weights=True))
    asked = cell.invoke(request("r1", of="b"))
    assert [unload.instance_id for unload in commands(asked, UnloadInstance)] == ["x1"]


def test_a_wake_waits_for_no_load_from_the_disk() -> None:
    cell = cell_that_loads()
    (node,) = cell.core.cell.nodes.values()
    cell.invoke(request("r1", of="patient", prompt=(1,) * 400))
    sleeps = HeldModel(model_id=MODEL.model_id, tier=LoadTier.HOST, context_tokens_max=512)
    cell.report(node.link_id, Heartbeat(rss_bytes=1, models=(sleeps,)))
    (woken,) = commands(cell.invoke(request("r2", of="next")), LoadInstance)
    ends_s = loads_end_s(node, cell.now_s)
    instance = node.instances[woken.instance_id]
    assert ends_s[woken.instance_id] == cell.now_s + instance.load_s
    assert lane_ends_s(node, cell.now_s, ReservationKind.WAKE) == ends_s[woken.instance_id]
    assert lane_ends_s(node, cell.now_s, ReservationKind.LOAD) == cell.now_s + 2.0


def test_a_load_that_waits_is_expected_anew_when_its_shape_has_been_compiled() -> None:
    """It takes 1 s with the compile and 0.25 without; the one that runs has compiled."""
    other = replace(MODEL, model_id=ModelId("other"))
    cell = CellUnderTest(
        deployment("a", slo=BY_LENGTH), replace(deployment("b", slo=BY_LENGTH), model=other)
    )
    tiers = ((LoadTier.DISK, 1.0), (LoadTier.PREPARED, 0.25))
    rates = tuple((tier, LoadRate(fixed_s=s, bytes_per_s=inf)) for tier, s in tiers)
    link, _ = cell.join(replace(hello(), load_rates=rates))
    for name in ("a", "b"):
        cell.invoke(request(f"r-{name}", of=name))
    (node,) = cell.core.cell.nodes.values()
    assert list(loads_end_s(node, cell.now_s).values()) == [101.0, 102.0]
    compiled = tuple(
        HeldModel(model_id=model.model_id, tier=LoadTier.PREPARED, context_tokens_max=512)
        for model in (MODEL, other)
    )
    cell.report(link, Heartbeat(rss_bytes=1, models=compiled))
    assert list(loads_end_s(node, cell.now_s).values()) == [101.0, 101.25]


def test_no_load_from_the_disk_waits_for_the_import_of_another_model() -> None:
    """An import takes 20 s, a load from the disk 1 s."""
    far = replace(MODEL, model_id=ModelId("far"))
    cell = CellUnderTest(replace(deployment("far"), model=far), deployment("a"), deployment("b"))
    tiers = ((LoadTier.REMOTE, 20.0), (LoadTier.DISK, 1.0))
    rates = tuple((tier, LoadRate(fixed_s=s, bytes_per_s=inf)) for tier, s in tiers)
    stored = HeldModel(model_id=MODEL.model_id, tier=LoadTier.DISK)
    cell.join(replace(hello(), models=(stored,), load_rates=rates))
    assert commands(cell.invoke(request("r1", of="far")), LoadInstance)
    assert commands(cell.invoke(request("r2", of="a")), LoadInstance)
    assert not commands(cell.invoke(request("r3", of="b")), LoadInstance), "behind the other one"
    (node,) = cell.core.cell.nodes.values()
    ends_s = {i.split("-")[0]: at_s for i, at_s in loads_end_s(node, cell.now_s).items()}
    assert (ends_s["far"], ends_s["a"]) == (120.0, 101.0)


@pytest.mark.parametrize(("room_mib", "late"), [(450, False), (340, True)])
def test_where_the_last_that_has_the_weights_goes_for_a_load_it_is_promised_as_one_from_disk(
    room_mib: int, late: bool
) -> None:
    """An instance of 300 MiB idles; the next one takes 116, its first token is due after 0.5 s."""
    cell = CellUnderTest(*(deployment(name, slo=Slo(ttft_s=0.5)) for name in "ab"))
    idle = node_with("n1", loaded("a1", "a"), memory_bytes=room_mib * MIB)
    cell.join(replace(idle, shares_weights=True, load_rates=SHARED_RATES))
    asked = cell.invoke(request("r1", of="b"))
    assert bool(commands(asked, UnloadInstance)) is late
    assert (only(asked, TellAccepted).grace_s > 0.0) is late


class Asking:
    """`llm-mesh` that notes when the weights of who starts would be there."""

    def __init__(self) -> None:
        self.arrive_s: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(LLM_MESH, name)

    def passes(self, plan: Plan, tests: interface.Tests) -> Verdict:
        if isinstance(plan, Start):
            self.arrive_s.append(tests.arrives_s(plan))
        return tests.shadow(plan)


def cell_where_the_weights_go(slo: Slo = BY_LENGTH, rule: Any = "llm-mesh") -> CellUnderTest:
    """On a node where `x` is being loaded from disk, `a` idles and has to go for `b`, which could
    share its weights.
    """
    others = (replace(MODEL, model_id=ModelId(name)) for name in "xy")
    cell = CellUnderTest(
        *(deployment(name, slo=slo) for name in "ab"),
        *(replace(deployment(model.model_id), model=model) for model in others),
        rule=rule,
    )
    idle = node_with("n1", loaded("a1", "a"), memory_bytes=456 * MIB)
    cell.join(replace(idle, shares_weights=True, load_rates=SHARED_RATES))
    assert commands(cell.invoke(request("r0", of="x")), LoadInstance)
    return cell


def test_a_load_for_which_the_weights_go_that_it_would_share_is_planned_behind_the_others() -> None:
    cell = cell_where_the_weights_go()
    asked = LoadRequested(operation_id=OperationId("o"), name=DeploymentName("b"))
    assert commands(cell.tell(asked), UnloadInstance)
    (instance,) = cell.core.cell.deployments[DeploymentName("b")].instances.values()
    assert instance.needed_s == cell.now_s + 2.0


def test_a_policy_is_told_that_it_comes_behind_the_others() -> None:
    asking = Asking()
    cell = cell_where_the_weights_go(rule=asking)
    asking.arrive_s.clear()
    cell.invoke(request("r1", of="b"))
    assert asking.arrive_s
    assert set(asking.arrive_s) == {cell.now_s + 2.0}


def test_where_it_could_hardly_be_in_time_behind_the_others_a_free_link_is_better() -> None:
    """On another node that has to make room."""
    cell = cell_where_the_weights_go(Slo(ttft_s=2.2))
    y = replace(loaded("y1", "y"), model_id=ModelId("y"))
    cell.join(replace(node_with("n2", y, memory_bytes=340 * MIB), load_rates=SHARED_RATES))
    asked = cell.invoke(request("r1", of="b"))
    assert only(asked, TellAccepted).grace_s == 0.0
    assert [c.instance_id for c in commands(asked, UnloadInstance)] == ["y1"]


def test_who_could_not_wait_for_that_is_refused_at_once() -> None:
    """It would be in time with the weights, or on a free link."""
    cell = cell_where_the_weights_go(Slo(ttft_s=1.5, cold_start=ColdStart.REFUSE))
    refused = only(cell.invoke(request("r1", of="b")), RefuseRequest)
    assert refused.reason is RefusalReason.FIRST_TOKEN_LATE


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

    def share(self, name: str) -> SharedWeights | None:
        """Half of the instances have weights in common."""
        return SharedWeights(key="m", size_bytes=self.shared) if NAMES.index(name) % 2 else None

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


PATIENT = Slo(ttft_s=8.0)


def begun(*, shares_weights: bool, busy_load_factor: float) -> tuple[InstanceEntry, InstanceEntry]:
    """Loads of one model, 1 s, and 0.25 s with weights that are there: of `a`, as it begins, and of
    `b`, which waits for its end, as its caller does.
    """
    cell = CellUnderTest(*(deployment(name, slo=PATIENT) for name in ("a", "b")))
    tiers = ((LoadTier.DISK, 1.0), (LoadTier.HOST, 0.25))
    link, _ = cell.join(
        replace(
            hello(),
            shares_weights=shares_weights,
            busy_load_factor=busy_load_factor,
            load_rates=tuple((tier, LoadRate(fixed_s=s, bytes_per_s=inf)) for tier, s in tiers),
        )
    )
    (first,) = commands(cell.invoke(request("r1", of="a", max_tokens=400)), LoadInstance)
    cell.invoke(request("r2", of="b"))
    cell.now_s += 1.0
    (second,) = commands(cell.loaded(link, first.instance_id), LoadInstance)
    instances = cell.core.cell.instances
    return instances[first.instance_id], instances[second.instance_id]


def test_a_load_is_expected_beside_the_one_who_waited_for_the_load_before() -> None:
    first, second = begun(shares_weights=False, busy_load_factor=2.0)
    assert len(first.requests) == 1
    assert first.load_expected_s == pytest.approx(1.0)
    assert 1.1 < second.load_expected_s < 1.5, "its answer takes less time than the load"
    assert second.load_s == pytest.approx(2.0), "planned beside all along"


def test_a_load_takes_no_weights_of_its_own_instance() -> None:
    first, second = begun(shares_weights=True, busy_load_factor=1.0)
    assert first.load_expected_s == pytest.approx(1.0)
    assert second.load_expected_s == pytest.approx(0.25)
