"""What validation admits, a rollout request by request and token by token cannot refute."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hypothesis import event, given

from mesh.domain.reasons import Verdict
from mesh.policy.rules.alternate import ALTERNATE
from mesh.policy.rules.first_come import FIRST_COME
from mesh.policy.rules.run_queues import RunQueue
from mesh.policy.rules.turns import Grant, TurnBounds, whole_turn
from mesh.runtime.policies import policy_of
from tests.request.rollout import Rollout
from tests.request.schedules import Node
from tests.request.strategies import nodes, swapping_nodes

WEIGHTED = policy_of(str(Path(__file__).parents[2] / "examples/policies/weighted_turns.py")).rule


@dataclass(frozen=True)
class OneByOne:
    """In turns; prompts before decodes, and of the batch the class alone that is due first."""

    name: ClassVar[str] = "one_by_one"
    period: ClassVar[int | None] = 4

    def turn(self, queues: Sequence[RunQueue], now_s: float, bounds: TurnBounds) -> Grant:
        queue = min(queues, key=lambda queue: (-queue.passed, queue.instance_id))
        grant = whole_turn(queue, queues, bounds)
        if queue.prompts:
            prompt = queue.prompts[-1]
            tokens = min(prompt.left, bounds.prefill_tokens_max)
            grant.prefill, grant.decode = ((prompt.request_id, tokens),), ()
            grant.seconds = queue.times.prefill_s(tokens, prompt.past)
        else:
            first = min(queue.parts, key=lambda part: min(part.due_s, part.late_s))
            grant.decode = tuple(first.running)
            grant.seconds = queue.decode_s_of(first.batch)
        return grant


def check(node: Node) -> None:
    verdict = node.verdict()
    event(f"{node.rule.name}: {verdict}")
    if verdict is Verdict.PASSES:
        assert node.rule is not FIRST_COME
        assert not Rollout(node=node).misses()


@given(nodes())
def test_no_rollout_refutes_what_validation_admits(node: Node) -> None:
    check(node)


@given(nodes((ALTERNATE, FIRST_COME, WEIGHTED, OneByOne())))
def test_no_rollout_by_another_rule_does(node: Node) -> None:
    check(node)


@given(swapping_nodes())
def test_no_rollout_with_swaps_does(node: Node) -> None:
    check(node)
