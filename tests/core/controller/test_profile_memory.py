"""The controller core on the KV cache of an instance that is to be measured: large, and kept."""

from dataclasses import replace

from mesh.core.controller.state.instance import InstanceEntry
from mesh.domain.actions import ControllerAction
from mesh.domain.events import OperationCancelled, ProfileRequested
from mesh.domain.ids import DeploymentName, OperationId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.limits import CellLimits
from mesh.domain.messages import ProfileInstance, ResizeKv, UnloadInstance
from tests.core.cells import FOOTPRINT, commands
from tests.core.controller.instances.test_kv_cache import LIMITS, MemoryCell, only_one

LARGE = FOOTPRINT.blocks_for(LIMITS.kv_tokens_profiled)


def profile(cell: MemoryCell, operation: str) -> list[ControllerAction]:
    return cell.tell(
        ProfileRequested(
            operation_id=OperationId(operation), name=DeploymentName("a"), node_id=None
        )
    )


def idle_cell(*names: str, of: CellLimits = LIMITS) -> tuple[MemoryCell, InstanceEntry]:
    cell = MemoryCell("a", *names, kv_blocks=600, of=of)
    instance = cell.load("a")
    cell.idle("a1")
    return cell, instance


def test_an_instance_whose_cache_grows_for_a_profile_is_not_parked_meanwhile() -> None:
    cell, instance = idle_cell()
    assert only_one(profile(cell, "p1"), ResizeKv).kv_blocks == LARGE
    assert commands(cell.park(instance), ResizeKv) == []
    assert commands(cell.resized(instance, LARGE), ProfileInstance)


def test_it_gives_no_place_to_another_and_does_not_shrink_when_a_request_ends() -> None:
    cell, instance = idle_cell("b")
    profile(cell, "p1")
    cell.ask("a2", "a")
    assert commands(cell.finish("a2"), ResizeKv) == []
    assert commands(cell.ask("b1", "b"), UnloadInstance) == []
    resized = cell.resized(instance, LARGE)
    assert commands(resized, ProfileInstance)
    assert commands(resized, ResizeKv) == []


def test_a_profile_given_up_before_it_began_leaves_the_next_one_its_large_cache() -> None:
    cell, instance = idle_cell()
    profile(cell, "p1")
    cell.tell(OperationCancelled(operation_id=OperationId("p1")))
    assert not instance.profiling
    assert only_one(cell.resized(instance, LARGE), ResizeKv).kv_blocks == 3, "back to what it was"
    cell.resized(instance, 3)
    cell.park(instance)
    cell.resized(instance, 1)
    assert instance.state is InstanceState.PARKED
    assert only_one(profile(cell, "p2"), ResizeKv).kv_blocks == LARGE
    assert str(instance.state) == "ready", "not parked"
    assert commands(cell.resized(instance, LARGE), ProfileInstance)


def test_a_growth_that_fails_is_measured_with_what_there_is() -> None:
    cell, instance = idle_cell()
    profile(cell, "p1")
    failed = cell.resized(instance, 3, error="OutOfMemory")
    assert commands(failed, ProfileInstance)
    assert commands(failed, ResizeKv) == []


def test_no_more_is_asked_for_than_a_full_batch_can_use() -> None:
    cell, _ = idle_cell(of=replace(LIMITS, batch_max=2))
    assert only_one(profile(cell, "p1"), ResizeKv).kv_blocks == 32
