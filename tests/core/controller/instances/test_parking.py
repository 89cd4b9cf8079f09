"""The controller core on parked instances: which may be, and for how long."""

from dataclasses import replace

from mesh.core.controller.state.instance import InstanceEntry
from mesh.domain.actions import ControllerAction, SetTimer, StoreDeployment
from mesh.domain.events import DeploymentStored, KeepAliveExpired, ScaleRequested
from mesh.domain.ids import DeploymentName, InstanceId, OperationId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.messages import LoadInstance, ResizeKv, UnloadInstance
from tests.core import admission
from tests.core.cells import MIB, CellUnderTest, commands, deployment, hello, of_kind, only, request
from tests.core.controller.instances.test_kv_cache import LIMITS, PATIENT, MemoryCell


def scale(cell: CellUnderTest, replicas_min: int) -> list[ControllerAction]:
    asked = ScaleRequested(
        operation_id=OperationId(f"to-{replicas_min}"),
        name=DeploymentName("a"),
        replicas_min=replicas_min,
        replicas_max=None,
        keep_alive_s=None,
    )
    store = only(cell.tell(asked), StoreDeployment)
    return cell.tell(DeploymentStored(operation_id=store.operation_id))


def keep_alive_over(cell: CellUnderTest, instance: InstanceEntry) -> list[ControllerAction]:
    cell.now_s += 2.0
    return cell.tell(
        KeepAliveExpired(instance_id=instance.instance_id, idle_since_s=instance.idle_since_s)
    )


def test_a_parked_instance_that_a_minimum_kept_goes_when_nothing_wants_it_any_more() -> None:
    """Its time is over while the minimum holds it; the timer must not be the last one."""
    cell = MemoryCell("a", kv_blocks=100)
    instance = cell.load("a")
    cell.idle("a1")
    timer = only(cell.park(instance), SetTimer)
    cell.resized(instance, 1)
    scale(cell, 1)
    cell.now_s = timer.at_s
    again = only(cell.tell(timer.timer), SetTimer)
    assert instance.state is InstanceState.PARKED
    scale(cell, 0)
    cell.now_s = again.at_s
    assert len(commands(cell.tell(again.timer), UnloadInstance)) == 1


def test_no_more_are_parked_than_the_minimum_can_spare() -> None:
    cell = CellUnderTest(deployment("a", slo=PATIENT, replicas_min=2), limits=LIMITS)
    for name in ("n1", "n2"):
        link, joined = cell.join(hello(name, memory_bytes=200 * MIB))
        cell.loaded(link, only(commands(joined, LoadInstance), LoadInstance).instance_id)
    scale(cell, 1)
    first, second = cell.core.cell.instances.values()
    keep_alive_over(cell, first)
    assert first.state is InstanceState.PARKED
    assert not of_kind(keep_alive_over(cell, second), SetTimer)
    assert second.state is InstanceState.READY


def test_an_instance_that_a_request_can_have_at_last_is_not_parked_first() -> None:
    cell = CellUnderTest(deployment("a"))
    reported = replace(admission.instance("a", "a"), kv_blocks=3)
    cell.join(admission.node("n1", reported))
    idle = cell.core.cell.instances[InstanceId("a")]
    idle.grow_again_s = cell.now_s + 0.97
    assert not admission.submitted(cell.invoke(request("r1", of="a")))
    cell.now_s += 1.0
    expired = KeepAliveExpired(instance_id=InstanceId("a"), idle_since_s=idle.idle_since_s)
    decided = cell.tell(expired)
    assert only(commands(decided, ResizeKv), ResizeKv).kv_blocks == 20
    assert admission.submitted(decided) == [("r1", "a")]
