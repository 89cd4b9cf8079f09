"""Instances: which nodes they are tried on, how many there are, and what failed loads mean."""

from dataclasses import replace

from mesh.domain.actions import ControllerAction, RefuseRequest, SetTimer
from mesh.domain.events import DrainRequested, NodeDisconnected, RetryLoadDue
from mesh.domain.ids import DeploymentName, InstanceId, NodeId, OperationId
from mesh.domain.limits import CellLimits
from mesh.domain.messages import (
    Heartbeat,
    InstanceGone,
    LoadFailed,
    LoadInstance,
    SubmitRequest,
    UnloadInstance,
)
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.slo import Slo
from tests.core.cells import (
    MIB,
    CellUnderTest,
    commands,
    deployment,
    hello,
    instance_report,
    of_kind,
    one_node,
    only,
    request,
)


def fail(cell: CellUnderTest, link: int, instance_id: InstanceId) -> list[SetTimer]:
    """The load failed; the timers of its retry."""
    failed = LoadFailed(instance_id=instance_id, error="OutOfMemory", message="no memory")
    timers = of_kind(cell.report(link, failed), SetTimer)
    return [t for t in timers if isinstance(t.timer, RetryLoadDue)]


def test_a_node_where_a_load_failed_is_tried_again_when_the_others_have_no_room() -> None:
    cell, link = one_node(deployment(slo=Slo(ttft_s=10.0)))
    cell.join(hello("small", run_id="2", memory_bytes=110 * MIB))
    load = commands(cell.invoke(), LoadInstance)[0]
    (retry,) = fail(cell, link, load.instance_id)
    cell.now_s = retry.at_s
    again = cell.tell(retry.timer)
    assert of_kind(again, RefuseRequest) == []
    (load,) = commands(again, LoadInstance)
    assert cell.core.cell.instances[load.instance_id].node.node_id == "n1"


def test_failed_loads_refuse_nobody_while_another_is_under_way() -> None:
    cell = CellUnderTest(deployment(replicas_min=3))
    links = [cell.join(hello(f"n{n}", run_id=str(n)))[0] for n in range(3)]
    first, second, third = cell.core.cell.instances
    cell.invoke()
    fail(cell, links[0], first)
    assert (
        of_kind(
            cell.report(
                links[1], LoadFailed(instance_id=second, error="OutOfMemory", message="no")
            ),
            RefuseRequest,
        )
        == []
    )
    submitted = commands(cell.loaded(links[2], third), SubmitRequest)
    assert [s.order.request.request_id for s in submitted] == ["r1"]


def test_a_load_that_succeeds_ends_the_pause_after_one_that_failed() -> None:
    cell = CellUnderTest(deployment(replicas_min=2))
    links = [cell.join(hello(f"n{n}", run_id=str(n)))[0] for n in range(3)]
    first, second = cell.core.cell.instances
    fail(cell, links[0], first)
    cell.loaded(links[1], second)
    entry = cell.core.cell.deployments[DeploymentName("chat")]
    assert cell.now_s >= entry.paused_until_s


def test_an_instance_on_a_draining_node_is_replaced_before_its_last_request_ends() -> None:
    cell, link = one_node(deployment(replicas_max=1))
    cell.bring_up(link)
    cell.join(hello("n2", run_id="2"))
    cell.tell(DrainRequested(operation_id=OperationId("op"), node_id=NodeId("n1")))
    (replacement,) = commands(cell.invoke(request("r2")), LoadInstance)
    assert cell.core.cell.instances[replacement.instance_id].node.node_id == "n2"


def test_when_a_node_comes_back_the_load_that_replaced_its_instance_is_given_up() -> None:
    cell, link = one_node(deployment(replicas_min=1, replicas_max=1))
    (instance_id,) = cell.core.cell.instances
    cell.loaded(link, instance_id)
    cell.join(hello("n2", run_id="2"))
    lost = cell.tell(NodeDisconnected(link_id=link, reason="reset"))
    (replacement,) = commands(lost, LoadInstance)
    kept = instance_report(instance_id=instance_id, kv_blocks=16)
    _, back = cell.join(replace(hello(), instances=(kept,)))
    unloads = [u.instance_id for u in commands(back, UnloadInstance)]
    assert unloads == [replacement.instance_id]


def test_a_minimum_that_lacks_memory_takes_that_of_the_next_instance_to_become_idle() -> None:
    """Not only when that one's keep-alive of ten minutes is over."""
    cell, link = one_node(
        deployment("a", keep_alive_s=600), deployment("b"), node=hello(memory_bytes=150 * MIB)
    )
    busy = commands(cell.invoke(request(of="a")), LoadInstance)[0].instance_id
    cell.loaded(link, busy)
    entry = cell.core.cell.deployments[DeploymentName("b")]
    entry.spec = replace(entry.spec, scaling=replace(entry.spec.scaling, replicas_min=1))
    cell.tell(RetryLoadDue(name=DeploymentName("b")))
    done = cell.tokens(link, "r1", [7], finish=FinishReason.STOP)
    assert [u.instance_id for u in commands(done, UnloadInstance)] == [busy]
    gone = cell.report(link, InstanceGone(instance_id=busy))
    assert [load.deployment for load in commands(gone, LoadInstance)] == ["b"]


def breaks(cell: CellUnderTest, link: int, instance_id: InstanceId) -> list[ControllerAction]:
    """The node lists it no more, and then says why."""
    actions = cell.report(link, Heartbeat(rss_bytes=1))
    gone = InstanceGone(instance_id=instance_id, error="EngineError", message="killed")
    return actions + cell.report(link, gone)


def pause_s(cell: CellUnderTest, actions: list[ControllerAction]) -> float:
    (timer,) = (t for t in of_kind(actions, SetTimer) if isinstance(t.timer, RetryLoadDue))
    return timer.at_s - cell.now_s


def failures(cell: CellUnderTest) -> int:
    return cell.core.cell.deployments[DeploymentName("chat")].load_failures


def test_loads_of_what_breaks_before_its_first_token_are_further_and_further_apart() -> None:
    cell, link = one_node(deployment(replicas_min=1))
    pauses = []
    for _ in range(4):
        (instance_id,) = cell.core.cell.instances
        cell.loaded(link, instance_id)
        broke = breaks(cell, link, instance_id)
        assert commands(broke, LoadInstance) == [], "not at once"
        pauses.append(pause_s(cell, broke))
        cell.now_s += pauses[-1]
        only(cell.tell(RetryLoadDue(name=DeploymentName("chat"))), SetTimer)
    assert pauses == [pauses[0] * 2**n for n in range(4)]


def test_requests_are_refused_with_the_reason_once_too_many_broke() -> None:
    cell, link = one_node(deployment(replicas_min=1))
    for _ in range(CellLimits().load_attempts_max):
        (instance_id,) = cell.core.cell.instances
        cell.loaded(link, instance_id)
        pause = pause_s(cell, breaks(cell, link, instance_id))
        refused = cell.invoke()
        cell.now_s += pause
        cell.tell(RetryLoadDue(name=DeploymentName("chat")))
    (refusal,) = of_kind(refused, RefuseRequest)
    assert refusal.reason is RefusalReason.LOAD_FAILED
    assert "ended by itself before its first token" in refusal.message


def test_one_that_has_served_is_replaced_at_once() -> None:
    cell, link = one_node(deployment(replicas_min=1))
    (instance_id,) = cell.core.cell.instances
    cell.loaded(link, instance_id)
    cell.invoke()
    cell.tokens(link, "r1", [1], finish=FinishReason.LENGTH)
    broke = breaks(cell, link, instance_id)
    assert len(commands(broke, LoadInstance)) == 1
    assert failures(cell) == 0


def test_a_request_served_or_a_life_until_it_is_let_go_makes_up_for_what_broke() -> None:
    for served in (True, False):
        cell, link = one_node(deployment(replicas_min=1))
        (instance_id,) = cell.core.cell.instances
        cell.loaded(link, instance_id)
        cell.now_s += pause_s(cell, breaks(cell, link, instance_id))
        cell.tell(RetryLoadDue(name=DeploymentName("chat")))
        (instance_id,) = cell.core.cell.instances
        cell.loaded(link, instance_id)
        assert failures(cell) == 1
        if served:
            cell.invoke()
            cell.tokens(link, "r1", [1], finish=FinishReason.LENGTH)
        else:
            cell.report(link, InstanceGone(instance_id=instance_id))
        assert failures(cell) == 0
