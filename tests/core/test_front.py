"""The core of a front: which cell a request gets, and what becomes of it when that is lost."""

from collections import Counter
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from mesh.core.front import (
    CELL_CALLS_MAX,
    TAKEOVER_S_MAX,
    UNTAKEN_MAX,
    FrontCore,
    ranked,
)
from mesh.domain.actions import DeliverTokens, RefuseRequest, TellAccepted
from mesh.domain.events import CancelRequested, InvokeRequested, ShutdownRequested
from mesh.domain.front import (
    AskCell,
    CellEnded,
    CellLook,
    CellSeen,
    CellSilent,
    CellTold,
    DeploymentLook,
    DropCall,
    FailRequest,
    FrontAction,
    FrontEvent,
)
from mesh.domain.ids import CellName, DeploymentName, ModelId, RequestId
from mesh.domain.invocation import Accepted, Finished, InvocationEvent, Tokens
from mesh.domain.limits import AWAY_S_MAX, BREAKS_MAX, NODES_S_MAX, RESUME_S_MAX
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.request import Request, Resumed

T = TypeVar("T")
CHAT, MODEL = DeploymentName("chat"), ModelId("sha256-1")
CELLS = [CellName("a"), CellName("b"), CellName("c")]
FIRST, SECOND, THIRD = ranked(CHAT, CELLS)


def serving(room: int = 0, *, requests: int = 0, model: str = MODEL, nodes: int = 1) -> CellLook:
    look = DeploymentLook(name=CHAT, model_id=ModelId(model), room=room)
    return CellLook(deployments=(look,), nodes=nodes, requests=requests)


NOTHING = CellLook(deployments=(), nodes=1, requests=0)


class Front:
    """A core with its time, and what it did last."""

    def __init__(self, **looks: CellLook) -> None:
        self.core = FrontCore(CELLS)
        self.now_s = 100.0
        self.done: list[FrontAction] = []
        self.number = 0
        for name, look in looks.items():
            self.seen(CellName(name), look)
        self.now_s += NODES_S_MAX + 1.0
        for name in looks:
            self.seen(CellName(name))

    def tell(self, event: FrontEvent) -> list[FrontAction]:
        self.done = self.core.handle(event, self.now_s)
        return self.done

    def seen(self, cell: CellName, look: CellLook | None = None, leader: str = "1") -> None:
        self.tell(CellSeen(cell=cell, leader=f"{cell}:{leader}", look=look))

    def only(self, kind: type[T]) -> T:
        (one,) = [action for action in self.done if isinstance(action, kind)]
        return one

    def ask(self, resumed: Resumed | None = None, **changes: Any) -> RequestId:
        self.number += 1
        request = Request(
            request_id=RequestId(f"r-{self.number}"), deployment=CHAT, prompt_tokens=(1, 2)
        )
        self.tell(InvokeRequested(request=replace(request, **changes), resumed=resumed))
        return request.request_id

    def told(self, asked: AskCell, told: InvocationEvent) -> list[FrontAction]:
        of = asked.request_id, asked.attempt
        return self.tell(CellTold(request_id=of[0], attempt=of[1], told=told))

    def accepted(self, asked: AskCell) -> None:
        accepted = Accepted(
            request_id=asked.request_id, prompt_tokens=2, ttft_limit_s=1.0, tpot_limit_s=1.0
        )
        self.told(asked, accepted)

    def placed(self) -> AskCell:
        """A further call, which its cell has accepted."""
        self.ask()
        asked = self.only(AskCell)
        self.accepted(asked)
        return asked

    def tokens(self, asked: AskCell, first: int, *token_ids: int) -> list[FrontAction]:
        return self.told(asked, Tokens(first_index=first, token_ids=token_ids, text="x"))

    def ended(self, asked: AskCell, **how: Any) -> list[FrontAction]:
        ended = CellEnded(
            request_id=asked.request_id,
            attempt=asked.attempt,
            **{"error": "Unavailable", "message": "it went", **how},
        )
        return self.tell(ended)

    def refused(self, asked: AskCell, reason: RefusalReason, again_s: float = 0.0) -> None:
        self.ended(asked, error="Refused", reason=reason, retry_after_s=again_s)


def test_the_first_home_cell_with_room_in_a_loaded_instance_is_asked() -> None:
    front = Front(**{FIRST: serving(0), SECOND: serving(2, requests=90), THIRD: serving(5)})
    for _ in range(2):
        front.ask()
        assert front.only(AskCell).cell == SECOND
    front.ask()
    assert front.only(AskCell).cell == THIRD, "what was asked since the look counts"
    front.seen(FIRST, serving(1))
    front.ask()
    assert front.only(AskCell).cell == FIRST


def test_without_room_it_is_the_less_busy_of_two() -> None:
    front = Front(**{FIRST: serving(requests=4), SECOND: serving(requests=6, nodes=3)})
    for cell in (SECOND, SECOND, SECOND, SECOND, SECOND, SECOND, FIRST):
        front.ask()
        assert front.only(AskCell).cell == cell


def test_of_three_without_room_each_pair_is_drawn_and_each_front_draws_the_same() -> None:
    looks = {FIRST: serving(requests=9), SECOND: serving(requests=9), THIRD: serving()}
    drawn = []
    for _ in range(2):
        front, got = Front(**looks), []
        for _ in range(60):
            for cell, look in looks.items():
                front.seen(cell, look)
            front.ask()
            got.append(front.only(AskCell).cell)
        drawn.append(got)
    assert drawn[0] == drawn[1]
    assert Counter(drawn[0])[THIRD] == pytest.approx(40, abs=12), "it is in two of three pairs"


def test_a_cell_without_nodes_is_asked_last() -> None:
    front = Front(**{FIRST: serving(nodes=0), SECOND: serving(requests=50)})
    front.ask()
    assert front.only(AskCell).cell == SECOND


def test_what_one_cell_refuses_the_next_is_asked_and_the_soonest_retry_is_told() -> None:
    front = Front(**dict.fromkeys(CELLS, serving()))
    front.ask()
    cells = []
    for again_s in (9.0, 3.0, 6.0):
        asked = front.only(AskCell)
        cells.append(asked.cell)
        front.refused(asked, RefusalReason.QUEUE_FULL, again_s)
    assert sorted(cells) == CELLS
    refusal = front.only(RefuseRequest)
    assert (refusal.reason, refusal.retry_after_s) == (RefusalReason.QUEUE_FULL, 3.0)


@pytest.mark.parametrize("reason", [RefusalReason.TENANT_LIMIT, RefusalReason.PROMPT_TOO_LONG])
def test_what_no_cell_would_serve_is_refused_at_once(reason: RefusalReason) -> None:
    front = Front(**dict.fromkeys(CELLS, serving()))
    front.ask()
    front.refused(front.only(AskCell), reason)
    assert front.only(RefuseRequest).reason is reason


def test_an_error_of_the_call_is_its_clients() -> None:
    front = Front(**dict.fromkeys(CELLS, serving()))
    front.ask()
    front.ended(front.only(AskCell), error="InvalidInput", message="no such token")
    assert front.only(FailRequest).message == "no such token"
    assert not front.core.asked_before(RequestId("r-1"))


def test_a_lost_stream_goes_on_under_its_cells_next_leader() -> None:
    front = Front(**{FIRST: serving(1), SECOND: serving()})
    asked = front.placed()
    front.tokens(asked, 0, 7, 8)
    front.now_s += 1.0
    assert front.ended(asked, lost=True) == []
    front.now_s += 0.5
    front.seen(SECOND)
    assert front.done == [], "its cell may come again"
    front.seen(FIRST, leader="2")
    again = front.only(AskCell)
    assert (again.cell, again.resumes, again.vouched) == (FIRST, True, True)
    assert (again.output_tokens, again.age_s) == ((7, 8), 1.5)
    assert front.tokens(asked, 2, 9) == [], "of an attempt that nobody listens to"
    front.accepted(again)
    assert front.done == [], "its client knows"
    front.tokens(again, 2, 9)
    assert front.only(DeliverTokens).outputs.first_index == 2


def test_a_lost_stream_goes_on_in_another_cell_after_a_while() -> None:
    front = Front(**{FIRST: serving(1), SECOND: serving()})
    asked = front.placed()
    front.tokens(asked, 0, 7)
    front.ended(asked, lost=True)
    front.now_s += TAKEOVER_S_MAX + 0.1
    front.tell(CellSilent(cell=FIRST))
    again = front.only(AskCell)
    assert (again.cell, again.output_tokens) == (SECOND, (7,))


def test_a_silent_cells_streams_are_given_up_and_go_on_elsewhere() -> None:
    front = Front(**{FIRST: serving(1), SECOND: serving()})
    asked = front.placed()
    front.tokens(asked, 0, 7)
    front.now_s += TAKEOVER_S_MAX / 2
    assert front.tell(CellSilent(cell=FIRST)) == []
    front.now_s += TAKEOVER_S_MAX
    front.tell(CellSilent(cell=FIRST))
    assert front.only(DropCall).attempt == asked.attempt
    assert front.only(AskCell).cell == SECOND


def test_what_streams_tell_and_a_leader_that_drains_are_signs_of_life() -> None:
    front = Front(**{FIRST: serving(1), SECOND: serving()})
    asked = front.placed()
    for n in range(4):
        front.now_s += TAKEOVER_S_MAX * 0.9
        front.tokens(asked, n, 7)
        assert front.tell(CellSilent(cell=FIRST)) == [], "health is slow, and tokens come"
    for _ in range(4):
        front.now_s += TAKEOVER_S_MAX
        assert front.tell(CellSilent(cell=FIRST, drains=True)) == []
    front.ask()
    assert front.only(AskCell).cell == SECOND, "a new one goes elsewhere"
    front.now_s += TAKEOVER_S_MAX + 0.1
    front.tell(CellSilent(cell=FIRST))
    assert front.only(DropCall).attempt == asked.attempt


def test_no_call_has_the_attempt_of_an_earlier_one_with_its_key() -> None:
    front = Front(**{FIRST: serving(2)})
    key = RequestId("k-1")
    front.ask(request_id=key)
    before = front.only(AskCell)
    front.tell(CancelRequested(request_id=key))
    front.ask(request_id=key)
    after = front.only(AskCell)
    assert after.attempt != before.attempt
    assert front.tokens(before, 0, 7) == []
    assert front.tell(CancelRequested(request_id=key)) == [
        DropCall(request_id=key, attempt=after.attempt)
    ]


def test_a_late_look_makes_no_earlier_leader_the_present_one() -> None:
    front = Front(**{FIRST: serving(1)})
    front.ask()
    front.seen(FIRST, leader="2")
    asked = front.only(AskCell)
    front.accepted(asked)
    front.seen(FIRST, NOTHING)
    assert front.done == []
    assert front.core.model(CHAT) == (FIRST, MODEL)


def test_one_that_waited_in_a_queue_as_long_as_it_may_waits_in_no_other() -> None:
    front = Front(**{FIRST: serving(1), SECOND: serving(1)})
    front.ask()
    front.refused(front.only(AskCell), RefusalReason.QUEUE_TIMEOUT)
    assert front.only(RefuseRequest).reason is RefusalReason.QUEUE_TIMEOUT


def test_each_loss_of_one_that_was_accepted_again_waits_anew() -> None:
    front = Front(**{FIRST: serving(1)})
    front.ask()
    for _ in range(2):
        asked = front.only(AskCell)
        front.accepted(asked)
        front.now_s += RESUME_S_MAX - 1.0
        front.seen(FIRST)
        assert front.ended(asked, lost=True) == []
        front.seen(FIRST)


def test_a_call_that_a_leader_turns_away_again_and_again_ends() -> None:
    front = Front(**{FIRST: serving(1)})
    front.ask()
    for number in range(UNTAKEN_MAX + 1):
        front.ended(front.only(AskCell), error="StandsBy", message="stands by")
        assert bool(front.done) is (number == UNTAKEN_MAX)
        if number < UNTAKEN_MAX:
            front.seen(FIRST)
    assert front.only(FailRequest).error == "StandsBy"


def test_where_no_cell_has_the_model_of_a_lost_answer_any_more_that_is_the_reason() -> None:
    front = Front(**{FIRST: serving(1)})
    asked = front.placed()
    front.ended(asked, lost=True)
    front.seen(FIRST, serving(1, model="sha256-2"))
    assert "another model" in front.only(FailRequest).message


def test_a_cell_has_no_more_calls_than_a_connection_takes() -> None:
    front = Front(**{FIRST: serving(), SECOND: serving(requests=99_999)})
    asked = Counter[CellName]()
    for _ in range(2 * CELL_CALLS_MAX):
        last = front.ask()
        asked[front.only(AskCell).cell] += 1
    assert asked == {FIRST: CELL_CALLS_MAX, SECOND: CELL_CALLS_MAX}
    front.ask()
    assert front.only(RefuseRequest).reason is RefusalReason.QUEUE_FULL
    front.tell(CancelRequested(request_id=last))
    front.ask()
    assert front.only(AskCell)


def test_streams_of_a_leader_that_was_followed_are_asked_for_again() -> None:
    front = Front(**{FIRST: serving(1)})
    asked = front.placed()
    front.seen(FIRST, leader="2")
    assert front.only(DropCall).attempt == asked.attempt
    assert front.only(AskCell).resumes


def test_a_call_that_nobody_took_goes_to_the_next_cell_as_a_new_one() -> None:
    front = Front(**{FIRST: serving(1), SECOND: serving()})
    front.ask()
    front.ended(front.only(AskCell), lost=True, taken=False)
    asked = front.only(AskCell)
    assert (asked.cell, asked.resumes, asked.vouched) == (SECOND, False, False)


def test_with_one_cell_which_is_away_it_waits_a_while_and_is_refused_with_the_reason() -> None:
    front = Front(**{FIRST: serving(1)})
    front.tell(CellSilent(cell=FIRST))
    front.ask()
    assert front.done == []
    front.now_s += AWAY_S_MAX + 0.1
    front.tell(CellSilent(cell=FIRST))
    refusal = front.only(RefuseRequest)
    assert refusal.reason is RefusalReason.CELL_AWAY
    assert refusal.retry_after_s > 0
    assert FIRST in refusal.message
    assert front.core.away(CHAT, front.now_s) is not None
    front.ask()
    assert front.only(RefuseRequest).reason is RefusalReason.CELL_AWAY, "at once by now"
    front.seen(FIRST)
    assert front.core.away(CHAT, front.now_s) is None


def test_one_that_was_accepted_waits_longer_and_not_for_ever() -> None:
    front = Front(**{FIRST: serving(1)})
    asked = front.placed()
    front.ended(asked, lost=True)
    front.now_s += RESUME_S_MAX - 1.0
    assert front.tell(CellSilent(cell=FIRST)) == []
    front.now_s += 1.1
    front.tell(CellSilent(cell=FIRST))
    assert front.only(RefuseRequest).reason is RefusalReason.CELL_AWAY


def test_a_leader_that_has_just_begun_may_have_no_nodes_yet() -> None:
    front = Front(**{FIRST: serving(1)})
    front.seen(FIRST, leader="2")
    front.ask()
    front.refused(front.only(AskCell), RefusalReason.NO_NODE)
    assert front.done == []
    front.seen(FIRST, leader="2")
    front.refused(front.only(AskCell), RefusalReason.NO_NODE)
    front.now_s += NODES_S_MAX + 0.1
    front.seen(FIRST, leader="2")
    assert front.only(RefuseRequest).reason is RefusalReason.NO_NODE


def test_streams_that_break_again_and_again_are_given_up() -> None:
    front = Front(**{FIRST: serving(1)})
    front.ask()
    for number in range(BREAKS_MAX + 1):
        asked = front.only(AskCell)
        front.accepted(asked)
        front.ended(asked, lost=True)
        assert bool(front.done) is (number == BREAKS_MAX)
        if number < BREAKS_MAX:
            front.seen(FIRST)
    assert front.only(FailRequest).error == "Unavailable"


def test_a_cell_with_another_model_is_not_asked() -> None:
    """A revision takes over in one cell before the other: tokens are of one model."""
    front = Front(**{FIRST: serving(0), SECOND: serving(9, model="sha256-2")})
    assert front.core.model(CHAT) == (FIRST, MODEL)
    front.ask()
    assert front.only(AskCell).cell == FIRST


def test_several_answers_to_one_prompt_are_computed_in_one_cell() -> None:
    front = Front(**{FIRST: serving(1), SECOND: serving(9)})
    first = front.ask(answers=2)
    assert front.only(AskCell).cell == FIRST
    front.ask(first=first)
    assert front.only(AskCell).cell == FIRST


def test_a_client_that_comes_from_another_front_is_asked_for_as_it_says() -> None:
    front = Front(**{FIRST: serving(1)})
    front.ask(Resumed(output_tokens=(5, 6), age_s=3.0))
    asked = front.only(AskCell)
    assert (asked.resumes, asked.output_tokens, asked.age_s) == (True, (5, 6), 3.0)
    assert not asked.vouched, "this front has not seen that a cell accepted it"
    front.accepted(asked)
    front.tokens(asked, 2, 7)
    assert front.only(DeliverTokens).outputs.first_index == 2


def test_tokens_that_do_not_go_on_end_the_answer() -> None:
    front = Front(**{FIRST: serving(1)})
    asked = front.placed()
    front.tokens(asked, 1, 7)
    assert front.only(RefuseRequest).reason is RefusalReason.ENGINE_FAILED


def test_an_answer_ends_once_and_names_its_node() -> None:
    front = Front(**{FIRST: serving(1)})
    request_id = front.ask()
    asked = front.only(AskCell)
    front.accepted(asked)
    assert front.only(TellAccepted).request_id == request_id
    front.tokens(asked, 0, 7)
    assert front.core.load() == (1, 0)
    finished = Finished(
        reason=FinishReason.LENGTH,
        prompt_tokens=2,
        output_tokens=1,
        ttft_s=0.1,
        tpot_s=0.0,
        node_id="n1",  # type: ignore[arg-type]
    )
    front.told(asked, finished)
    last = front.only(DeliverTokens)
    assert (last.outputs.finish, last.node_id) == (FinishReason.LENGTH, f"{FIRST}/n1")
    assert front.told(asked, finished) == []
    assert front.core.load() == (0, 0)


def test_who_goes_and_a_front_that_stops_end_the_calls() -> None:
    front = Front(**{FIRST: serving(2)})
    gone, left = front.ask(), front.ask()
    assert front.tell(CancelRequested(request_id=gone)) == [DropCall(request_id=gone, attempt=1)]
    front.tell(ShutdownRequested())
    assert front.only(DropCall).request_id == left
    assert front.only(RefuseRequest).reason is RefusalReason.SHUTTING_DOWN


def test_home_cells_stay_where_another_cell_comes() -> None:
    cells = [CellName(f"cell-{n}") for n in range(8)]
    names = [DeploymentName(f"d-{n}") for n in range(400)]
    before = {name: ranked(name, cells)[0] for name in names}
    after = {name: ranked(name, [*cells, CellName("new")])[0] for name in names}
    moved = [name for name in names if before[name] != after[name]]
    assert {after[name] for name in moved} == {"new"}
    assert len(moved) == pytest.approx(400 / 9, rel=0.5)
    assert min(Counter(before.values()).values()) > 25
