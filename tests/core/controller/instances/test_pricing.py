"""The price of a plan, each part worked out once; and who may overtake whom."""

from dataclasses import dataclass, replace

import pytest

from mesh.core.controller.instances.kv_cache import Room
from mesh.core.controller.instances.pricing import Price, must_give_way
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.actions import RefuseRequest
from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.limits import CellLimits
from mesh.domain.messages import LoadInstance
from mesh.domain.reasons import FinishReason, RefusalReason, Verdict
from mesh.domain.slo import Slo
from mesh.policy import interface
from mesh.policy.guarded import Guarded
from mesh.policy.llm_mesh import LLM_MESH, LlmMesh
from mesh.policy.plans import Join, Plan, Start
from mesh.policy.registry import policy
from tests.core.admission import SLOW, BusyCell, instance, node, submitted
from tests.core.cells import commands, deployment, of_kind, request

A, B = DeploymentName("a"), InstanceId("b")


@dataclass(frozen=True, kw_only=True)
class Twice(LlmMesh):
    """It asks for each number again."""

    def passes(self, plan: Plan, tests: interface.Tests) -> Verdict:
        assert tests.shadow(plan) is tests.shadow(plan)
        with pytest.raises(ValueError, match="of no other"):
            tests.shadow(Start(node=plan.instance.node) if isinstance(plan, Join) else plan)
        return tests.shadow(plan)


def priced(cell: BusyCell, rule: LlmMesh, *, starts: bool = False) -> Price:
    """A request of `a` that has just come, on its instance or on one that starts beside it in the
    place of `b`.
    """
    known = cell.core.cell
    instance, limits = known.instances[InstanceId("a")], CellLimits()
    asked = RequestEntry(original=request("r", of="a"), slo=Slo(), arrival_s=cell.now_s)
    ctx = EventContext(
        cell=known,
        epoch=1,
        limits=limits,
        policy=Guarded(rule, limits),
        now_s=cell.now_s,
        validations_left=9,
    )
    plan = Start(node=instance.node) if starts else Join(request=asked, instance=instance)
    at, room = (None, Room(kv_blocks=1, unloads=(B,))) if starts else (instance, None)
    return Price(ctx, plan, known.deployments[A], instance.node, at, asked, room)


def test_a_price_is_validated_once_and_says_nothing_of_other_plans() -> None:
    price = priced(BusyCell(), Twice())
    assert price.verdict() is Verdict.PASSES
    assert price.ctx.validations_left == 8
    assert price.ctx.policy.take_faults() == []
    assert price.validated
    assert price.ready_s < price.first_token_s < price.wanted_by.due_s


def test_a_load_is_needed_when_its_request_can_bear_it_and_no_later() -> None:
    price = priced(BusyCell(profiles=(SLOW,)), LLM_MESH, starts=True)
    assert price.needed_s() == price.wanted_by.due_s, "nothing has been forecast"
    assert price.verdict() is Verdict.PASSES
    assert price.ready_s < price.needed_s() < price.wanted_by.due_s, "its prompt takes a while"
    price.request = None
    assert price.needed_s() == price.ready_s


def test_room_in_the_place_of_an_idle_instance_is_gone_once_that_serves() -> None:
    cell = BusyCell()
    price = priced(cell, LLM_MESH, starts=True)
    assert price.room_now() is price.room
    cell.ask("r1", "b")
    assert price.room_now() is None


BOUND = CellLimits().overtaken_max
TTFT = Slo(ttft_s=2.48, ttft_tokens_per_s=1e6, tpot_s=0.25)
LONG = 256
"""Tokens of a prompt of 1.13 s, as planned: two of them do not fit into 2.48 s, but may, for they
are planned to take a tenth longer than they are expected to.
"""


def busy_cell() -> BusyCell:
    """`a` has a long prompt under way; `rare` has been asked for another, and waits."""
    names = ("a", "b", "rare")
    cell = BusyCell(*(deployment(name, slo=TTFT) for name in names))
    assert submitted(cell.ask("running", "a", LONG)) == [("running", "a")]
    cell.now_s += 0.001
    assert submitted(cell.ask("waiting", "rare", LONG)) == []
    return cell


def ask_for_short_ones(cell: BusyCell, of: str, count: int) -> list[bool]:
    """Which of them got a place."""
    placed = []
    for n in range(count):
        cell.now_s += 0.001
        placed.append(submitted(cell.ask(f"{of}-{n}", of)) != [])
    return placed


def overtaken(cell: BusyCell, name: str = "waiting") -> int:
    return cell.core.cell.requests[RequestId(name)].overtaken


def test_a_request_is_overtaken_by_so_many_of_another_deployment_and_no_more() -> None:
    cell = busy_cell()
    assert ask_for_short_ones(cell, "a", BOUND + 3) == [True] * BOUND + [False] * 3
    assert overtaken(cell) == BOUND


def test_a_request_is_overtaken_by_so_many_of_its_own_deployment_and_no_more() -> None:
    cell = BusyCell(deployment("a", slo=replace(TTFT, ttft_s=2.58)))
    cell.ask("running", "a", LONG)
    cell.now_s += 0.001
    assert submitted(cell.ask("waiting", "a", LONG)) == []
    assert ask_for_short_ones(cell, "a", BOUND + 3) == [True] * BOUND + [False] * 3


def test_the_rare_request_gets_in_before_those_that_wait_behind_it() -> None:
    cell = busy_cell()
    ask_for_short_ones(cell, "a", BOUND + 1)
    cell.now_s = 100.2
    assert submitted(cell.retry()) == [], "a place for this one would be a place for that"
    # The long prompt turns out to have been quicker than predicted.
    ended = cell.tokens(cell.link, "running", [7], finish=FinishReason.STOP)
    assert submitted(ended) == [("waiting", "rare"), (f"a-{BOUND}", "a")]


def test_when_it_is_refused_the_others_go_on() -> None:
    cell = busy_cell()
    ask_for_short_ones(cell, "a", BOUND + 1)
    cell.now_s = 101.0
    tried = cell.retry()
    refused = [(r.request_id, r.reason) for r in of_kind(tried, RefuseRequest)]
    assert refused == [("waiting", RefusalReason.FIRST_TOKEN_LATE)]
    assert submitted(tried) + submitted(cell.retry()) == [(f"a-{BOUND}", "a")]


def test_a_request_that_has_to_give_way_is_told_what_for() -> None:
    cell = busy_cell()
    ask_for_short_ones(cell, "a", BOUND + 1)
    held = cell.core.cell.requests[RequestId(f"a-{BOUND}")]
    assert held.refusals.verdict == RefusalReason.DELAYS_RUNNING.value


def test_nobody_is_before_one_that_waited_for_a_load_which_is_over() -> None:
    """Its estimate is validated again, and has no time for it now; that it is late changes nothing:
    it was taken all the same.
    """
    cell = busy_cell()
    rare = cell.core.cell.instances[InstanceId("rare")]
    rare.profile = replace(SLOW, scaled_from="other", measured_s=0.0)
    waiting = cell.core.cell.requests[RequestId("waiting")]
    rare.expect(waiting, blocks=0)
    waiting.accepted = True
    assert ask_for_short_ones(cell, "a", 1) == [False]
    cell.now_s += 3.0
    waiting.refusals.note(Verdict.TPOT_EXCEEDED)
    ctx = EventContext(
        cell=cell.core.cell,
        epoch=1,
        limits=CellLimits(),
        policy=Guarded(policy("llm-mesh"), CellLimits()),
        now_s=cell.now_s,
        validations_left=1,
    )
    later = RequestEntry(original=request("later", of="a"), slo=TTFT, arrival_s=cell.now_s)
    assert not must_give_way(ctx, rare.node, later), "nobody's going would leave it time"
    waiting.refusals.note(Verdict.DELAYS_RUNNING)
    assert must_give_way(ctx, rare.node, later)


def test_on_a_node_that_it_does_not_want_nobody_gives_way() -> None:
    cell = busy_cell()
    assert ask_for_short_ones(cell, "a", BOUND + 1)[-1] is False
    _, joined = cell.join(node("n2", instance("a2", "a")))
    assert submitted(joined) == [(f"a-{BOUND}", "a2")]


def test_a_request_that_waits_for_a_load_is_not_overtaken_meanwhile() -> None:
    """It was turned down by another node; here it waits for the load, not for headroom."""
    cell = BusyCell(*(deployment(name, slo=TTFT) for name in ("a", "rare")))
    link, _ = cell.join(node("n2", instance("a2", "a")))
    cell.ask("running", "a", LONG)
    cell.now_s += 0.001
    asked = cell.ask("waiting", "rare", LONG)
    (load,) = commands(asked, LoadInstance)
    assert cell.core.cell.instances[load.instance_id].node.link_id == link
    placed = []
    for n in range(BOUND + 2):
        cell.now_s += 0.001
        placed += submitted(cell.ask(f"a-{n}", "a", 100))
    assert {on for _, on in placed} == {"a", "a2"}
    assert overtaken(cell) == 0


def test_a_later_request_as_long_as_one_that_would_be_late_may_be_in_time() -> None:
    """It is due later: the running one ends at 1.13 s, this one at 2.25 s, and may until 3 s."""
    cell = BusyCell(deployment("a", slo=TTFT))
    cell.ask("running", "a", LONG)
    cell.now_s += 0.001
    assert submitted(cell.ask("waiting", "a", LONG)) == []
    cell.now_s = 100.6
    assert submitted(cell.ask("later", "a", LONG)) == [("later", "a")]


def test_what_becomes_of_another_node_does_not_make_it_forgotten() -> None:
    """`rare` has a second instance, which is full; there, too, it looks when a request ends."""
    cell = busy_cell()
    full = replace(instance("rare2", "rare"), batch_max=0)
    link, _ = cell.join(node("n2", full, instance("b2", "b")))
    ask_for_short_ones(cell, "a", BOUND)
    cell.now_s += 0.001
    assert submitted(cell.ask("elsewhere", "b")) == [("elsewhere", "b2")]
    cell.tokens(link, "elsewhere", [7], finish=FinishReason.STOP)
    assert overtaken(cell) == BOUND
    cell.now_s += 0.001
    assert submitted(cell.ask("one-more", "a")) == []
