"""The controller core on a node that has promised more than it can keep."""

from dataclasses import replace

import pytest

from mesh.core.controller.state.instance import InstanceEntry
from mesh.domain.lifecycle import InstanceState
from mesh.domain.messages import Heartbeat, InstanceLoaded, LoadInstance
from tests.core.cells import FOOTPRINT, MIB, commands
from tests.core.controller.instances.test_kv_cache import MemoryCell, heard, only_one
from tests.core.controller.instances.test_parking import scale

HEAVY = replace(FOOTPRINT, weights_bytes=FOOTPRINT.weights_bytes + 30 * MIB)


def loaded_heavy(cell: MemoryCell, load: LoadInstance) -> InstanceEntry:
    """It takes 30 MiB more than it was promised."""
    said = InstanceLoaded(
        instance_id=load.instance_id, footprint=HEAVY, kv_blocks=load.kv_blocks, elapsed_s=0.5
    )
    cell.report(cell.link, said)
    return cell.core.cell.instances[load.instance_id]


def beat(cell: MemoryCell, *instances: InstanceEntry) -> None:
    cell.report(cell.link, Heartbeat(rss_bytes=1, instances=heard(*instances)))


def test_idle_instances_go_where_more_is_promised_than_there_is() -> None:
    cell = MemoryCell("a", "b", kv_blocks=20, weights=2)
    idle = cell.load("a")
    cell.idle("a1")
    cell.park(idle)
    cell.resized(idle, 1)
    heavy = loaded_heavy(cell, only_one(cell.ask("b1", "b"), LoadInstance))
    assert cell.station.free_bytes == -18 * MIB
    beat(cell, idle, heavy)
    assert idle.state is InstanceState.UNLOADING
    assert cell.station.free_bytes >= 0


def test_an_idle_instance_alone_on_its_node_stays() -> None:
    cell = MemoryCell("a", kv_blocks=20)
    heavy = loaded_heavy(cell, only_one(cell.ask("a1", "a"), LoadInstance))
    cell.idle("a1")
    beat(cell, heavy)
    assert cell.station.free_bytes < 0
    assert heavy.state is InstanceState.READY


@pytest.mark.breaks_invariants
def test_a_shrink_that_waits_is_not_taken_back() -> None:
    """It follows a grow that has not ended; without it more would be promised, not less. While both
    grow and load are under way, more is tracked than there is.
    """
    cell = MemoryCell("a", "b", kv_blocks=22, weights=2)
    shrinking = cell.load("a")
    cell.ask("a2", "a")
    heavy = loaded_heavy(cell, only_one(cell.ask("b1", "b"), LoadInstance))
    cell.finish("a1")
    (waiting,) = cell.station.waiting()
    assert [o.size_bytes - waiting.size_bytes for o in cell.station.running_reservations()] == [
        6 * MIB
    ]
    beat(cell, shrinking, heavy)
    assert cell.station.waiting() == (waiting,)


def test_a_load_for_a_minimum_that_is_taken_back_is_tried_again_when_room_appears() -> None:
    cell = MemoryCell("c", "b", "a", kv_blocks=20, weights=2)
    first = cell.load("c")
    cell.idle("c1")
    load = only_one(cell.ask("b1", "b"), LoadInstance)
    scale(cell, 1)
    assert [o.kind for o in cell.station.waiting()] == ["load"]
    heavy = loaded_heavy(cell, load)
    beat(cell, heavy)
    assert cell.station.waiting() == ()
    assert not commands(cell.finish("b1"), LoadInstance)
    assert "load" in [o.kind for o in cell.station.waiting()], "until both have gone"
    cell.gone(first)
    assert len(commands(cell.gone(heavy), LoadInstance)) == 1
