"""Loads of a node, one after the other: when they end, and who may go before whom."""

from dataclasses import replace
from math import inf

import pytest

from mesh.core.controller.instances.loading_lane import OVERDUE_SHARE, lane_ends_s, loads_end_s
from mesh.domain.actions import TellAccepted
from mesh.domain.messages import Heartbeat, LoadInstance
from mesh.domain.slo import Slo
from mesh.domain.steps import HeldModel, LoadRate, LoadTier
from mesh.memory.station import ReservationKind
from tests.core.cells import (
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


def test_only_what_is_loaded_can_be_shared_so_that_loads_of_one_model_follow_each_other() -> None:
    cell = cell_that_loads(shares_weights=True)
    (node,) = cell.core.cell.nodes.values()
    assert [node.station.load_kind(name) for name in node.instances] == [ReservationKind.LOAD]
    cell.invoke(request("r1", of="patient", prompt=(1,) * 400))
    assert list(loads_end_s(node, cell.now_s).values()) == [cell.now_s + 1.0, cell.now_s + 2.0]


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
