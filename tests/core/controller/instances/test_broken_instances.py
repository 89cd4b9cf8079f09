"""Instances that end by themselves: one that never served counts as a load that failed."""

from mesh.domain.actions import ControllerAction, RefuseRequest, SetTimer
from mesh.domain.events import RetryLoadDue
from mesh.domain.ids import DeploymentName, InstanceId
from mesh.domain.limits import CellLimits
from mesh.domain.messages import Heartbeat, InstanceGone, LoadInstance
from mesh.domain.reasons import FinishReason, RefusalReason
from tests.core.cells import CellUnderTest, commands, deployment, of_kind, only


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
    cell = CellUnderTest(deployment(replicas_min=1))
    link, _ = cell.join()
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
    cell = CellUnderTest(deployment(replicas_min=1))
    link, _ = cell.join()
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
    cell = CellUnderTest(deployment(replicas_min=1))
    link, _ = cell.join()
    (instance_id,) = cell.core.cell.instances
    cell.loaded(link, instance_id)
    cell.invoke()
    cell.tokens(link, "r1", [1], finish=FinishReason.LENGTH)
    broke = breaks(cell, link, instance_id)
    assert len(commands(broke, LoadInstance)) == 1
    assert failures(cell) == 0


def test_a_request_served_or_a_life_until_it_is_let_go_makes_up_for_what_broke() -> None:
    for served in (True, False):
        cell = CellUnderTest(deployment(replicas_min=1))
        link, _ = cell.join()
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
