"""What a load's report says of the turns beside it."""

import pytest

from mesh.domain.ids import InstanceId
from mesh.domain.messages import InstanceLoaded
from mesh.domain.node_events import CommandReceived
from mesh.domain.reasons import FinishReason
from tests.core.cells import only
from tests.core.nodes import NodeUnderTest, load_command, loaded, reports, token


def computed_s(node: NodeUnderTest, name: str) -> float:
    return only(reports(node.tell(loaded(InstanceId(name)))), InstanceLoaded).computed_s


def test_a_load_tells_for_how_long_the_node_computed_beside_it() -> None:
    """A turn of 2 s, amid which the load begins; one of 1 s; then nothing; then one of 4 s, amid
    which it ends.
    """
    node = NodeUnderTest()
    node.load("i1")
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
    node = NodeUnderTest()
    node.load("i1")
    node.tell(CommandReceived(command=load_command("i2")))
    node.submit("a")
    node.now_s += 1.0
    node.tell(CommandReceived(command=load_command("i3")))
    node.now_s += 2.0
    assert computed_s(node, "i2") == pytest.approx(3.0)
    assert computed_s(node, "i3") == pytest.approx(2.0)
    node.command(load_command("i4"))
    assert computed_s(node, "i4") == 0.0
