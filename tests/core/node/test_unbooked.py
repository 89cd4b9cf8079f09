"""The node core on memory that is in nobody's books: loads and grows wait for it."""

from mesh.domain.actions import StartLoad, StartResize, StartUnload
from mesh.domain.ids import InstanceId
from mesh.domain.messages import ResizeKv
from mesh.domain.node_events import (
    LinkClosed,
    LinkOpened,
    LoadBroke,
    LoadFinished,
    ResizeFinished,
    StepBroke,
    UnloadFinished,
)
from mesh.domain.steps import LoadedInstance
from tests.core.cells import FOOTPRINT, of_kind, only
from tests.core.node.test_memory import I1, LOADED_BLOCKS, loaded_node
from tests.core.nodes import load_command


def test_a_grow_waits_until_what_no_controller_knows_of_has_left_the_memory() -> None:
    """A load was under way when the link broke; the new link's books do not have it."""
    node = loaded_node()
    node.command(load_command("i2"))
    node.tell(LinkClosed(reason="gone"))
    node.tell(LinkOpened())
    grow = node.command(ResizeKv(instance_id=I1, kv_blocks=LOADED_BLOCKS + 1))
    assert of_kind(grow, StartResize) == []
    loaded = LoadedInstance(footprint=FOOTPRINT, kv_blocks=16, elapsed_s=0.1)
    node.tell(LoadFinished(instance_id=InstanceId("i2"), loaded=loaded))
    freed = node.tell(UnloadFinished(instance_id=InstanceId("i2")))
    assert only(freed, StartResize) == StartResize(instance_id=I1, kv_blocks=LOADED_BLOCKS + 1)


def test_a_shrink_does_not_wait_and_a_grow_that_waits_ends_with_its_link() -> None:
    node = loaded_node()
    node.command(load_command("i2"))
    node.tell(LinkClosed(reason="gone"))
    node.tell(LinkOpened())
    assert only(node.command(ResizeKv(instance_id=I1, kv_blocks=4)), StartResize).kv_blocks == 4
    node.tell(ResizeFinished(instance_id=I1, kv_blocks=4, elapsed_s=0.1))
    node.command(ResizeKv(instance_id=I1, kv_blocks=8))
    node.tell(LinkClosed(reason="gone"))
    node.tell(LinkOpened())
    broke = LoadBroke(instance_id=InstanceId("i2"), error="TornModel", message="torn", hint="")
    assert of_kind(node.tell(broke), StartResize) == []


def test_a_load_waits_for_what_broke_while_there_was_no_link() -> None:
    """Its iteration ends after the link has; the next hello does not name it."""
    node = loaded_node()
    node.submit("r1")
    node.tell(LinkClosed(reason="gone"))
    broke = node.tell(StepBroke(instance_id=I1, error="EngineError", message="broke"))
    assert only(broke, StartUnload) == StartUnload(instance_id=I1)
    assert node.core.instances() == ()
    node.tell(LinkOpened())
    assert of_kind(node.command(load_command("i2")), StartLoad) == []
    freed = node.tell(UnloadFinished(instance_id=I1))
    assert only(freed, StartLoad).instance_id == "i2"
