"""Live migration: a request runs on at its source until its target has caught up with it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from mesh.domain.actions import ControllerAction, DeliverTokens, SetTimer
from mesh.domain.events import (
    CancelRequested,
    DrainRequested,
    LeaseCheckDue,
    MigrationDue,
    NodeDisconnected,
)
from mesh.domain.ids import InstanceId, NodeId, OperationId, RequestId
from mesh.domain.lifecycle import InstanceState, MigrationState
from mesh.domain.limits import CellLimits
from mesh.domain.messages import (
    AbortRequest,
    ComputedAhead,
    ContinueRequest,
    NodeHello,
    RequestReturned,
    SubmitRequest,
    TokensReport,
    UnloadInstance,
)
from mesh.domain.reasons import FinishReason, Verdict
from mesh.domain.request import RequestTokens
from mesh.domain.slo import Slo
from mesh.policy import interface
from mesh.policy.llm_mesh import LLM_MESH
from mesh.policy.plans import Move, Plan, Release
from mesh.policy.views import CellView
from tests.core.admission import instance, node
from tests.core.cells import MIB, CellUnderTest, commands, deployment, of_kind, only, request

LIMITS = CellLimits(delivery_s_max=0.02)
TARGET = node("n2", instance("i2", "a"))


class Releasing:
    """`llm-mesh` that has the instance on node n1 go."""

    def __getattr__(self, name: str) -> Any:
        return getattr(LLM_MESH, name)

    def upkeep(self, cell: CellView) -> Iterator[Plan]:
        yield from (Release(instance=i) for i in cell.instances() if i.instance_id == "i1")


class Demanding(Releasing):
    """The same by what is demanded of the node, without a look into the future."""

    def passes(self, plan: Plan, tests: interface.Tests) -> Verdict:
        return tests.demand(plan)


class Moving(Releasing):
    """`llm-mesh` that has what runs on node n1 move, again and again."""

    def upkeep(self, cell: CellView) -> Iterator[Plan]:
        to = next(i for i in cell.instances() if i.instance_id == "i2")
        running = [r for i in cell.instances() if i is not to for r in cell.requests(i)]
        yield Move(requests=tuple(running), to=to)


ITERATION_S = 0.002
"""Of the instances, about."""
SOON_S = ITERATION_S / 4
B1, B2 = InstanceId("b1"), InstanceId("b2")


class Crowding(Releasing):
    """The same once what runs on node n3 moves to where that of n1 would go."""

    def upkeep(self, cell: CellView) -> Iterator[Plan]:
        named = {instance.instance_id: instance for instance in cell.instances()}
        yield Move(requests=tuple(cell.requests(named[B1])), to=named[B2])
        yield from super().upkeep(cell)


class TwoNodes(CellUnderTest):
    """On node n1 `r1` and others have three tokens; node n2 has such an instance, too."""

    def __init__(
        self,
        *,
        limits: CellLimits = LIMITS,
        to: NodeHello = TARGET,
        beside: Sequence[str] = (),
        policy: Any = "llm-mesh",
        slo: Slo | None = None,
    ) -> None:
        super().__init__(*(deployment(name, slo=slo) for name in "ab"), limits=limits, rule=policy)
        self.source, _ = self.join(node("n1", instance("i1", "a")))
        self.counts: dict[str, int] = {}
        for name in ("r1", *beside):
            self.invoke(request(name, of="a", prompt=(1,) * 100, max_tokens=100))
            self.counts[name] = 0
            self.yielded(3, of=name)
        self.target, _ = self.join(to)

    @property
    def state(self) -> MigrationState | None:
        moves = self.core.cell.migrations.get(RequestId("r1"))
        return moves.state if moves is not None else None

    @property
    def runs_on(self) -> str | None:
        found = self.core.cell.requests[RequestId("r1")].instance
        return found.instance_id if found is not None else None

    def yielded(
        self,
        count: int = 1,
        *,
        of: str = "r1",
        at: int = 0,
        attempt: int = 1,
        finish: FinishReason | None = None,
    ) -> list[ControllerAction]:
        """So many tokens more, from the source unless said otherwise."""
        first = self.counts[of]
        ids = tuple(range(40 + first, 40 + first + count))
        outputs = RequestTokens(
            request_id=RequestId(of),
            attempt=attempt,
            first_index=first,
            token_ids=ids,
            finish=finish,
        )
        link, on = (at, "i2") if at else (self.source, "i1")
        said = TokensReport(instance_id=InstanceId(on), outputs=(outputs,))
        told = of_kind(actions := self.report(link, said), DeliverTokens)
        self.counts[of] += sum(len(d.outputs.token_ids) for d in told)
        self.now_s += SOON_S
        return actions

    def moving(self) -> None:
        """Its target has four tokens of it, and draws the next ones, too."""
        self.drain()
        self.computed()
        assert not continued(self.yielded()).held

    def drawn(self, token: int, *, drew: int | None = None) -> list[ControllerAction]:
        """The target has drawn the token of that index, or another."""
        outputs = RequestTokens(
            request_id=RequestId("r1"),
            attempt=2,
            first_index=token - 40,
            token_ids=(drew or token,),
        )
        return self.report(
            self.target, TokensReport(instance_id=InstanceId("i2"), outputs=(outputs,))
        )

    def drain(self, name: str = "n1") -> list[ControllerAction]:
        asked = DrainRequested(operation_id=OperationId("d"), node_id=NodeId(name))
        timers = of_kind(self.tell(asked), SetTimer)
        assert MigrationDue() in [timer.timer for timer in timers]
        return self.tell(MigrationDue())

    def computed(self, attempt: int = 2, *, of: str = "r1") -> list[ControllerAction]:
        said = ComputedAhead(request_id=RequestId(of), attempt=attempt)
        return self.report(self.target, said)


def continued(actions: Sequence[ControllerAction]) -> ContinueRequest:
    return only(commands(actions, ContinueRequest), ContinueRequest)


def test_the_target_computes_while_the_source_goes_on_and_then_takes_over() -> None:
    cell = TwoNodes()
    order = only(commands(cell.drain(), SubmitRequest), SubmitRequest)
    assert (order.instance_id, order.order.held, order.order.attempt) == ("i2", True, 2)
    assert order.order.output_tokens == (40, 41, 42)
    assert cell.runs_on == "i1"

    for _ in range(6):
        assert only(cell.yielded(), DeliverTokens).outputs.attempt == 1
    assert not commands(cell.computed(), ContinueRequest), "the source's next token decides"
    more = continued(cell.yielded())
    assert (more.held, more.token_ids) == (True, (43, 44, 45, 46, 47, 48, 49))
    assert cell.state is MigrationState.COMPUTING

    cell.yielded()
    cell.computed()
    both = cell.yielded()
    assert (continued(both).held, continued(both).token_ids) == (False, (50, 51))
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
    cell = TwoNodes()
    cell.drain()
    cell.computed()
    assert not continued(cell.yielded()).held


def test_a_token_that_the_target_has_first_is_the_clients() -> None:
    cell = TwoNodes()
    cell.moving()
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
    cell = TwoNodes()
    cell.moving()
    cell.yielded(3)
    pause = continued(cell.drawn(44))
    assert (pause.instance_id, pause.attempt, pause.held, pause.token_ids) == ("i1", 1, True, ())
    on = continued(cell.drawn(45))
    assert (on.instance_id, on.attempt, on.held) == ("i1", 1, False)
    assert of_kind(cell.yielded(), DeliverTokens)
    assert continued(cell.drawn(46)).held
    level = cell.drawn(47)
    assert not commands(level, AbortRequest), "the client has waited for a while already"
    assert not continued(level).held
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
    cell = TwoNodes()
    cell.moving()
    cell.yielded(LIMITS.migration_behind_max + 2)
    assert only(commands(cell.drawn(44), AbortRequest), AbortRequest).attempt == 2
    assert (cell.state, cell.runs_on) == (None, "i1")
    begun = cell.tell(MigrationDue())
    assert only(commands(begun, SubmitRequest), SubmitRequest).order.attempt == 3


def test_nobody_pauses_for_a_target_that_would_be_late() -> None:
    cell = TwoNodes()
    cell.moving()
    cell.yielded(2)
    cell.now_s = cell.core.cell.requests[RequestId("r1")].due_s
    assert not commands(cell.drawn(44), ContinueRequest)
    assert cell.runs_on == "i1"


def test_a_copy_that_draws_another_token_goes_and_the_next_draws_none_beside_the_source() -> None:
    cell = TwoNodes()
    cell.moving()
    cell.yielded()
    assert only(commands(cell.drawn(44, drew=7), AbortRequest), AbortRequest).attempt == 2
    assert (cell.state, cell.runs_on) == (None, "i1")
    cell.tell(MigrationDue())
    cell.computed(attempt=3)
    over = cell.yielded()
    assert not continued(over).held
    assert only(commands(over, AbortRequest), AbortRequest).attempt == 1
    assert cell.runs_on == "i2"


def test_a_copy_that_is_held_and_draws_goes() -> None:
    cell = TwoNodes()
    cell.drain()
    told = cell.drawn(43)
    assert only(commands(told, AbortRequest), AbortRequest).attempt == 2
    assert not of_kind(told, DeliverTokens)
    assert (cell.state, cell.runs_on) == (None, "i1")


def test_a_source_that_is_paused_goes_on_when_its_target_is_lost() -> None:
    cell = TwoNodes()
    cell.moving()
    cell.yielded(2)
    assert continued(cell.drawn(44)).held
    lost = cell.tell(NodeDisconnected(link_id=cell.target, reason="cut"))
    on = continued(lost)
    assert (on.instance_id, on.attempt, on.held) == ("i1", 1, False)


def test_a_source_that_is_paused_does_not_wait_for_a_target_that_says_nothing() -> None:
    cell = TwoNodes()
    cell.moving()
    cell.yielded(2)
    cell.drawn(44)
    cell.now_s += LIMITS.migration_retry_s
    assert not continued(cell.tell(MigrationDue())).held


def test_where_a_turn_has_several_tokens_of_those_that_move_the_second_waits_for_the_first() -> (
    None
):
    cell = TwoNodes(limits=replace(LIMITS, turn_s_max=0.1), beside=("r2",))
    cell.drain()
    for name in ("r1", "r2"):
        cell.computed(of=name)
    assert not continued(cell.yielded()).held
    assert not commands(cell.yielded(of="r2"), ContinueRequest), "it would wait for r1's prefill"
    cell.yielded(at=cell.target, attempt=2)
    over = continued(cell.yielded(of="r2"))
    assert (over.held, over.token_ids) == (False, (43, 44))


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


def test_an_instance_that_a_policy_has_go_goes_once_what_runs_on_it_has_moved() -> None:
    cell = TwoNodes(policy=Releasing(), beside=("r2",))
    begun = cell.tell(LeaseCheckDue())
    orders = [command.order for command in commands(begun, SubmitRequest)]
    assert [(order.request.request_id, order.held) for order in orders] == [
        ("r1", True),
        ("r2", True),
    ]
    assert cell.core.cell.instances[InstanceId("i1")].state is InstanceState.DRAINING
    cell.computed()
    cell.yielded()
    assert not commands(cell.drawn(44), UnloadInstance), "r2 runs there"
    over = cell.yielded(of="r2", finish=FinishReason.STOP)
    assert only(commands(over, UnloadInstance), UnloadInstance).instance_id == "i1"


def test_it_goes_at_once_where_its_requests_cannot_move_live() -> None:
    cell = TwoNodes(policy=Releasing(), to=replace(TARGET, computes_ahead=False))
    said = cell.tell(LeaseCheckDue())
    assert only(commands(said, UnloadInstance), UnloadInstance).instance_id == "i1"
    assert not only(commands(said, SubmitRequest), SubmitRequest).order.held


def test_of_more_than_may_move_at_a_time_none_begins_to() -> None:
    cell = TwoNodes(policy=Releasing(), beside=("r2",), limits=replace(LIMITS, migrations_max=1))
    orders = [command.order for command in commands(cell.tell(LeaseCheckDue()), SubmitRequest)]
    assert [order.held for order in orders] == [False, False]


@pytest.mark.parametrize(("most", "move"), [(3, True), (2, False)])
def test_what_moves_to_a_node_already_counts_with_all_that_would(most: int, move: bool) -> None:
    """From another node, to an instance of another deployment."""
    limits = replace(LIMITS, migrations_max=most)
    to = node("n2", *TARGET.instances, instance(B2, "b"))
    cell = TwoNodes(policy=Crowding(), to=to, beside=("r2",), limits=limits)
    other, _ = cell.join(node("n3", instance(B1, "b")))
    cell.invoke(request("r3", of="b", prompt=(1,) * 100, max_tokens=100))
    cell.tokens(other, "r3", (40, 41, 42))
    orders = [command.order for command in commands(cell.tell(LeaseCheckDue()), SubmitRequest)]
    held = [order.request.request_id for order in orders if order.held]
    assert held == (["r3", "r1", "r2"] if move else ["r3"])


ONE_PLACE = node("n2", replace(instance("i2", "a"), batch_max=1))
SIXTEEN_BLOCKS = node("n2", replace(instance("i2", "a"), kv_blocks=16), memory_bytes=116 * MIB)
"""Of which a request takes 7."""
QUICK = Slo(ttft_s=0.035, ttft_tokens_per_s=1e6)
"""The time in which a prompt is computed, but not two of them."""


@pytest.mark.parametrize(
    ("to", "slo", "policy"),
    [
        (ONE_PLACE, None, Releasing()),
        (SIXTEEN_BLOCKS, None, Releasing()),
        (TARGET, QUICK, Releasing()),
        (TARGET, QUICK, Demanding()),
    ],
    ids=["places", "memory", "time", "demand"],
)
def test_where_not_all_of_an_instance_have_a_place_none_moves_and_no_move_counts(
    to: NodeHello, slo: Slo | None, policy: Releasing
) -> None:
    """There is what the first of them needs, and not what all need together: where they could move
    at once, they do that.
    """
    alone = TwoNodes(policy=policy, to=to, slo=slo)
    assert only(commands(alone.tell(LeaseCheckDue()), SubmitRequest), SubmitRequest).order.held
    cell = TwoNodes(policy=policy, to=to, slo=slo, beside=("r2", "r3"))
    for _ in range(3):
        orders = [command.order for command in commands(cell.tell(LeaseCheckDue()), SubmitRequest)]
        assert not any(order.held for order in orders)
    assert [request.moves for request in cell.core.cell.requests.values()] == [0, 0, 0]


def test_a_policy_has_a_request_move_no_more_often_than_it_may() -> None:
    cell = TwoNodes(policy=Moving(), limits=replace(LIMITS, moves_max=2))
    for attempt, moves in ((2, 1), (3, 2), (4, 2)):
        cell.tell(LeaseCheckDue())
        refused = RequestReturned(
            request_id=RequestId("r1"), attempt=attempt, error="EngineError", message="no"
        )
        cell.report(cell.target, refused)
        assert cell.core.cell.requests[RequestId("r1")].moves == moves
