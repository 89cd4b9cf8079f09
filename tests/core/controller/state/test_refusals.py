"""What has been refused is remembered for as long as it holds, and no longer."""

from collections.abc import Callable

import pytest

from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.refusals import NEEDS_HOLD_S, RequestRefusals
from mesh.domain.ids import InstanceId
from mesh.domain.lifecycle import NodeState
from mesh.domain.model import Size
from mesh.domain.reasons import Verdict
from tests.core.controller.state.entries import Entries, submit
from tests.support.profiles import PROFILE

LATE, EXCEEDED, DELAYS = (
    Verdict.FIRST_TOKEN_LATE,
    Verdict.TPOT_EXCEEDED,
    Verdict.DELAYS_RUNNING,
)


class WithOther(Entries):
    def __init__(self) -> None:
        super().__init__()
        self.other = self.a_node("other", 9)
        self.head = self.a_request("r1")

    def refused(self, now_s: float = 5.0) -> list[str]:
        """Nodes that are known to refuse a start for the request."""
        deployment = self.deployment.deployment
        assert deployment is not None

        def obtainable_bytes(node: NodeEntry) -> int:
            return node.obtainable_bytes(deployment)

        said, nodes = self.head.refusals, self.cell.nodes.values()
        worth = said.worth_starting_on(nodes, now_s, obtainable_bytes)
        return [node.node_id for node in nodes if node not in worth]


def comes_back(known: WithOther) -> None:
    """A node, in the very version in which it has refused."""
    known.cell.remove_node(known.node)
    again = known.a_node("n1", 2)
    while again.version < known.node.version:
        again.touch()


def ends(known: WithOther) -> dict[str, Callable[[], object]]:
    """After which a node is worth a start again."""
    cell = known.cell
    return {
        "the version of the node changes": known.node.touch,
        "the node comes back": lambda: comes_back(known),
        "the node is drained": lambda: cell.turn_node(known.node, NodeState.DRAINING),
        "a profile was measured": lambda: cell.learn_profile(PROFILE),
        "a profile was refined": lambda: cell.refine_profile(PROFILE, PROFILE),
    }


@pytest.mark.parametrize("end", list(ends(WithOther())))
def test_a_node_that_has_refused_is_worth_a_start_again_when(end: str) -> None:
    known = WithOther()
    assert known.refused() == []
    known.head.refusals.note_no_start(known.node)
    known.head.refusals.note_start(known.other, EXCEEDED)
    assert known.refused() == ["n1", "other"]
    ends(known)[end]()
    assert "n1" not in known.refused()


def test_a_verdict_on_a_start_holds_only_if_it_does_so_for_any_length() -> None:
    known = WithOther()
    known.head.refusals.note_start(known.node, EXCEEDED)
    known.head.refusals.note_start(known.node, LATE)
    known.head.refusals.note_start(known.other, EXCEEDED)
    assert known.refused() == ["other"]
    assert known.head.refusals.verdict is EXCEEDED


def test_a_node_without_memory_is_worth_a_start_again_once_it_has_as_much() -> None:
    known = WithOther()
    for node, more in ((known.node, 1), (known.other, 0)):
        node.station.record(InstanceId("busy"), Size(2))
        known.head.refusals.note_no_start(node, node.free_bytes + more, at_s=5.0)
        node.touch()
    assert known.refused() == ["n1"]
    assert known.refused() == ["n1"], "which is said of its new version now"
    known.node.touch()
    assert known.refused(5.0 + 2 * NEEDS_HOLD_S) == [], "others may be expected to need less"


def test_a_node_that_could_not_hold_it_when_empty_is_asked_in_each_version() -> None:
    known = WithOther()
    known.head.refusals.note_no_start(known.node, known.node.capacity_bytes + 1, at_s=5.0)
    assert known.refused() == ["n1"]
    known.node.touch()
    assert known.refused() == []


def test_no_time_holds_for_longer_requests_until_the_version_of_the_node_changes() -> None:
    known = Entries()
    short, long = known.a_request("short", tokens=2), known.a_request("long", tokens=9)
    middle, refusals = known.a_request("middle", tokens=5), known.instance.refusals
    refusals.note(3, 5.0, middle, middle.tokens, EXCEEDED)
    said = [refusals.why(3, 6.0, r, r.tokens) for r in (short, middle, long)]
    assert said == [None, EXCEEDED, EXCEEDED]
    assert refusals.why(4, 6.0, long, long.tokens) is None


def test_delays_hold_a_little_longer_for_requests_that_are_due_by_then() -> None:
    known = Entries()
    entry, refusals = known.a_request(), known.instance.refusals
    refusals.note(3, 5.0, entry, entry.tokens, LATE)
    assert refusals.why(3, 5.0, entry, entry.tokens) is None
    refusals.note(3, 5.0, entry, entry.tokens, DELAYS)
    assert refusals.why(3, 5.0, entry, entry.tokens) is DELAYS
    assert refusals.why(3, 5.0, entry, entry.tokens - 1) is None
    assert refusals.why(4, 5.0, entry, entry.tokens) is None
    assert refusals.why(3, 5.02, entry, entry.tokens) is DELAYS
    assert refusals.why(3, 5.02, entry, entry.tokens, hold_s=0.0) is None, "it is tried anew"
    assert refusals.why(3, 5.0, entry, entry.tokens, hold_s=0.0) is DELAYS
    assert refusals.why(3, 5.03, entry, entry.tokens) is None
    later = entry.as_if_now(entry.arrival_s + 0.03)
    assert refusals.why(3, 5.02, later, later.tokens) is None, "it is due later"
    assert refusals.why(3, 5.0, later, later.tokens) is DELAYS
    assert refusals.why(3, 5.0, later, later.tokens, new=True) is None


def test_who_stands_for_others_says_whether_they_may_be_in_time() -> None:
    known = Entries()
    first, second = known.a_request("first"), known.a_request("second")
    known.instance.refusals.note(3, 5.0, first, first.tokens, DELAYS, as_predicted=True)
    assert known.instance.refusals.why(3, 5.0, second, second.tokens) is DELAYS
    assert second.refusals.in_time_as_predicted


def test_of_a_burst_each_that_was_refused_stands_for_those_that_come_after_it() -> None:
    known = Entries()
    early, short = known.a_request("early", tokens=9), known.a_request("short", tokens=2)
    late, refusals = early.as_if_now(early.arrival_s + 0.03), known.instance.refusals
    for refused in (late, short):
        refusals.note(3, 5.0, refused, refused.tokens, DELAYS)
    assert refusals.why(3, 5.01, late, late.tokens) is DELAYS, "the last is due before that"
    assert refusals.why(3, 5.01, short, short.tokens) is DELAYS, "the one before is longer"


def test_an_event_goes_on_once_where_validations_ran_out() -> None:
    known = Entries()
    known.deployment.note_stopped(7)
    assert [known.deployment.take_resumes_at() for _ in range(2)] == [7, 0]


def test_what_was_said_before_holds_unless_something_is_said_now() -> None:
    said = RequestRefusals()
    for verdict in (DELAYS, EXCEEDED, LATE):
        said.note(verdict)
    said.note_no_room()
    before = said.try_again()
    assert (before, said.verdict, said.short_of_memory) == (LATE, None, False)
    said.keep(before)
    assert said.verdict is LATE
    said.note(EXCEEDED)
    said.keep(before)
    assert said.verdict is EXCEEDED


@pytest.mark.parametrize("verdict", [EXCEEDED, DELAYS])
def test_what_several_answers_are_refused_for_says_nothing_of_one(verdict: Verdict) -> None:
    known = Entries()
    one, several, more = (known.a_request(f"of-{n}", answers=n) for n in (1, 4, 5))
    refusals = known.instance.refusals
    refusals.note(3, 5.0, several, several.tokens, verdict)
    said = [refusals.why(3, 5.0, r, r.tokens) for r in (one, several, more)]
    assert said == [None, verdict, verdict]


def test_what_nodes_said_of_a_start_goes_once_the_request_has_a_place() -> None:
    known = WithOther()
    known.head.refusals.note_no_start(known.node)
    submit(known.instance, known.head)
    assert known.head.refusals.starts == {}
