"""How many nodes a cell wants: after calls that lacked one, when none has work, after a restart."""

from dataclasses import replace
from itertools import pairwise

import pytest

from mesh.domain.actions import ControllerAction, ReportMissingNodes, WantNodes
from mesh.domain.events import DeployRequested, LeaseCheckDue
from mesh.domain.ids import OperationId
from mesh.domain.lifecycle import NodeState
from mesh.domain.limits import CellLimits, NodeRange
from mesh.domain.messages import Heartbeat, LoadInstance, SubmitRequest, UnloadInstance
from mesh.domain.reasons import DeviceKind, FinishReason
from mesh.domain.views import NodesWanted
from tests.core.cells import (
    FOOTPRINT,
    MIB,
    MODEL,
    CellUnderTest,
    commands,
    deployment,
    hello,
    instance_report,
    of_kind,
    only,
    request,
)

LEAST, MOST = 0, 4
LIMITS = CellLimits(
    delivery_s_max=0.02,
    node_lease_s=3600.0,
    node_idle_s=180.0,
    node_ranges=(NodeRange(device=DeviceKind.CPU, least=LEAST, most=MOST),),
)
SETTLE = int(LIMITS.node_settle_s)
PAUSE = int(LIMITS.node_pause_s)


def seconds(cell: CellUnderTest, count: int, call: str = "") -> list[ControllerAction]:
    """So many pass, in each of which a deployment is called."""
    said: list[ControllerAction] = []
    for _ in range(count):
        cell.now_s += 1.0
        if call:
            said += cell.invoke(request(f"r-{cell.now_s:.0f}", of=call))
        said += cell.tell(LeaseCheckDue())
    return said


def kind(cell: CellUnderTest) -> NodesWanted:
    (found,) = cell.core.wanted(cell.now_s)
    return found


def busy(cell: CellUnderTest, name: str = "n1", of: str = "a") -> int:
    """A node that has room for one instance, and a request on it."""
    link, _ = cell.join(hello(name, memory_bytes=200 * MIB))
    load = only(commands(cell.invoke(request(f"first-{name}", of=of)), LoadInstance), LoadInstance)
    assert commands(cell.loaded(link, load.instance_id), SubmitRequest)
    return link


@pytest.fixture
def cell() -> CellUnderTest:
    return CellUnderTest(deployment("a"), deployment("b"), limits=LIMITS)


def test_a_new_controller_says_nothing_until_those_that_were_there_can_have_joined(
    cell: CellUnderTest,
) -> None:
    cell.tell(LeaseCheckDue())
    cell.join(hello("n1"))
    cell.join(hello("n2"))
    seconds(cell, SETTLE - 1)
    assert not cell.core.wanted(cell.now_s)
    told = only(seconds(cell, 1), WantNodes)
    assert (told.device, told.wanted) == (DeviceKind.CPU, 2)


def test_without_a_range_nothing_is_wanted() -> None:
    bare = CellUnderTest(deployment("a"), limits=CellLimits())
    assert not of_kind(seconds(bare, 30, call="a"), WantNodes)
    assert not bare.core.wanted(bare.now_s)


def test_a_call_that_finds_no_node_wants_one_at_once(cell: CellUnderTest) -> None:
    seconds(cell, SETTLE + 1)
    assert kind(cell).wanted == 0
    seconds(cell, PAUSE)
    assert only(seconds(cell, 1, call="a"), WantNodes).wanted == 1


def test_calls_without_room_want_more_and_one_alone_does_not(cell: CellUnderTest) -> None:
    busy(cell)
    seconds(cell, SETTLE + PAUSE + 1)
    assert kind(cell).wanted == 1
    assert not of_kind(seconds(cell, 1, call="b"), WantNodes)
    told = of_kind(seconds(cell, 6, call="b"), WantNodes)
    assert [one.wanted for one in told] == [3], "at most one more than as many again"


def test_it_changes_once_a_minute_at_most_and_never_beyond_its_range(cell: CellUnderTest) -> None:
    busy(cell)
    seconds(cell, SETTLE + PAUSE)
    changes: list[tuple[float, int]] = []
    for second in range(600):
        call = "b" if second % 40 < 20 else ""
        said = of_kind(seconds(cell, 1, call=call), WantNodes)
        changes += [(cell.now_s, told.wanted) for told in said]
    times = [at_s for at_s, _ in changes]
    assert changes
    assert all(b - a >= PAUSE for a, b in pairwise(times))
    assert all(LEAST <= wanted <= MOST for _, wanted in changes)


def test_a_node_that_would_not_help_is_not_wanted(cell: CellUnderTest) -> None:
    """One that rests could have taken the call, and a deployment may have all that it may."""
    full = CellUnderTest(deployment("a", replicas_max=1), limits=LIMITS)
    busy(full)
    assert not of_kind(seconds(full, SETTLE + PAUSE + 20, call="a")[SETTLE:], WantNodes)[1:]
    assert kind(full).wanted == 1
    cell.join(hello(memory_bytes=60 * MIB))  # too small for any
    seconds(cell, SETTLE + PAUSE + 1)
    seconds(cell, 10, call="b")
    assert kind(cell).wanted == 1


@pytest.fixture
def two() -> CellUnderTest:
    """A deployment for GPUs or CPUs, and nodes of either kind on demand."""
    gpus = NodeRange(device=DeviceKind.GPU, least=0, most=MOST)
    limits = replace(LIMITS, node_ranges=(*LIMITS.node_ranges, gpus))
    devices = (DeviceKind.GPU, DeviceKind.CPU)
    either = [deployment(name) for name in ("a", "b")]
    either = [replace(one, spec=replace(one.spec, devices=devices)) for one in either]
    return CellUnderTest(*either, limits=limits)


def wanted(cell: CellUnderTest, device: DeviceKind) -> int:
    return next(one.wanted for one in cell.core.wanted(cell.now_s) if one.device is device)


def test_one_refused_call_starts_no_machine_of_another_kind(two: CellUnderTest) -> None:
    busy(two)
    seconds(two, SETTLE + PAUSE + 1)
    seconds(two, 1, call="b")
    assert wanted(two, DeviceKind.GPU) == 0
    seconds(two, 3, call="b")
    assert wanted(two, DeviceKind.GPU) > 0


def test_a_kind_whose_machines_never_come_gives_way_to_the_other(two: CellUnderTest) -> None:
    busy(two)
    seconds(two, SETTLE + PAUSE + int(LIMITS.node_late_s) + 2 * PAUSE, call="b")
    assert (wanted(two, DeviceKind.GPU), wanted(two, DeviceKind.CPU) > 1) == (1, True)


def test_idle_nodes_are_wanted_no_more_after_a_while(cell: CellUnderTest) -> None:
    for name in ("n1", "n2", "n3"):
        cell.join(hello(name))
    seconds(cell, SETTLE + 1)
    assert kind(cell).wanted == 3
    told = of_kind(seconds(cell, 4 * PAUSE), WantNodes)
    assert [one.wanted for one in told] == [0]


def test_after_work_none_is_wanted_either(cell: CellUnderTest) -> None:
    link, _ = cell.join(hello())
    seconds(cell, SETTLE + 1)
    load = only(commands(cell.invoke(request(of="a")), LoadInstance), LoadInstance)
    seconds(cell, 1)
    cell.loaded(link, load.instance_id)
    cell.tokens(link, "r1", (1,), finish=FinishReason.STOP)
    seconds(cell, 6 * PAUSE)
    assert kind(cell).wanted == 0


def test_a_node_that_imports_has_work(cell: CellUnderTest) -> None:
    cell.join(hello())
    cell.tell(DeployRequested(operation_id=OperationId("op-1"), spec=deployment("c").spec))
    seconds(cell, SETTLE + 6 * PAUSE)
    assert kind(cell).wanted == 1


def test_nodes_that_hold_a_minimum_stay() -> None:
    """Though two could hold as many bytes as the three models have."""
    names = ("a", "b", "c")
    kept = CellUnderTest(*(deployment(name, replicas_min=1) for name in names), limits=LIMITS)
    for name in ("n1", "n2", "n3"):
        link, said = kept.join(hello(name, memory_bytes=200 * MIB))
        kept.loaded(link, only(commands(said, LoadInstance), LoadInstance).instance_id)
    seconds(kept, SETTLE + 6 * PAUSE)
    assert kind(kept).wanted == 3


@pytest.mark.parametrize(("tensor_parallel", "weights_mib"), [(1, 300), (2, 100)])
def test_nodes_that_could_never_hold_a_minimum_are_not_wanted(
    tensor_parallel: int, weights_mib: int
) -> None:
    """They are too small, or have too few devices; one of them holds something that idles."""
    large = deployment("large", replicas_min=1)
    large = replace(large, spec=replace(large.spec, tensor_parallel=tensor_parallel))
    weights = replace(FOOTPRINT, weights_bytes=weights_mib * MIB)
    model = replace(MODEL, layers=3)  # with a footprint of its own
    large = replace(large, model=model, footprints=(("scripted", weights),))
    vain = CellUnderTest(deployment("a"), large, limits=LIMITS)
    busy(vain)
    seconds(vain, SETTLE + 4 * PAUSE)
    assert kind(vain).wanted == 1


def test_a_deployment_without_its_minimum_wants_a_node() -> None:
    kept = CellUnderTest(deployment("a", replicas_min=1), limits=LIMITS)
    seconds(kept, SETTLE + PAUSE + 1)
    assert kind(kept).wanted == 1
    link, said = kept.join(hello(memory_bytes=200 * MIB))
    kept.loaded(link, only(commands(said, LoadInstance), LoadInstance).instance_id)
    seconds(kept, 4 * PAUSE)
    assert kind(kept).wanted == 1


def test_calls_that_minimums_leave_no_room_for_want_a_node() -> None:
    """The node has nothing to do, but what it holds stays there."""
    kept = CellUnderTest(deployment("a", replicas_min=1), deployment("b"), limits=LIMITS)
    link, said = kept.join(hello(memory_bytes=200 * MIB))
    kept.loaded(link, only(commands(said, LoadInstance), LoadInstance).instance_id)
    seconds(kept, SETTLE + PAUSE + 1)
    assert kind(kept).wanted == 1
    seconds(kept, 10, call="b")
    assert kind(kept).wanted > 1


def test_a_machine_that_never_comes_is_reported_once(cell: CellUnderTest) -> None:
    seconds(cell, SETTLE + PAUSE + 1)
    began_s = cell.now_s
    (after_s,) = [
        cell.now_s - began_s
        for _ in range(120)
        if of_kind(seconds(cell, 1, call="a"), ReportMissingNodes)
    ]
    assert after_s <= 60.0
    assert kind(cell).lacking_s > LIMITS.node_late_s
    cell.join()
    seconds(cell, 1)
    assert kind(cell).lacking_s == 0.0


def test_a_node_that_is_to_stop_is_drained_and_not_counted(cell: CellUnderTest) -> None:
    link, _ = cell.join(hello("n1"))
    load = only(commands(cell.invoke(request("r1", of="a")), LoadInstance), LoadInstance)
    cell.loaded(link, load.instance_id)
    loaded = instance_report(instance_id=load.instance_id, kv_blocks=load.kv_blocks)
    said = cell.report(link, Heartbeat(rss_bytes=0, instances=(loaded,), leaves=True))
    node = cell.core.cell.nodes[hello("n1").node_id]
    assert node.state is NodeState.DRAINING
    assert not commands(said, UnloadInstance), "its request may end"
    cell.join(replace(hello("n2"), leaves=True))
    assert cell.core.cell.nodes[hello("n2").node_id].state is NodeState.DRAINING
    seconds(cell, SETTLE + 1)
    assert kind(cell).ready == 0
