"""What a load's report says of the turns beside it; memory of loads that no link booked."""

import pytest

from mesh.domain.ids import InstanceId
from mesh.domain.messages import (
    InstanceGone,
    InstanceLoaded,
    KvResized,
    LoadFailed,
    LoadInstance,
    ResizeKv,
    UnloadInstance,
)
from mesh.domain.node_events import CommandReceived, LinkClosed, LinkOpened, StepBroke
from mesh.domain.reasons import FinishReason
from tests.core.cells import of_kind, only
from tests.core.node.test_memory import I1, LOADED_BLOCKS, loaded_node
from tests.core.nodes import NodeUnderTest, load_command, loaded, reports, token


def computed_s(node: NodeUnderTest, name: str) -> float:
    return only(reports(node.tell(loaded(InstanceId(name)))), InstanceLoaded).computed_s


def test_a_load_tells_for_how_long_the_node_computed_beside_it() -> None:
    """A turn of 2 s, amid which the load begins; one of 1 s; then nothing; then one of 4 s, amid
    which it ends.
    """
    node = NodeUnderTest("i1")
    node.submit("a")
    node.now_s += 1.5
    node.tell(CommandReceived(command=load_command("i2")))
    node.now_s += 0.5
    node.step("i1", token("a", 0))
    node.now_s += 1.0
    node.step("i1", token("a", 1, finish=FinishReason.LENGTH))
    node.now_s += 8.0
    node.submit("b")
    node.now_s += 3.0
    assert computed_s(node, "i2") == pytest.approx(0.5 + 1.0 + 3.0)


def test_loads_at_once_each_tell_of_their_own_time() -> None:
    node = NodeUnderTest("i1")
    node.tell(CommandReceived(command=load_command("i2")))
    node.submit("a")
    node.now_s += 1.0
    node.tell(CommandReceived(command=load_command("i3")))
    node.now_s += 2.0
    assert computed_s(node, "i2") == pytest.approx(3.0)
    assert computed_s(node, "i3") == pytest.approx(2.0)
    node.command(load_command("i4"))
    assert computed_s(node, "i4") == 0.0


def test_a_grow_waits_until_what_no_controller_knows_of_has_left_the_memory() -> None:
    """A load was under way when the link broke; the new link's books do not have it."""
    node = loaded_node()
    node.command(load_command("i2"))
    node.reconnect()
    grow = node.command(ResizeKv(instance_id=I1, kv_blocks=LOADED_BLOCKS + 1))
    assert of_kind(grow, ResizeKv) == []
    node.tell(loaded(InstanceId("i2")))
    freed = node.tell(InstanceGone(instance_id=InstanceId("i2")))
    assert only(freed, ResizeKv) == ResizeKv(instance_id=I1, kv_blocks=LOADED_BLOCKS + 1)


def test_a_shrink_does_not_wait_and_a_grow_that_waits_ends_with_its_link() -> None:
    node = loaded_node()
    node.command(load_command("i2"))
    node.reconnect()
    assert only(node.command(ResizeKv(instance_id=I1, kv_blocks=4)), ResizeKv).kv_blocks == 4
    node.tell(KvResized(instance_id=I1, kv_blocks=4, elapsed_s=0.1))
    node.command(ResizeKv(instance_id=I1, kv_blocks=8))
    node.reconnect()
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
