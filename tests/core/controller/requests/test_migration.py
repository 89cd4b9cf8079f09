"""Live migration: a request runs on at its source until its target has caught up with it."""

from dataclasses import replace

from mesh.domain.actions import DeliverTokens
from mesh.domain.events import CancelRequested, DrainRequested, MigrationDue, NodeDisconnected
from mesh.domain.ids import InstanceId, NodeId, OperationId, RequestId
from mesh.domain.lifecycle import MigrationState
from mesh.domain.messages import (
    AbortRequest,
    ContinueRequest,
    RequestReturned,
    SubmitRequest,
    TokensReport,
)
from mesh.domain.reasons import FinishReason
from mesh.domain.request import RequestTokens
from tests.core.admission import instance, node
from tests.core.cells import commands, of_kind, only, request
from tests.core.two_nodes import ITERATION_S, LIMITS, TARGET, TwoNodes, continued


def test_the_target_computes_while_the_source_goes_on_and_then_takes_over() -> None:
    cell = TwoNodes()
    order = only(commands(cell.drain(), SubmitRequest), SubmitRequest)
    assert (order.instance_id, order.order.paused, order.order.attempt) == ("i2", True, 2)
    assert order.order.output_tokens == (40, 41, 42)
    assert cell.runs_on == "i1"

    for _ in range(6):
        assert only(cell.yielded(), DeliverTokens).outputs.attempt == 1
    assert not commands(cell.computed(), ContinueRequest), "the source's next token decides"
    more = continued(cell.yielded())
    assert (more.paused, more.token_ids) == (True, (43, 44, 45, 46, 47, 48, 49))
    assert cell.state is MigrationState.COMPUTING

    cell.yielded()
    cell.computed()
    both = cell.yielded()
    assert (continued(both).paused, continued(both).token_ids) == (False, (50, 51))
    assert not commands(both, AbortRequest), "the source goes on beside it"
    assert cell.core.cell.migrations[RequestId("r1")].state is MigrationState.DRAWING
    assert of_kind(cell.yielded(), DeliverTokens), "the client has them from there"
    over = cell.drawn(52)
    assert not of_kind(over, DeliverTokens), "which it has"
    assert only(commands(over, AbortRequest), AbortRequest).attempt == 1
    assert not cell.core.cell.migrations
    assert cell.runs_on == "i2"
    assert not of_kind(cell.yielded(), DeliverTokens), "what the source drew meanwhile is nobody's"
    on = cell.yielded(at=cell.target, attempt=2)
    assert only(on, DeliverTokens).outputs.token_ids == (53,)


def test_a_round_for_few_tokens_is_spared() -> None:
    cell = TwoNodes().draining()
    cell.computed()
    assert not continued(cell.yielded()).paused


def test_a_token_that_the_target_has_first_is_the_clients() -> None:
    cell = TwoNodes().moving()
    over = cell.drawn(44)
    assert only(over, DeliverTokens).outputs.token_ids == (44,)
    assert only(commands(over, AbortRequest), AbortRequest).attempt == 1
    assert cell.runs_on == "i2"
    cell.counts["r1"] = 5
    assert not of_kind(cell.yielded(), DeliverTokens)


def test_the_source_goes_on_while_the_target_draws_long_after_it() -> None:
    cell = TwoNodes(limits=replace(LIMITS, migration_drawn_max=6))
    cell.moving()
    cell.yielded()
    cell.now_s += ITERATION_S
    assert not commands(cell.drawn(44), AbortRequest), "the client waited so long"
    cell.yielded()
    assert only(commands(cell.drawn(45), AbortRequest), AbortRequest).attempt == 1


def test_long_is_by_the_rounds_of_the_targets_node() -> None:
    cell = TwoNodes(to=node("n2", instance("i2", "a"), instance("j2", "b")))
    cell.invoke(request("b1", of="b", prompt=(1,) * 100, max_tokens=100))
    first = RequestTokens(request_id=RequestId("b1"), attempt=1, first_index=0, token_ids=(1,))
    cell.report(cell.target, TokensReport(instance_id=InstanceId("j2"), outputs=(first,)))
    cell.moving()
    cell.yielded()
    cell.now_s += ITERATION_S / 4
    assert only(commands(cell.drawn(44), AbortRequest), AbortRequest).attempt == 1


def test_a_target_that_always_draws_long_after_its_source_has_the_request_in_the_end() -> None:
    cell = TwoNodes(limits=replace(LIMITS, migration_drawn_max=4))
    cell.moving()
    for token in (44, 45):
        cell.yielded()
        cell.now_s += ITERATION_S
        assert not commands(cell.drawn(token), AbortRequest)
    cell.yielded()
    cell.now_s += ITERATION_S
    assert only(commands(cell.drawn(46), AbortRequest), AbortRequest).attempt == 1


def test_the_source_leaves_out_an_iteration_until_the_target_is_level_with_it() -> None:
    cell = TwoNodes().moving()
    cell.yielded(3)
    pause = continued(cell.drawn(44))
    assert (pause.instance_id, pause.attempt, pause.paused, pause.token_ids) == ("i1", 1, True, ())
    on = continued(cell.drawn(45))
    assert (on.instance_id, on.attempt, on.paused) == ("i1", 1, False)
    assert of_kind(cell.yielded(), DeliverTokens)
    assert continued(cell.drawn(46)).paused
    level = cell.drawn(47)
    assert not commands(level, AbortRequest), "the client has waited for a while already"
    assert not continued(level).paused
    cell.yielded()
    assert only(commands(cell.drawn(48), AbortRequest), AbortRequest).attempt == 1


def test_one_that_is_never_level_is_given_up_and_then_handed_over_at_once() -> None:
    cell = TwoNodes(limits=replace(LIMITS, migration_drawn_max=3))
    cell.moving()
    cell.yielded(3)
    for token in (44, 45, 46):
        cell.yielded()
        assert not commands(cell.drawn(token), AbortRequest)
    assert only(commands(cell.drawn(47), AbortRequest), AbortRequest).attempt == 2
    cell.tell(MigrationDue())
    cell.computed(attempt=3)
    assert only(commands(cell.yielded(), AbortRequest), AbortRequest).attempt == 1
    assert cell.runs_on == "i2"


def test_nobody_stops_or_pauses_for_a_target_that_computes_a_prompt() -> None:
    cell = TwoNodes(limits=replace(LIMITS, migration_drawn_max=4))
    cell.moving()
    cell.yielded()
    cell.invoke(request("r2", of="a", prompt=(1,) * 100))
    assert cell.core.cell.requests[RequestId("r2")].instance is not None
    for token in (44, 45):
        said = cell.drawn(token)
        assert not commands(said, AbortRequest)
        assert not commands(said, ContinueRequest)
        cell.yielded()
    assert only(commands(cell.drawn(46), AbortRequest), AbortRequest).attempt == 1, "not for ever"


def test_a_target_that_falls_far_behind_begins_anew() -> None:
    cell = TwoNodes().moving()
    cell.yielded(LIMITS.migration_behind_max + 2)
    assert only(commands(cell.drawn(44), AbortRequest), AbortRequest).attempt == 2
    assert (cell.state, cell.runs_on) == (None, "i1")
    begun = cell.tell(MigrationDue())
    assert only(commands(begun, SubmitRequest), SubmitRequest).order.attempt == 3


def test_nobody_pauses_for_a_target_that_would_be_late() -> None:
    cell = TwoNodes().moving()
    cell.yielded(2)
    cell.now_s = cell.core.cell.requests[RequestId("r1")].due_s
    assert not commands(cell.drawn(44), ContinueRequest)
    assert cell.runs_on == "i1"


def test_a_copy_that_draws_another_token_goes_and_the_next_draws_none_beside_the_source() -> None:
    cell = TwoNodes().moving()
    cell.yielded()
    assert only(commands(cell.drawn(44, drew=7), AbortRequest), AbortRequest).attempt == 2
    assert (cell.state, cell.runs_on) == (None, "i1")
    cell.tell(MigrationDue())
    cell.computed(attempt=3)
    over = cell.yielded()
    assert not continued(over).paused
    assert only(commands(over, AbortRequest), AbortRequest).attempt == 1
    assert cell.runs_on == "i2"


def test_a_copy_that_is_held_and_draws_goes() -> None:
    cell = TwoNodes().draining()
    told = cell.drawn(43)
    assert only(commands(told, AbortRequest), AbortRequest).attempt == 2
    assert not of_kind(told, DeliverTokens)
    assert (cell.state, cell.runs_on) == (None, "i1")


def test_a_source_that_is_paused_goes_on_when_its_target_is_lost() -> None:
    cell = TwoNodes().moving()
    cell.yielded(2)
    assert continued(cell.drawn(44)).paused
    lost = cell.tell(NodeDisconnected(link_id=cell.target, reason="cut"))
    on = continued(lost)
    assert (on.instance_id, on.attempt, on.paused) == ("i1", 1, False)


def test_a_source_that_is_paused_does_not_wait_for_a_target_that_says_nothing() -> None:
    cell = TwoNodes().moving()
    cell.yielded(2)
    cell.drawn(44)
    cell.now_s += LIMITS.migration_retry_s
    assert not continued(cell.tell(MigrationDue())).paused


def test_where_a_turn_has_several_tokens_of_those_that_move_the_second_waits_for_the_first() -> (
    None
):
    cell = TwoNodes(limits=replace(LIMITS, turn_s_max=0.1), beside=("r2",))
    cell.drain()
    for name in ("r1", "r2"):
        cell.computed(of=name)
    assert not continued(cell.yielded()).paused
    assert not commands(cell.yielded(of="r2"), ContinueRequest), "it would wait for r1's prefill"
    cell.yielded(at=cell.target, attempt=2)
    over = continued(cell.yielded(of="r2"))
    assert (over.paused, over.token_ids) == (False, (43, 44))


def test_the_source_may_end_the_answer_first() -> None:
    cell = TwoNodes().draining()
    cell.computed()
    over = cell.yielded(finish=FinishReason.STOP)
    assert only(commands(over, AbortRequest), AbortRequest).attempt == 2
    assert not cell.core.cell.migrations
    assert not cell.core.cell.instances[InstanceId("i2")].requests


def test_a_client_that_goes_away_frees_both_places() -> None:
    cell = TwoNodes().draining()
    gone = cell.tell(CancelRequested(request_id=RequestId("r1")))
    assert sorted(abort.attempt for abort in commands(gone, AbortRequest)) == [1, 2]
    assert not cell.core.cell.migrations


def test_a_target_that_gives_it_back_leaves_it_where_it_runs() -> None:
    cell = TwoNodes().draining()
    said = RequestReturned(request_id=RequestId("r1"), attempt=2, error="EngineError", message="no")
    cell.report(cell.target, said)
    assert (cell.state, cell.runs_on) == (None, "i1")
    assert of_kind(cell.yielded(), DeliverTokens)


def test_a_target_that_is_lost_leaves_it_where_it_runs() -> None:
    cell = TwoNodes().draining()
    cell.tell(NodeDisconnected(link_id=cell.target, reason="cut"))
    assert (cell.state, cell.runs_on) == (None, "i1")
    assert of_kind(cell.yielded(), DeliverTokens)


def test_a_source_that_is_lost_sends_it_through_its_queue() -> None:
    cell = TwoNodes().draining()
    lost = cell.tell(NodeDisconnected(link_id=cell.source, reason="cut"))
    assert [abort.attempt for abort in commands(lost, AbortRequest)] == [2, 1]
    order = only(commands(lost, SubmitRequest), SubmitRequest).order
    assert (order.attempt, order.paused) == (3, False), "told apart from the copy's"
    assert cell.runs_on == "i2"


def test_a_target_that_is_to_go_itself_is_none_any_more() -> None:
    cell = TwoNodes().draining()
    asked = DrainRequested(operation_id=OperationId("e"), node_id=NodeId("n2"))
    cell.tell(asked)
    cell.tell(MigrationDue())
    assert (cell.state, cell.runs_on) == (None, "i1")


def test_it_does_not_take_longer_than_it_may() -> None:
    cell = TwoNodes(limits=replace(LIMITS, migration_s_max=0.5, moves_max=1))
    cell.drain()
    cell.now_s += 0.6
    cell.tell(MigrationDue())
    assert (cell.state, cell.runs_on) == (None, "i1")
    assert cell.core.cell.migrations_at_s is None, "it has moved as often as it may"


def test_nothing_moves_to_an_engine_that_cannot_hold() -> None:
    cell = TwoNodes(to=replace(TARGET, computes_ahead=False))
    assert not commands(cell.drain(), SubmitRequest)


def test_no_more_move_at_a_time_than_may() -> None:
    cell = TwoNodes(limits=replace(LIMITS, migrations_max=1), beside=("r2",))
    cell.drain()
    assert len(cell.core.cell.migrations) == 1
