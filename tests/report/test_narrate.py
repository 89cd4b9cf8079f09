"""Decisions in words."""

from mesh.domain.events import InvokeRequested, NodeConnected
from mesh.domain.messages import LoadInstance
from mesh.report.narrate import narrate
from tests.core.cells import CellUnderTest, commands, deployment, hello, request


def test_a_request_that_scales_from_zero_tells_its_story() -> None:
    cell = CellUnderTest(deployment())
    connected = NodeConnected(link_id=1, hello=hello())
    lines = narrate(connected, cell.tell(connected))
    assert [(line.kind, line.subject) for line in lines] == [("node", "n1")]
    asked = InvokeRequested(request=request())
    actions = cell.tell(asked)
    lines = narrate(asked, actions)
    assert [(line.kind, line.text) for line in lines] == [
        ("instance", "load chat with 512 KV blocks")
    ]
    link_loaded = cell.loaded(1, commands(actions, LoadInstance)[0].instance_id)
    assert "to chat-1-1, 3 prompt tokens" in [line.text for line in narrate(None, link_loaded)]


def test_a_refusal_names_its_reason() -> None:
    cell = CellUnderTest(deployment())
    (line,) = narrate(None, cell.invoke())
    assert line.text.startswith("refused (no_node): ")


def test_token_traffic_is_left_out() -> None:
    cell = CellUnderTest(deployment())
    link, _ = cell.join()
    cell.loaded(link, commands(cell.invoke(), LoadInstance)[0].instance_id)
    assert narrate(None, cell.tokens(link, "r1", [1, 2])) == []
