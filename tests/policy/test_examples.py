"""The policies of examples/policies do what their docstrings say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh.domain.actions import RefuseRequest
from mesh.domain.events import LeaseCheckDue, NodeDisconnected
from mesh.domain.messages import LoadInstance, UnloadInstance
from mesh.domain.reasons import RefusalReason
from mesh.policy.rules.turns import next_turn, note_turn
from mesh.runtime.policies import policy_of
from tests.core.admission import instance, node, submitted
from tests.core.cells import CellUnderTest, commands, deployment, only, request
from tests.request.schedules import TIMES, TOKENS_MAX, queue

EXAMPLES = Path(__file__).parents[2] / "examples" / "policies"


def example(name: str) -> Any:
    return policy_of(str(EXAMPLES / f"{name}.py"))


@pytest.mark.parametrize("name", ["lru_swap", "warm_pair", "weighted_turns"])
def test_an_example_fits_on_a_page(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 60


def test_who_waits_in_vain_for_a_full_instance_is_told_how_many_it_serves() -> None:
    cell = CellUnderTest(
        deployment("a", replicas_max=1), rule=replace(example("lru_swap"), batch_max=1)
    )
    cell.join(node("n1", instance("i1", "a")))
    assert submitted(cell.invoke(request("r1", of="a"))) == [("r1", "i1")]
    assert submitted(cell.invoke(request("r2", of="a"))) == []
    cell.now_s += 60.0
    refused = only(cell.retry(), RefuseRequest)
    assert (refused.request_id, refused.reason) == ("r2", RefusalReason.POLICY)
    assert refused.message == "each instance serves 1 requests at a time"


@pytest.mark.parametrize(
    ("paces_s", "turns"),
    [
        ({"a": 0.1, "b": 0.2}, {"a": 8, "b": 4}),
        ({"a": 0.2, "b": 0.1}, {"a": 4, "b": 8}),
        ({"a": 0.3, "b": 0.1}, {"a": 3, "b": 9}),
        ({"a": 0.1, "b": 9.0}, {"a": 10, "b": 2}),
        ({"a": 0.1, "b": float("inf")}, {"a": 6, "b": 6}),
        ({"a": float("inf"), "b": float("inf")}, {"a": 6, "b": 6}),
    ],
)
def test_an_instance_has_as_many_turns_as_its_pace_is_quicker(
    paces_s: dict[str, float], turns: dict[str, int]
) -> None:
    """Four at most, whatever the instances are called; without a pace, as the slowest."""
    rule = example("weighted_turns").rule
    queues = [queue(name, 9.0, times=TIMES, tpot_s=paces_s[name]) for name in paces_s]
    had = dict.fromkeys(paces_s, 0)
    for _ in range(12):
        grant = next_turn(rule, queues, 0.0, prefill_tokens_max=TOKENS_MAX)
        assert grant is not None
        note_turn(grant)
        had[grant.queue.instance_id] += 1
    assert had == turns


def test_the_busiest_deployment_has_a_spare_instance_until_a_call_takes_it() -> None:
    cell = CellUnderTest(deployment("a"), deployment("b"), rule=example("warm_pair"))
    links = {name: cell.join(node(name))[0] for name in ("n1", "n2", "n3")}
    made = cell.core.cell.instances

    def load(said: list[Any]) -> Any:
        loading = made[only(commands(said, LoadInstance), LoadInstance).instance_id]
        cell.loaded(links[loading.node.node_id], loading.instance_id)
        return loading

    first = load(cell.invoke(request("a0", of="a")))
    for number in range(1, 8):
        cell.invoke(request(f"a{number}", of="a"))
    spare = load(cell.tell(LeaseCheckDue()))
    assert (spare.deployment, spare.label) == ("a", "spare")
    assert spare.node is not first.node, "on a node that has none of it"
    assert not commands(cell.tell(LeaseCheckDue()), LoadInstance), "there is one"
    cell.tell(NodeDisconnected(link_id=links[first.node.node_id], reason="reset"))
    assert spare.batch == 8, "the calls of the first have taken it"
    other = load(cell.tell(LeaseCheckDue()))
    assert (spare.label, other.label) == ("", "spare")
    for number in range(40):
        cell.now_s += 0.1
        cell.invoke(request(f"b{number}", of="b"))
    gone = cell.tell(LeaseCheckDue())
    assert only(commands(gone, UnloadInstance), UnloadInstance).instance_id == other.instance_id
