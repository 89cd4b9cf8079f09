"""The node core on memory that is in nobody's books: loads and grows wait for it."""

from mesh.domain.ids import InstanceId
from mesh.domain.messages import (
    InstanceGone,
    KvResized,
    LoadFailed,
    LoadInstance,
    ResizeKv,
    UnloadInstance,
)
from mesh.domain.node_events import LinkClosed, LinkOpened, StepBroke
from tests.core.cells import of_kind, only
from tests.core.node.test_memory import I1, LOADED_BLOCKS, loaded_node
from tests.core.nodes import load_command, loaded


def test_a_grow_waits_until_what_no_controller_knows_of_has_left_the_memory() -> None:
    """A load was under way when the link broke; the new link's books do not have it."""
    node = loaded_node()
    node.command(load_command("i2"))
    node.tell(LinkClosed(reason="gone"))
    node.tell(LinkOpened())
    grow = node.command(ResizeKv(instance_id=I1, kv_blocks=LOADED_BLOCKS + 1))
    assert of_kind(grow, ResizeKv) == []
    node.tell(loaded(InstanceId("i2")))
    freed = node.tell(InstanceGone(instance_id=InstanceId("i2")))
    assert only(freed, ResizeKv) == ResizeKv(instance_id=I1, kv_blocks=LOADED_BLOCKS + 1)


def test_a_shrink_does_not_wait_and_a_grow_that_waits_ends_with_its_link() -> None:
    node = loaded_node()
    node.command(load_command("i2"))
    node.tell(LinkClosed(reason="gone"))
    node.tell(LinkOpened())
    assert only(node.command(ResizeKv(instance_id=I1, kv_blocks=4)), ResizeKv).kv_blocks == 4
    node.tell(KvResized(instance_id=I1, kv_blocks=4, elapsed_s=0.1))
    node.command(ResizeKv(instance_id=I1, kv_blocks=8))
    node.tell(LinkClosed(reason="gone"))
    node.tell(LinkOpened())
    broke = LoadFailed(instance_id=InstanceId("i2"), error="TornModel", message="torn", hint="")
    assert of_kind(node.tell(broke), ResizeKv) == []


def test_a_load_waits_for_what_broke_while_there_was_no_link() -> None:
    """Its iteration ends after the link has; the next hello does not name it."""
    node = loaded_node()
    node.submit("r1")
    node.tell(LinkClosed(reason="gone"))
    broke = node.tell(StepBroke(instance_id=I1, error="EngineError", message="broke"))
    assert only(broke, UnloadInstance) == UnloadInstance(instance_id=I1)
    assert node.core.instances() == ()
    node.tell(LinkOpened())
    assert of_kind(node.command(load_command("i2")), LoadInstance) == []
    freed = node.tell(InstanceGone(instance_id=I1))
    assert only(freed, LoadInstance).instance_id == "i2"
