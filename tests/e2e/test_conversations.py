"""Conversations with the prefix cache have the tokens of those without, whatever becomes of nodes.

`MESH_CONVERSATIONS` says how many there are. Two real CPU nodes compute in the exact form; one is
killed, another drained, while conversations wait for their next turns or amid answers. That caches
shrink to their last block in between is the contract suite's.
"""

import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mesh.domain.ids import DeploymentName, NodeId
from mesh.domain.invocation import Accepted, Invocation, TokenPrompt, Tokens
from mesh.domain.slo import Slo
from tests.e2e.live_cell import LiveCell, Process

CONVERSATIONS = int(os.environ.get("MESH_CONVERSATIONS") or 8)
AT_ONCE = 4
TURNS = 2
SYSTEM = tuple(range(5, 85))
"""What all begin with."""
QUESTION_TOKENS, ANSWER_TOKENS = 12, 24
SLO = Slo(ttft_s=60.0, tpot_s=2.0)
"""Nobody is refused for a node that comes back."""


@pytest.mark.timeout(1800)
def test_no_token_changes_through_moves_and_lost_nodes(cell: LiveCell, tiny_model: Path) -> None:
    cell.start_controller()
    nodes = {name: _start(cell, name) for name in ("n1", "n2")}
    for name in ("kept", "computed"):
        cell.deploy(name, tiny_model, replicas_min=2, slo=SLO, prefix_cache=name == "kept")
    cached = 0
    groups = list(_groups(range(CONVERSATIONS)))
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for number, group in enumerate(groups):
            expected = list(threads.map(lambda one: _played(cell, "computed", one)[0], group))
            playing = [threads.submit(_played, cell, "kept", one) for one in group]
            lost = ("n1", "n2")[number % 2]
            if number % 2:
                nodes[lost].kill()
                nodes[lost] = _start(cell, lost)
            else:
                cell.client.drain(NodeId(lost))
                cell.client.drain(NodeId(lost), undo=True)
            played = [each.result() for each in playing]
            assert [tokens for tokens, _ in played] == expected
            cached += sum(found for _, found in played)
    assert cached > CONVERSATIONS * len(SYSTEM)


def _start(cell: LiveCell, name: str) -> Process:
    return cell.start_real_node(name, module="tests.support.exact_node")


def _groups(numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    return (numbers[at : at + AT_ONCE] for at in range(0, len(numbers), AT_ONCE))


def _played(cell: LiveCell, deployment: str, number: int) -> tuple[list[int], int]:
    """The tokens of all its answers, and how many of its prompts' were cached."""
    draw, history = random.Random(number), SYSTEM
    said: list[int] = []
    cached = 0
    for _ in range(TURNS):
        history = (*history, *draw.choices(range(5, 250), k=QUESTION_TOKENS))
        asked = Invocation(
            deployment=DeploymentName(deployment),
            prompt=TokenPrompt(token_ids=history),
            temperature=0.0,
            max_tokens=ANSWER_TOKENS,
            ignore_eos=True,
        )
        answer: list[int] = []
        for event in cell.client.invoke(asked):
            if isinstance(event, Accepted):
                cached += event.cached_prompt_tokens
            elif isinstance(event, Tokens):
                answer += event.token_ids
        assert len(answer) == ANSWER_TOKENS
        said += answer
        history = (*history, *answer)
    return said, cached
