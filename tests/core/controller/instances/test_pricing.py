"""The price of a plan: each part is worked out once, and room that has gone is there no more."""

from dataclasses import dataclass

import pytest

from mesh.core.controller.instances.kv_cache import Room
from mesh.core.controller.instances.pricing import Price
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.ids import DeploymentName, InstanceId
from mesh.domain.limits import CellLimits
from mesh.domain.reasons import Verdict
from mesh.domain.slo import Slo
from mesh.policy import interface
from mesh.policy.guarded import Guarded
from mesh.policy.llm_mesh import LLM_MESH, LlmMesh
from mesh.policy.plans import Join, Plan, Start
from tests.core.admission import SLOW, BusyCell
from tests.core.cells import request

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
    at, room = (None, Room(kv_blocks=1, reclaim=(B,))) if starts else (instance, None)
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
