"""The controller core when a shrink fails whose memory others have been promised."""

from mesh.core.controller.state.instance import InstanceEntry
from mesh.domain.actions import ControllerAction
from mesh.domain.messages import Heartbeat, ResizeKv
from tests.core.cells import MIB, commands, instance_report
from tests.core.controller.instances.test_kv_cache import MemoryCell, only_one


def heartbeat(cell: MemoryCell) -> list[ControllerAction]:
    """The node lists what it has, as it was last told to be."""
    instances = tuple(
        instance_report(
            instance_id=instance.instance_id,
            deployment=instance.deployment,
            model_id=instance.model_id,
            footprint=instance.footprint,
            kv_blocks=instance.kv_blocks,
            context_tokens_max=instance.context_tokens_max,
            batch_max=instance.batch_max,
            batch=instance.batch,
        )
        for instance in cell.core.cell.instances.values()
    )
    return cell.report(cell.link, Heartbeat(rss_bytes=1, engine_bytes=1, instances=instances))


def overpromised() -> tuple[MemoryCell, InstanceEntry, InstanceEntry]:
    """`a` is idle and should have shrunk from 20 blocks to 3; `b` waits to grow into its place."""
    cell = MemoryCell("a", "b", kv_blocks=30, weights=2)
    b = cell.load("b")
    cell.idle("b1")
    a = cell.load("a", prompt=400)
    assert (a.promised_blocks, b.promised_blocks) == (20, 3)
    assert only_one(cell.finish("a1"), ResizeKv).kv_blocks == 3
    assert commands(cell.ask("b2", "b", 300), ResizeKv) == []
    assert cell.resized(a, 20, error="OutOfMemory") == []
    assert cell.station.free_bytes < 0
    return cell, a, b


def test_a_shrink_that_failed_is_tried_again_while_others_wait_for_its_memory() -> None:
    cell, a, b = overpromised()
    assert cell.starved(b, "b2") == [], "more is on its way"
    again = only_one(heartbeat(cell), ResizeKv)
    assert (again.instance_id, again.kv_blocks) == (a.instance_id, 3)
    assert commands(heartbeat(cell), ResizeKv) == [], "it is under way"
    grown = only_one(cell.resized(a, 3), ResizeKv)
    assert (grown.instance_id, grown.kv_blocks) == (b.instance_id, b.promised_blocks)
    assert cell.station.tracked_bytes <= cell.station.capacity_bytes


def test_a_parked_instance_that_could_not_shrink_is_asked_again() -> None:
    cell, a, _ = overpromised()
    assert only_one(cell.park(a), ResizeKv).kv_blocks == 1
    cell.resized(a, 20, error="OutOfMemory")
    assert only_one(heartbeat(cell), ResizeKv).kv_blocks == 1


def test_where_nobody_waits_a_failed_shrink_stays_as_it_is() -> None:
    """It will shrink, or go, when its memory is wanted."""
    cell = MemoryCell("a", kv_blocks=30)
    a = cell.load("a", prompt=400)
    cell.finish("a1")
    cell.resized(a, 20, error="OutOfMemory")
    assert cell.station.promised_bytes == 120 * MIB
    assert commands(heartbeat(cell), ResizeKv) == []
