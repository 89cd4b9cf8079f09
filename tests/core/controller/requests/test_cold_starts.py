"""What is promised with a load is kept: by whom it is waited for, until when, and ahead of whom."""

from dataclasses import replace

from mesh.compute.correction import TRIAL_ITERATIONS
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.actions import RefuseRequest, SetTimer, TellAccepted
from mesh.domain.events import (
    CancelRequested,
    DeploymentStored,
    DrainRequested,
    KeepAliveExpired,
    ScaleRequested,
)
from mesh.domain.ids import DeploymentName, InstanceId, NodeId, OperationId, RequestId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.messages import LoadInstance, TokensReport
from mesh.domain.slo import Slo
from tests.core.admission import SLOW, BusyCell, instance, node, submitted
from tests.core.cells import (
    FOOTPRINT,
    CellUnderTest,
    commands,
    deployment,
    hello,
    of_kind,
    only,
    request,
)

TTFT = Slo(ttft_s=2.0, ttft_tokens_per_s=1e6, tpot_s=0.25)
"""For prompts of all lengths."""
PATIENT = Slo(ttft_s=20.0, ttft_tokens_per_s=1e6, tpot_s=10.0)
OPERATION = OperationId("o1")


def with_loads_of(seconds: float, cell: CellUnderTest) -> None:
    cell.core.cell.expectations.learn_load(hello(), FOOTPRINT.weights_bytes, seconds)


def entry(cell: CellUnderTest, name: str) -> RequestEntry:
    return cell.core.cell.requests[RequestId(name)]


def busy() -> BusyCell:
    """On n1 `long` has its prompt computed, beside which none of 200 tokens is in time; on n2 a
    load takes a second.
    """
    cell = BusyCell(deployment("a", slo=TTFT))
    with_loads_of(1.0, cell)
    cell.join(node("n2"))
    cell.ask("long", "a", 256, max_tokens=4)
    cell.now_s += 0.001
    return cell


def promise(cell: BusyCell) -> InstanceId:
    (load,) = commands(cell.ask("promised", "a", 200), LoadInstance)
    assert entry(cell, "promised").accepted
    return load.instance_id


def test_who_was_promised_a_load_is_placed_before_who_was_not() -> None:
    """`earlier` would have been late by the load, which then takes half of its time: with its
    prompt first, that of `promised` would be late.
    """
    cell = busy()
    assert submitted(cell.ask("earlier", "a", 225)) == []
    assert not entry(cell, "earlier").accepted
    cell.now_s += 0.001
    load = promise(cell)
    cell.now_s += 0.5
    assert submitted(cell.loaded(2, load)) == [("promised", load)]


def test_who_was_promised_a_load_that_takes_long_is_not_refused_before_it_is_over() -> None:
    cell = CellUnderTest(deployment("a", slo=TTFT), profiles=(SLOW,))
    with_loads_of(40.0, cell)
    link, _ = cell.join()
    asked = cell.invoke(request("r1", of="a"))
    (load,) = commands(asked, LoadInstance)
    assert only(asked, TellAccepted).grace_s > 38.0
    for _ in range(80):
        cell.now_s += 0.5
        assert of_kind(cell.retry(), RefuseRequest) == []
    assert submitted(cell.loaded(link, load.instance_id)) == [("r1", load.instance_id)]


def test_a_minimum_takes_no_promised_load_its_place() -> None:
    """Loads take 0.8 s: `c` loads, `a` is promised the next one, and `b` is to have an instance."""
    cell = CellUnderTest(*(deployment(name, slo=TTFT) for name in "abc"), profiles=(SLOW,))
    with_loads_of(0.8, cell)
    link, _ = cell.join(hello(memory_bytes=4 << 30))
    (load,) = commands(cell.invoke(request("c1", of="c")), LoadInstance)
    assert only(cell.invoke(request("a1", of="a")), TellAccepted).grace_s == 0.0
    cell.tell(ScaleRequested(operation_id=OPERATION, name=DeploymentName("b"), replicas_min=1))
    cell.tell(DeploymentStored(operation_id=OPERATION))
    assert cell.core.cell.deployments[DeploymentName("b")].replicas() == 1
    cell.now_s += 0.8
    following = only(commands(cell.loaded(link, load.instance_id), LoadInstance), LoadInstance)
    assert following.deployment == "a"


def on_trial(*, requests: int, prompt: int = 3) -> tuple[CellUnderTest, InstanceId]:
    """So many were promised an instance whose times are estimated: when its load is over, the
    first tries the estimate out, and the others wait on.
    """
    cell = CellUnderTest(deployment("a", slo=PATIENT), profiles=())
    link, _ = cell.join(hello(memory_bytes=4 << 30))
    names = [f"r{n}" for n in range(requests)]
    asked = [cell.invoke(request(n, of="a", prompt=(1,) * prompt, max_tokens=100)) for n in names]
    (load,) = commands(asked[0], LoadInstance)
    assert all(entry(cell, name).accepted for name in names)
    assert submitted(cell.loaded(link, load.instance_id)) == [("r0", load.instance_id)]
    return cell, load.instance_id


def test_who_waits_for_an_instance_of_a_node_that_drains_is_promised_another_load() -> None:
    cell, _ = on_trial(requests=2)
    cell.join(node("n2", memory_bytes=4 << 30))
    drained = cell.tell(DrainRequested(operation_id=OPERATION, node_id=NodeId("n1")))
    (load,) = commands(drained, LoadInstance)
    assert entry(cell, "r1").waits_for is cell.core.cell.instances[load.instance_id]


def test_who_waits_for_an_instance_that_drains_waits_for_it_no_more() -> None:
    cell, first = on_trial(requests=2)
    cell.tell(ScaleRequested(operation_id=OPERATION, name=DeploymentName("a"), replicas_max=0))
    cell.tell(DeploymentStored(operation_id=OPERATION))
    assert cell.core.cell.instances[first].state is InstanceState.DRAINING
    assert entry(cell, "r1").waits_for is None


def test_the_cache_that_those_who_still_wait_were_promised_is_not_given_back() -> None:
    cell, loaded = on_trial(requests=6, prompt=300)
    instance = cell.core.cell.instances[loaded]
    assert len(instance.expected) == 5
    assert instance.promised_blocks >= instance.required_blocks + instance.expected_blocks


def test_who_was_not_tried_behind_one_that_is_promised_a_load_waits() -> None:
    """`promised` found no time on n1, and its load is on n2. Those after it are too long for that,
    and wait for four to end; `short` is the fifth, and comes to be tried when they have gone.
    """
    cell = BusyCell(*(deployment(name, slo=TTFT) for name in "abc"))
    with_loads_of(1.0, cell)
    cell.join(node("n2"))
    for n, of in enumerate("bbbc"):
        assert submitted(cell.ask(f"runs-{n}", of, max_tokens=4))
    (load,) = commands(cell.ask("promised", "a"), LoadInstance)
    for n in range(4):
        cell.now_s += 0.001
        assert of_kind(cell.ask(f"long-{n}", "a", 230), RefuseRequest) == []
    cell.now_s += 0.001
    assert of_kind(cell.ask("short", "a"), RefuseRequest) == []
    waits_for = entry(cell, "promised").waits_for
    assert waits_for is cell.core.cell.instances[load.instance_id]
    assert entry(cell, "short").refusals.verdict is None


def test_an_instance_that_nobody_waits_for_any_more_goes_by_its_keep_alive() -> None:
    """When its load is over its node has no time for the one that waits for it, by an estimate."""
    slo = Slo(ttft_s=20.0, tpot_s=0.02)
    cell = CellUnderTest(*(deployment(name, slo=slo) for name in "ab"), profiles=())
    link, _ = cell.join(node("n1", instance("b", "b", correction=1.0)))
    (load,) = commands(cell.invoke(request("a1", of="a")), LoadInstance)
    cell.invoke(request("b1", of="b", max_tokens=100))
    slow = TokensReport(instance_id=InstanceId("b"), outputs=(), correction=8.0)
    for _ in range(TRIAL_ITERATIONS):
        cell.report(link, slow)
    assert submitted(cell.loaded(link, load.instance_id)) == []
    loaded = cell.core.cell.instances[load.instance_id]
    cell.now_s += 1.0
    expired = KeepAliveExpired(instance_id=load.instance_id, idle_since_s=loaded.idle_since_s)
    cell.tell(expired)
    assert loaded.state is InstanceState.READY, "somebody waits for it"
    timers = of_kind(cell.tell(CancelRequested(request_id=RequestId("a1"))), SetTimer)
    again = KeepAliveExpired(instance_id=load.instance_id, idle_since_s=cell.now_s)
    assert [timer.timer for timer in timers] == [again]


def test_who_is_promised_a_load_that_is_nearly_over_is_delayed_by_nobody() -> None:
    """`promised` is to be in time by 0.1 s, and computes from 101 on for 0.88 s. `b` would have
    0.66 s of that node before.
    """
    slos = {"a": replace(TTFT, tpot_s=2.0), "b": replace(TTFT, ttft_s=1.0, tpot_s=2.0)}
    deployments = [deployment(name, slo=slo) for name, slo in slos.items()]
    cell = CellUnderTest(*deployments, profiles=(SLOW,))
    with_loads_of(1.0, cell)
    cell.join(node("n1", instance("b", "b")))
    asked = cell.invoke(request("promised", of="a", prompt=(1,) * 200))
    assert only(asked, TellAccepted).grace_s == 0.0
    cell.now_s += 0.9
    assert submitted(cell.invoke(request("b1", of="b", prompt=(1,) * 150))) == []
