"""Migrations that end early: a client, a node or the time is gone. And such as may not begin."""

from dataclasses import replace

from mesh.domain.actions import DeliverTokens
from mesh.domain.events import CancelRequested, DrainRequested, MigrationDue, NodeDisconnected
from mesh.domain.ids import InstanceId, NodeId, OperationId, RequestId
from mesh.domain.messages import AbortRequest, RequestReturned, SubmitRequest
from mesh.domain.reasons import FinishReason
from tests.core.cells import commands, of_kind, only
from tests.core.two_nodes import LIMITS, TARGET, TwoNodes


def test_the_source_may_end_the_answer_first() -> None:
    cell = TwoNodes()
    cell.drain()
    cell.computed()
    over = cell.yielded(finish=FinishReason.STOP)
    assert only(commands(over, AbortRequest), AbortRequest).attempt == 2
    assert not cell.core.cell.migrations
    assert not cell.core.cell.instances[InstanceId("i2")].requests


def test_a_client_that_goes_away_frees_both_places() -> None:
    cell = TwoNodes()
    cell.drain()
    gone = cell.tell(CancelRequested(request_id=RequestId("r1")))
    assert sorted(abort.attempt for abort in commands(gone, AbortRequest)) == [1, 2]
    assert not cell.core.cell.migrations


def test_a_target_that_gives_it_back_leaves_it_where_it_runs() -> None:
    cell = TwoNodes()
    cell.drain()
    said = RequestReturned(request_id=RequestId("r1"), attempt=2, error="EngineError", message="no")
    cell.report(cell.target, said)
    assert (cell.state, cell.runs_on) == (None, "i1")
    assert of_kind(cell.yielded(), DeliverTokens)


def test_a_target_that_is_lost_leaves_it_where_it_runs() -> None:
    cell = TwoNodes()
    cell.drain()
    cell.tell(NodeDisconnected(link_id=cell.target, reason="cut"))
    assert (cell.state, cell.runs_on) == (None, "i1")
    assert of_kind(cell.yielded(), DeliverTokens)


def test_a_source_that_is_lost_sends_it_through_its_queue() -> None:
    cell = TwoNodes()
    cell.drain()
    lost = cell.tell(NodeDisconnected(link_id=cell.source, reason="cut"))
    assert [abort.attempt for abort in commands(lost, AbortRequest)] == [2, 1]
    order = only(commands(lost, SubmitRequest), SubmitRequest).order
    assert (order.attempt, order.held) == (3, False), "told apart from the copy's"
    assert cell.runs_on == "i2"


def test_a_target_that_is_to_go_itself_is_none_any_more() -> None:
    cell = TwoNodes()
    cell.drain()
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
