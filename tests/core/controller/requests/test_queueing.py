"""The controller core on its queues: who is placed when, promised a load, or refused and why."""

from dataclasses import replace
from math import inf

import pytest

from mesh.compute.correction import TRIAL_ITERATIONS
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.actions import RefuseRequest, SetTimer, TellAccepted
from mesh.domain.events import (
    CancelRequested,
    DeploymentStored,
    DrainRequested,
    KeepAliveExpired,
    LoadExpired,
    NodeDisconnected,
    ScaleRequested,
)
from mesh.domain.ids import DeploymentName, InstanceId, NodeId, OperationId, RequestId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.limits import CellLimits
from mesh.domain.messages import (
    InstanceGone,
    LoadInstance,
    NodeHello,
    SubmitRequest,
    TokensReport,
    UnloadInstance,
)
from mesh.domain.profile import Grid
from mesh.domain.reasons import FinishReason, RefusalReason, Verdict
from mesh.domain.slo import ColdStart, Slo
from mesh.domain.steps import LoadRate, LoadTier
from tests.core.admission import SLOW, BusyCell, instance, node, submitted
from tests.core.cells import (
    FOOTPRINT,
    MIB,
    CellUnderTest,
    commands,
    deployment,
    hello,
    of_kind,
    one_node,
    only,
    request,
)
from tests.support.profiles import profile


def run_one(cell: CellUnderTest, name: str, of: str, link: int) -> InstanceId:
    """An instance of `of` is loaded and has answered one request."""
    load = cell.bring_up(link, request(name, of=of))
    cell.tokens(link, name, [7], finish=FinishReason.STOP)
    return load.instance_id


def test_when_a_waiting_head_leaves_those_behind_it_may_fit() -> None:
    """r2 needs all 16 blocks that the node has room for, and r1 holds one of them; r3 needs one."""
    cell, link = one_node(deployment(slo=Slo(ttft_s=60.0)), node=hello(memory_bytes=116 * MIB))
    cell.bring_up(link, request("r1", max_tokens=8))
    assert commands(cell.invoke(request("r2", prompt=[1] * 500)), SubmitRequest) == []
    assert commands(cell.invoke(request("r3", max_tokens=8)), SubmitRequest) == []
    left = commands(cell.tell(CancelRequested(request_id=RequestId("r2"))), SubmitRequest)
    assert [s.order.request.request_id for s in left] == ["r3"]


@pytest.mark.parametrize("classes", [False, True])
def test_behind_one_that_there_is_no_time_for_a_shorter_one_of_its_class_may_be_computed(
    classes: bool,
) -> None:
    """Without classes nobody overtakes it. Decodes take 60 ms, and 100 ms more beside a context of
    256 tokens: of 250 ms `r1` takes 38 % of the time, as `r3` would, and `r2` 72 %.
    """
    quick = Grid(rows=(1, 256), columns=(4096,), seconds=((0.0001,), (0.0256,)))
    grows = Grid(rows=(32,), columns=(1, 512), seconds=((0.06, 0.26),))
    times = profile(prefill=quick, decode=grows)
    a = deployment("a")
    if classes:
        only_one = replace(a.spec.slo, name="one")
        a = replace(a, spec=replace(a.spec, classes=(only_one,), class_default="one"))
    cell = BusyCell(a, deployment("b"), profiles=(times,))
    cell.ask("r1", "b", max_tokens=4)
    assert submitted(cell.ask("r2", "a", 200, max_tokens=4)) == []
    assert entry(cell, "r2").refusals.verdict is Verdict.TPOT_EXCEEDED
    told = cell.ask("r3", "a", max_tokens=4)
    assert submitted(told) == [("r3", "a")] * classes
    reasons = [refused.reason for refused in of_kind(told, RefuseRequest)]
    assert reasons == [RefusalReason.TPOT_EXCEEDED] * (not classes)


def test_a_burst_that_waits_for_room_unloads_no_more_than_it_needs() -> None:
    cell = CellUnderTest(*(deployment(name, keep_alive_s=600) for name in "abc"))
    for name in "ab":
        link, _ = cell.join(hello(f"n-{name}", run_id=name, memory_bytes=150 * MIB))
        run_one(cell, f"r-{name}", name, link)
    unloads = [
        u for n in range(5) for u in commands(cell.invoke(request(f"c{n}", of="c")), UnloadInstance)
    ]
    assert len(unloads) == 1


def test_a_load_given_up_is_not_waited_for_while_an_idle_instance_can_go() -> None:
    """Nobody knows when a node lets go of a load that takes too long."""
    cell = CellUnderTest(*(deployment(name, keep_alive_s=600) for name in "abc"))
    cell.join(hello("n1", run_id="1", memory_bytes=150 * MIB))
    cell.invoke(request("r-a", of="a"))
    cell.tell(CancelRequested(request_id=RequestId("r-a")))
    other, _ = cell.join(hello("n2", run_id="2", memory_bytes=150 * MIB))
    idle = run_one(cell, "r-b", "b", other)
    (loading,) = [i for i in cell.core.cell.instances if i != idle]
    cell.tell(LoadExpired(instance_id=loading))
    asked = cell.invoke(request("r-c", of="c"))
    assert [u.instance_id for u in commands(asked, UnloadInstance)] == [idle]


def test_an_instance_just_loaded_serves_its_queue_before_an_older_request_takes_its_memory() -> (
    None
):
    """`b`'s request is older, but went to a node that is lost when `a` has begun to load."""
    cell = CellUnderTest(deployment("a"), deployment("b"))
    first, _ = cell.join(hello("n1", run_id="1", memory_bytes=150 * MIB))
    cell.invoke(request("r-b", of="b"))
    second, _ = cell.join(hello("n2", run_id="2", memory_bytes=150 * MIB))
    cell.now_s += 1.0
    load = commands(cell.invoke(request("r-a", of="a")), LoadInstance)[0]
    cell.tell(NodeDisconnected(link_id=first, reason="reset"))
    loaded = cell.loaded(second, load.instance_id)
    assert [s.order.request.request_id for s in commands(loaded, SubmitRequest)] == ["r-a"]
    assert commands(loaded, UnloadInstance) == []


def test_requests_that_lost_their_node_wait_in_the_order_in_which_they_came() -> None:
    cell = CellUnderTest(deployment(), limits=CellLimits(batch_max=1))
    links = []
    for n in (1, 2):
        link, _ = cell.join(hello(f"n{n}", run_id=str(n)))
        cell.bring_up(link, request(f"r{n}"))
        links.append(link)
        cell.now_s += 1.0
    cell.invoke(request("r3"))
    for link in links:
        cell.tell(NodeDisconnected(link_id=link, reason="reset"))
    (entry,) = cell.core.cell.deployments.values()
    assert [held.original.request_id for held in entry.queue] == ["r1", "r2", "r3"]


def test_memory_that_an_idle_instance_leaves_goes_to_who_waits() -> None:
    cell, link = one_node(
        deployment("a", keep_alive_s=600), deployment("b"), node=hello(memory_bytes=150 * MIB)
    )
    idle = run_one(cell, "r-a", "a", link)
    cell.invoke(request("r-b", of="b"))
    gone = cell.report(link, InstanceGone(instance_id=idle))
    assert [load.deployment for load in commands(gone, LoadInstance)] == ["b"]


def busy_cell(validations_max: int = 32) -> BusyCell:
    """For some tokens `a` and `b` leave their node no time for `c`; it has memory."""
    limits = CellLimits(validations_max=validations_max)
    cell = BusyCell(*(deployment(name) for name in "abc"), limits=limits)
    cell.ask("r1", "a", max_tokens=4)
    cell.ask("r2", "b", max_tokens=4)
    return cell


def refused_later(cell: CellUnderTest) -> list[RefuseRequest]:
    cell.now_s += 2.1
    return of_kind(cell.retry(), RefuseRequest)


def test_a_node_that_lacks_memory_alone_is_nearer_than_one_that_lacks_time() -> None:
    cell = busy_cell()
    cell.ask("r3", "c")
    assert [r.reason for r in refused_later(cell)] == [RefusalReason.TPOT_EXCEEDED]
    cell = busy_cell()
    cell.join(node("n2", memory_bytes=50 * MIB))
    cell.ask("r3", "c")
    (refused,) = refused_later(cell)
    assert refused.reason is RefusalReason.MEMORY_FULL
    assert "on a node" in refused.message


def test_an_instance_without_memory_for_one_more_says_so() -> None:
    """Two requests of 300 tokens need 20 blocks; the node has room for 16."""
    cell, link = one_node(deployment(), node=hello(memory_bytes=116 * MIB))
    first = cell.invoke(request("r1", prompt=(1,) * 300, max_tokens=10))
    cell.loaded(link, only(commands(first, LoadInstance), LoadInstance).instance_id)
    cell.invoke(request("r2", prompt=(1,) * 300, max_tokens=10))
    (refused,) = refused_later(cell)
    assert refused.reason is RefusalReason.MEMORY_FULL
    assert "KV cache" in refused.message


def test_who_is_not_looked_into_any_more_is_refused_for_the_same_as_the_one_before() -> None:
    cell = busy_cell(validations_max=1)
    for name in ("r3", "r4"):
        cell.ask(name, "c")
    refused = refused_later(cell)
    assert [r.reason for r in refused] == [RefusalReason.TPOT_EXCEEDED] * 2


def test_who_is_not_looked_into_and_has_none_before_it_is_refused_for_what_its_last_try_found() -> (
    None
):
    limits = CellLimits(validations_max=1)
    cell = BusyCell(*(deployment(name) for name in "abcd"), limits=limits)
    for name, of, tokens in (("r1", "a", 4), ("r2", "b", 4), ("r3", "c", 256), ("r4", "d", 256)):
        cell.ask(name, of, max_tokens=tokens)
    refused = refused_later(cell)
    assert [r.reason for r in refused] == [RefusalReason.TPOT_EXCEEDED] * 2


def cell_where_the_weights_go(ttft_s: float) -> CellUnderTest:
    """A node from whose disk a load takes 1 s, and 0.25 s with weights that are there: those of
    `a`, which has to go for `b` as soon as it idles.
    """
    slo = Slo(ttft_s=ttft_s, cold_start=ColdStart.REFUSE)
    cell = CellUnderTest(*(deployment(name, slo=slo) for name in "ab"))
    idle = replace(instance("a1", "a"), kv_blocks=20)
    cell.join(loads_in(1.0, node("n1", idle, memory_bytes=160 * MIB)))
    return cell


def loads_in(disk_s: float, node: NodeHello) -> NodeHello:
    seconds = (LoadTier.DISK, disk_s), (LoadTier.HOST, 0.25)
    rates = tuple((tier, LoadRate(fixed_s=s, bytes_per_s=inf)) for tier, s in seconds)
    return replace(node, shares_weights=True, load_rates=rates)


def test_where_the_weights_go_for_a_load_it_lacks_time_and_who_lacks_memory_alone_is_nearer() -> (
    None
):
    cell = cell_where_the_weights_go(0.5)
    cell.join(loads_in(0.25, node("n2", memory_bytes=50 * MIB)))
    assert not of_kind(cell.invoke(request("r1", of="b")), RefuseRequest)
    assert [r.reason for r in refused_later(cell)] == [RefusalReason.MEMORY_FULL]


def test_who_has_waited_too_long_for_a_load_for_which_the_weights_go_is_late() -> None:
    """It would have been in time with them, and could not have them."""
    cell = cell_where_the_weights_go(1.2)
    assert commands(cell.invoke(request("r1", of="a")), SubmitRequest)
    assert not of_kind(cell.invoke(request("r2", of="b")), RefuseRequest)
    cell.now_s += 0.5
    ended = cell.tokens(1, "r1", (7,), finish=FinishReason.STOP)
    assert only(ended, RefuseRequest).reason is RefusalReason.FIRST_TOKEN_LATE


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
    cell, link = one_node(
        deployment("a", slo=PATIENT), profiles=(), node=hello(memory_bytes=4 << 30)
    )
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
    cell, link = one_node(
        *(deployment(name, slo=slo) for name in "ab"),
        profiles=(),
        node=node("n1", instance("b", "b", correction=1.0)),
    )
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
