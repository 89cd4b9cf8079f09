"""What validation admits, a rollout request by request and token by token cannot refute."""

from hypothesis import event, given, settings

from mesh.domain.reasons import Verdict
from tests.request.rollout import Rollout
from tests.request.schedules import Node
from tests.request.strategies import nodes


@given(nodes())
@settings(max_examples=200)
def test_no_rollout_refutes_what_validation_admits(node: Node) -> None:
    verdict = node.verdict()
    event(verdict)
    if verdict is Verdict.PASSES:
        assert not Rollout(node=node).misses()
