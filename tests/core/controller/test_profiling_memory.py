"""The controller core on the KV cache of an instance that is to be measured."""

from mesh.core.controller.state.instance import InstanceEntry
from mesh.domain.actions import ControllerAction
from mesh.domain.events import OperationCancelled, ProfileRequested
from mesh.domain.ids import DeploymentName, OperationId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.messages import ProfileInstance, ResizeKv
from tests.core.cells import FOOTPRINT, commands
from tests.core.controller.instances.test_kv_cache import LIMITS, MemoryCell, only_one

WANTED = FOOTPRINT.blocks_for(LIMITS.kv_tokens_profiled)


def profile(cell: MemoryCell, operation_id: str = "op") -> list[ControllerAction]:
    """Has the cache of `a` grow first."""
    asked = cell.tell(
        ProfileRequested(
            operation_id=OperationId(operation_id), name=DeploymentName("a"), node_id=None
        )
    )
    assert not commands(asked, ProfileInstance)
    assert only_one(asked, ResizeKv).kv_blocks == WANTED
    return asked


def idle() -> tuple[MemoryCell, InstanceEntry]:
    cell = MemoryCell("a", kv_blocks=600)
    instance = cell.load("a")
    cell.idle("a1")
    return cell, instance


def test_a_profile_is_measured_with_a_large_cache() -> None:
    cell, instance = idle()
    profile(cell)
    assert commands(cell.resized(instance, WANTED), ProfileInstance)


def test_a_profile_is_measured_with_what_there_is_when_its_cache_does_not_grow() -> None:
    cell, instance = idle()
    profile(cell)
    assert commands(
        cell.resized(instance, instance.kv_blocks, error="OutOfMemory"), ProfileInstance
    )


def test_what_grows_to_be_measured_does_not_shrink_when_a_request_on_it_ends() -> None:
    cell = MemoryCell("a", kv_blocks=600)
    instance = cell.load("a")
    profile(cell)
    assert not commands(cell.finish("a1"), ResizeKv)
    resized = cell.resized(instance, WANTED)
    assert commands(resized, ProfileInstance)
    assert not commands(resized, ResizeKv)


def test_what_grows_to_be_measured_is_not_parked() -> None:
    cell, instance = idle()
    profile(cell)
    cell.park(instance)
    assert instance.state is InstanceState.READY


def test_a_cancelled_profile_leaves_no_trace_on_an_instance_that_grew_for_it() -> None:
    """It shrinks again, and grows again for the next one."""
    cell, instance = idle()
    profile(cell)
    cell.tell(OperationCancelled(operation_id=OperationId("op")))
    assert not instance.profiling
    cell.resized(instance, WANTED)
    cell.resized(instance, instance.promised_blocks)
    assert instance.kv_blocks < WANTED
    cell.park(instance)
    cell.resized(instance, 1)
    profile(cell, "op-2")
