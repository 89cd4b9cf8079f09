"""Instances of one model and context are booked its weights once on a node that shares them."""

from dataclasses import replace
from math import inf

import pytest

from mesh.core.controller.state.node import NodeEntry
from mesh.domain.actions import ControllerAction
from mesh.domain.deployment import Deployment
from mesh.domain.events import KeepAliveExpired, LeaseCheckDue
from mesh.domain.ids import DeploymentName, InstanceId, NodeId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.messages import (
    InstanceGone,
    InstanceLoaded,
    InstanceReport,
    LoadFailed,
    LoadInstance,
    NodeHello,
    UnloadInstance,
)
from mesh.domain.steps import LoadRate, LoadTier
from tests.core.cells import (
    FOOTPRINT,
    MIB,
    OTHER_MODEL,
    CellUnderTest,
    commands,
    deployment,
    hello,
    instance_report,
    one_node,
    request,
)

SHARED = replace(FOOTPRINT, shared_bytes=80 * MIB)
"""Each instance has 20 MiB of its own, and KV blocks of 1 MiB."""


def sharing(name: str) -> Deployment:
    return replace(deployment(name), footprints=(("scripted", SHARED),))


def node(name: str = "n1", *, mib: int = 230, shares: bool = True) -> NodeHello:
    of = hello(name, run_id=name, memory_bytes=mib * MIB)
    return replace(of, shares_weights=shares)


def entry(cell: CellUnderTest, name: str = "n1") -> NodeEntry:
    return cell.core.cell.nodes[NodeId(name)]


def loaded(cell: CellUnderTest, link: int, load: LoadInstance) -> list[ControllerAction]:
    said = InstanceLoaded(
        instance_id=load.instance_id, footprint=SHARED, kv_blocks=load.kv_blocks, elapsed_s=0.5
    )
    return cell.report(link, said)


def started(cell: CellUnderTest, link: int, name: str) -> LoadInstance:
    """An instance of a deployment is loaded for a request."""
    (load,) = commands(cell.invoke(request(f"r-{name}", of=name)), LoadInstance)
    loaded(cell, link, load)
    return load


def reported(name: str, of: str) -> InstanceReport:
    return instance_report(
        instance_id=InstanceId(name), deployment=DeploymentName(of), footprint=SHARED, kv_blocks=9
    )


@pytest.mark.parametrize(("shares", "instances"), [(True, 4), (False, 2)])
def test_a_further_instance_is_promised_what_is_its_own(shares: bool, instances: int) -> None:
    """The node has 240 MiB: the first instance takes 120, with 20 of KV cache, and each further one
    40.
    """
    cell, link = one_node(*(sharing(name) for name in "abcd"), node=node(mib=240, shares=shares))
    loads = []
    for name in "abcd":
        sent = commands(cell.invoke(request(f"r-{name}", of=name)), LoadInstance)
        loads += sent
        for load in sent:
            loaded(cell, link, load)
    assert len(loads) == instances
    station, kv_blocks = entry(cell).station, sum(load.kv_blocks for load in loads)
    weights = 80 + 20 * instances if shares else 100 * instances
    assert station.promised_bytes == station.tracked_bytes == (weights + kv_blocks) * MIB


def test_of_two_that_load_at_once_the_second_keeps_what_the_first_that_fails_was_promised() -> None:
    cell, link = one_node(sharing("a"), sharing("b"), node=node())
    (first,) = commands(cell.invoke(request("r1", of="a")), LoadInstance)
    assert not commands(cell.invoke(request("r2", of="b")), LoadInstance), "it waits for that load"
    station = entry(cell).station
    both = station.promised_bytes
    failed = LoadFailed(instance_id=first.instance_id, error="Unavailable", message="broke")
    (second,) = commands(cell.report(link, failed), LoadInstance)
    assert station.promised_bytes == SHARED.instance_bytes(second.kv_blocks) > both / 2
    loaded(cell, link, second)
    assert station.tracked_bytes == station.promised_bytes


def test_a_new_controller_and_a_new_link_book_what_is_loaded_once() -> None:
    cell = CellUnderTest(sharing("a"), sharing("b"))
    loaded_there = reported("a-0-1", "a"), reported("b-0-1", "b")
    for _ in range(2):
        cell.join(replace(node(), instances=loaded_there))
        assert entry(cell).station.promised_bytes == (80 + 2 * (20 + 9)) * MIB


def test_the_weights_are_free_once_the_last_that_has_them_is_gone() -> None:
    cell = CellUnderTest(sharing("a"), sharing("b"))
    loaded_there = reported("a-0-1", "a"), reported("b-0-1", "b")
    link, _ = cell.join(replace(node(), instances=loaded_there))
    station = entry(cell).station
    for left, name in ((109, "a-0-1"), (0, "b-0-1")):
        cell.report(link, InstanceGone(instance_id=InstanceId(name)))
        assert station.promised_bytes == station.tracked_bytes == left * MIB


def test_nobody_goes_for_another_model_where_one_that_works_keeps_the_weights() -> None:
    """All of what two idle ones share would be free with both, but for a third."""
    other = replace(sharing("x"), model=OTHER_MODEL)
    cell = CellUnderTest(sharing("a"), sharing("b"), sharing("c"), other)
    idle = reported("a-0-1", "a"), reported("b-0-1", "b")
    cell.join(replace(node(mib=180), instances=idle))
    assert entry(cell).free_bytes == 42 * MIB
    assert entry(cell).obtainable_bytes(sharing("c")) == 180 * MIB
    assert entry(cell).obtainable_bytes(other) == 180 * MIB
    asked = cell.invoke(request("r1", of="c"))
    assert commands(asked, LoadInstance)
    assert not commands(asked, UnloadInstance)
    asked = cell.invoke(request("r2", of="x"))
    assert not commands(asked, UnloadInstance)


def test_both_that_share_go_for_another_model_that_needs_their_weights() -> None:
    other = replace(sharing("x"), model=OTHER_MODEL)
    cell, link = one_node(
        sharing("a"),
        sharing("b"),
        other,
        node=replace(node(mib=150), instances=(reported("a", "a"), reported("b", "b"))),
    )
    asked = cell.invoke(request("r1", of="x"))
    assert [c.instance_id for c in commands(asked, UnloadInstance)] == ["a", "b"]
    assert not cell.report(link, InstanceGone(instance_id=InstanceId("a")))
    (load,) = commands(cell.report(link, InstanceGone(instance_id=InstanceId("b"))), LoadInstance)
    assert load.deployment == "x"


def test_an_instance_starts_where_the_weights_are() -> None:
    """On the emptier node, too."""
    cell = CellUnderTest(sharing("a"), sharing("b"))
    cell.join(node("n1", mib=400))
    cell.join(replace(node("n2", mib=1000), instances=(reported("a-0-1", "a"),)))
    cell.invoke(request("r1", of="b"))
    (instance,) = cell.core.cell.deployments[DeploymentName("b")].instances.values()
    assert instance.node.node_id == "n2"
    assert instance.state is InstanceState.LOADING


def test_another_context_limit_shares_nothing() -> None:
    cell, link = one_node(
        sharing("a"), replace(sharing("b"), context_tokens_max=256), node=node(mib=400)
    )
    a, b = started(cell, link, "a"), started(cell, link, "b")
    assert entry(cell).station.promised_bytes == (200 + a.kv_blocks + b.kv_blocks) * MIB


def test_a_load_shows_what_it_shares() -> None:
    """What was stated said nothing of it."""
    cell, link = one_node(deployment("a"), deployment("b"), node=node(mib=400))
    a, b = started(cell, link, "a"), started(cell, link, "b")
    assert entry(cell).station.promised_bytes == (120 + a.kv_blocks + b.kv_blocks) * MIB


def loaded_ahead(
    *parked: str, mib: int, budget_mib: int = 200, disk_s: float = 1.0
) -> tuple[CellUnderTest, list[ControllerAction]]:
    """What a node that rests does for `a`, which was called eight times; `x` has another model."""
    wanted = sharing("a"), sharing("c"), replace(sharing("x"), model=OTHER_MODEL)
    cell = CellUnderTest(*wanted)
    models = {of.spec.name: of.model.model_id for of in wanted}
    idle = [
        replace(reported(n, n), model_id=models[DeploymentName(n)], kv_blocks=1) for n in parked
    ]
    said = replace(
        node(mib=mib),
        instances=tuple(idle),
        prefetch_bytes=budget_mib * MIB,
        load_rates=((LoadTier.DISK, LoadRate(fixed_s=disk_s, bytes_per_s=inf)),),
    )
    cell.join(said)
    for name in ("a",) * 8 + ("x",) * 2 + ("c",):
        cell.core.cell.deployments[DeploymentName(name)].note_call(cell.now_s)
    for instance in tuple(cell.core.cell.instances.values()):
        named, since_s = instance.instance_id, instance.idle_since_s
        cell.tell(KeepAliveExpired(instance_id=named, idle_since_s=since_s))
    cell.now_s += 1.0
    return cell, cell.tell(LeaseCheckDue())


def test_what_is_loaded_ahead_takes_the_place_of_another_model_before_that_of_its_own() -> None:
    """Though `c`, which has its weights, is called the least. 13 MiB are missing."""
    cell, told = loaded_ahead("c", "x", mib=210)
    assert [c.instance_id for c in commands(told, UnloadInstance)] == ["x"]
    assert entry(cell).tier_of(sharing("a")) is LoadTier.HOST


@pytest.mark.parametrize(("disk_s", "loads"), [(1.0, True), (3.0, False)])
def test_or_that_of_its_own_if_a_load_from_disk_holds_nobody_up(disk_s: float, loads: bool) -> None:
    _, told = loaded_ahead("c", mib=120, disk_s=disk_s)
    assert [c.instance_id for c in commands(told, UnloadInstance)] == ["c"] * loads
