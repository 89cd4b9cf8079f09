"""Loads of a node, one after the other: when they end, and who may go before whom."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from mesh.core.controller.instances.loading_lane import OVERDUE_SHARE, lane_ends_s, loads_end_s
from mesh.domain.actions import RefuseRequest, TellAccepted
from mesh.domain.events import LoadRequested
from mesh.domain.ids import DeploymentName, ModelId, OperationId
from mesh.domain.messages import Heartbeat, LoadInstance, UnloadInstance
from mesh.domain.reasons import RefusalReason, Verdict
from mesh.domain.slo import ColdStart, Slo
from mesh.domain.steps import HeldModel, LoadRate, LoadTier
from mesh.memory.station import ReservationKind
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
    only,
    request,
)

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
    cell = CellUnderTest(*(deployment(name, slo=BY_LENGTH) for name in ("a", "b")))
    link, _ = cell.join(replace(hello(), shares_weights=True, load_rates=SHARED_RATES))
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
