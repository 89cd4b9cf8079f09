"""Loads of a node, one after the other: when they end, and who may go before whom."""

from dataclasses import replace
from math import inf

from mesh.core.controller.instances.loading_lane import OVERDUE_SHARE, loads_end_s
from mesh.domain.actions import TellAccepted
from mesh.domain.messages import LoadInstance
from mesh.domain.slo import Slo
from mesh.domain.steps import LoadRate
from tests.core.cells import CellUnderTest, commands, deployment, hello, of_kind, only, request

BY_LENGTH = Slo(ttft_s=2.5, ttft_tokens_per_s=50.0)
"""A prompt of 400 tokens has 8 s to its first token."""


def cell_that_loads() -> CellUnderTest:
    """Loads take 1 s; that of `first` has begun."""
    names = ("first", "patient", "next")
    cell = CellUnderTest(*(deployment(name, slo=BY_LENGTH) for name in names))
    rate = LoadRate(fixed_s=1.0, bytes_per_s=inf)
    cell.join(replace(hello(memory_bytes=8 << 30), load_rate=rate))
    assert len(commands(cell.invoke(request("r0", of="first")), LoadInstance)) == 1
    return cell


def test_a_load_ends_when_it_was_expected_to_until_it_is_overdue() -> None:
    cell = cell_that_loads()
    (node,) = cell.core.cell.nodes.values()
    for now_s, end_s in ((100.9, 101.0), (101.5, 101.5 + OVERDUE_SHARE)):
        assert list(loads_end_s(node, now_s).values()) == [end_s]


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
