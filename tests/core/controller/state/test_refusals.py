"""What has been refused is remembered for as long as it holds, and no longer."""

from collections.abc import Callable

import pytest

from mesh.core.controller.state.refusals import STARTS_MAX, RequestRefusals
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.lifecycle import DeploymentState, NodeState
from mesh.domain.model import Size
from mesh.domain.reasons import Verdict
from tests.core.controller.state.entries import A, Entries
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
        self.a_request("r1")
        self.a_request("r2")


def delete(known: Entries) -> None:
    known.deployment.advance(DeploymentState.DELETING)
    known.cell.remove_deployment(known.deployment)


def worth(known: WithOther, name: str = "r1") -> list[str]:
    """Nodes that are worth a start for the request of this name."""
    head = next(r for r in known.cell.requests.values() if r.original.request_id == name)
    nodes = known.cell.nodes.values()
    deployment = known.deployment.deployment
    assert deployment is not None
    worth = known.cell.refusals.worth_starting_on(
        known.deployment, head, nodes, lambda node: node.obtainable_bytes(deployment)
    )
    return [n.node_id for n in worth]


def ends(known: WithOther) -> dict[str, Callable[[], object]]:
    """After which a node is worth a start again."""
    cell = known.cell
    return {
        "the version of the node changes": known.node.touch,
        "an answer has ended": lambda: cell.note_served(known.deployment, 3),
        "an instance was started": lambda: cell.refusals.note_started(A),
        "another node has come": lambda: known.a_node("n2", 2),
        "another node has gone": lambda: cell.remove_node(known.other),
        "another node is drained": lambda: cell.turn_node(known.other, NodeState.DRAINING),
        "a profile was measured": lambda: cell.learn_profile(PROFILE),
        "a profile was refined": lambda: cell.refine_profile(PROFILE, PROFILE),
        "the deployment was deleted": lambda: delete(known),
    }


@pytest.mark.parametrize("end", list(ends(WithOther())))
def test_a_node_that_has_refused_is_worth_a_start_again_when(end: str) -> None:
    known = WithOther()
    assert worth(known) == ["n1", "other"]
    assert worth(known) == []
    ends(known)[end]()
    assert "n1" in worth(known)


def test_what_was_refused_to_one_request_says_nothing_about_another() -> None:
    known = WithOther()
    worth(known, "r1")
    assert worth(known, "r2") == ["n1", "other"]
    assert worth(known, "r1") == [], "it is kept while others are tried"


def test_of_the_requests_of_a_deployment_the_last_few_are_remembered() -> None:
    known = WithOther()
    worth(known, "r1")
    for number in range(3, 3 + STARTS_MAX):
        assert worth(known, "r2") == (["n1", "other"] if number == 3 else [])
        known.a_request(f"r{number}")
        worth(known, f"r{number}")
    assert worth(known, "r1") == ["n1", "other"]


def test_nothing_is_remembered_of_a_request_that_is_over() -> None:
    known = WithOther()
    worth(known, "r1")
    known.cell.remove_request(known.cell.requests[RequestId("r1")])
    known.a_request("r1")
    assert worth(known, "r1") == ["n1", "other"]


def test_a_verdict_on_a_start_holds_only_if_it_does_so_for_any_length() -> None:
    known = WithOther()
    head, moved = known.cell.requests.values()
    worth(known)
    known.cell.refusals.note_start(A, head, known.node, LATE)
    known.cell.refusals.note_start(A, head, known.other, EXCEEDED)
    known.cell.refusals.note_start(A, moved, known.other, LATE)
    assert worth(known) == ["n1"]
    assert head.refusals.verdict is EXCEEDED


def test_a_node_without_memory_is_worth_a_start_again_once_it_has_as_much() -> None:
    known = WithOther()
    refusals, head = known.cell.refusals, next(iter(known.cell.requests.values()))
    assert worth(known) == ["n1", "other"]
    for node, more in ((known.node, 1), (known.other, 0)):
        node.station.record(InstanceId("busy"), Size(2))
        refusals.note_no_room(A, head, node, node.free_bytes + more)
        node.touch()
    assert worth(known) == ["other"]
    assert worth(known) == []


def test_a_node_that_could_not_hold_it_when_empty_is_asked_each_time() -> None:
    known = WithOther()
    worth(known)
    head = next(iter(known.cell.requests.values()))
    known.cell.refusals.note_no_room(A, head, known.node, known.node.capacity_bytes + 1)
    known.node.touch()
    assert worth(known) == ["n1"]


def test_when_validations_run_out_only_those_that_were_tried_have_refused() -> None:
    known = WithOther()
    worth(known)
    head = next(iter(known.cell.requests.values()))
    known.cell.refusals.note_start(A, head, known.node, EXCEEDED)
    known.cell.refusals.note_not_all_tried(A, head)
    assert worth(known) == ["other"]


def test_no_time_holds_for_longer_requests_until_the_node_is_eased() -> None:
    known = Entries()
    short, long = known.a_request("short", tokens=2), known.a_request("long", tokens=9)
    middle, refusals = known.a_request("middle", tokens=5), known.cell.refusals
    refusals.note_refused(known.instance, middle, middle.tokens, EXCEEDED)
    said = [refusals.why_refuses(known.instance, r, r.tokens) for r in (short, middle, long)]
    assert said == [None, EXCEEDED, EXCEEDED]
    refusals.event_begins()
    assert refusals.why_refuses(known.instance, long, long.tokens) is EXCEEDED
    known.node.touch()
    assert refusals.why_refuses(known.instance, long, long.tokens) is None


def test_other_refusals_hold_in_their_event_alone() -> None:
    known = Entries()
    entry, refusals = known.a_request(), known.cell.refusals
    refusals.note_refused(known.instance, entry, entry.tokens, LATE)
    assert refusals.why_refuses(known.instance, entry, entry.tokens) is None
    refusals.note_refused(known.instance, entry, entry.tokens, DELAYS)
    assert refusals.why_refuses(known.instance, entry, entry.tokens) is DELAYS
    refusals.event_begins()
    assert refusals.why_refuses(known.instance, entry, entry.tokens) is None


def test_an_instance_that_comes_back_under_its_name_has_refused_nothing() -> None:
    known = Entries()
    entry = known.a_request()
    known.cell.refusals.note_refused(known.instance, entry, entry.tokens, EXCEEDED)
    known.cell.remove_instance(known.instance)
    again = known.an_instance("a1", known.a_node("n1", 2))
    while again.node.version < known.node.version - 1:
        again.node.touch()
    assert known.cell.refusals.why_refuses(again, entry, entry.tokens) is None


def test_an_event_goes_on_once_where_validations_ran_out() -> None:
    known = Entries()
    refusals = known.cell.refusals
    refusals.note_stopped(A, 7)
    assert [refusals.where_to_resume(A) for _ in range(2)] == [7, 0]
    refusals.note_stopped(A, 7)
    delete(known)
    assert refusals.where_to_resume(A) == 0


def test_the_latest_start_is_worked_out_anew_for_other_nodes_and_forgotten_at_the_end() -> None:
    known = WithOther()
    entry, refusals = known.cell.requests[next(iter(known.cell.requests))], known.cell.refusals
    refusals.note_latest_start(entry, 4.0)
    assert refusals.latest_start_s(entry) == 4.0
    refusals.fleet_changed()
    assert refusals.latest_start_s(entry) is None
    refusals.note_latest_start(entry, 4.0)
    known.cell.remove_request(entry)
    assert refusals.latest_start_s(entry) is None


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
