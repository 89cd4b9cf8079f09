"""Plans of the controller core: for an operator, and again and again by `scaling.plan`."""

from dataclasses import replace

import pytest

from mesh.core.controller.state.deployment import PLANS_KEPT
from mesh.domain.actions import ControllerAction, WantInstances
from mesh.domain.deployment import Deployment, PlanRule
from mesh.domain.errors import InvalidInput, Unavailable
from mesh.domain.events import KeepAliveExpired, LeaseCheckDue, UnloadRequested
from mesh.domain.ids import ModelId, OperationId
from mesh.domain.limits import CellLimits
from mesh.domain.messages import LoadInstance, UnloadInstance
from mesh.domain.model import Task
from mesh.domain.operators import Role
from mesh.domain.profile import Grid, OperatorTimes
from mesh.domain.reasons import FinishReason
from mesh.domain.slo import Slo
from mesh.domain.views import Arrivals
from tests.core.cells import (
    CHAT,
    MIB,
    CellUnderTest,
    commands,
    deployment,
    hello,
    of_kind,
    only,
    request,
)
from tests.support.profiles import MODEL, profile

SLOW = profile(
    prefill=Grid(rows=(1, 256), columns=(0, 256), seconds=((0.1, 0.11), (0.4, 0.5))),
    decode=Grid(rows=(1, 32), columns=(32, 512), seconds=((0.05, 0.06), (0.2, 0.25))),
)
CALLS = Arrivals(rate_per_s=0.5, prompts=(64,), answer_tokens=64.0)
SLO = Slo(ttft_s=60.0, tpot_s=1.0)
PLAN = PlanRule(every_s=10.0)
LIMITS = CellLimits(delivery_s_max=0.02, node_lease_s=3600.0)


def cell_of(*made: Deployment, nodes: int = 3, limits: CellLimits = LIMITS) -> CellUnderTest:
    cell = CellUnderTest(*made, profiles=[SLOW], limits=limits)
    for n in range(nodes):
        cell.join(hello(f"n{n + 1}", memory_bytes=200 * MIB))
    return cell


def seconds(cell: CellUnderTest, count: int, calls: int = 0) -> list[ControllerAction]:
    """So many pass, with so many calls in each."""
    said: list[ControllerAction] = []
    for _ in range(count):
        cell.now_s += 1.0
        for n in range(calls):
            said += cell.invoke(request(f"r-{cell.now_s:.0f}-{n}", prompt=(1,) * 64))
        said += cell.tell(LeaseCheckDue())
    return said


def test_a_plan_names_nodes_with_an_instance_first_and_changes_nothing() -> None:
    cell = cell_of(deployment(slo=SLO))
    link, _ = cell.join(hello("n9", memory_bytes=200 * MIB))
    cell.bring_up(link)
    at = next(iter(cell.core.cell.instances.values())).node.node_id
    made = cell.core.plan(CHAT, replace(CALLS, rate_per_s=3.0), cell.now_s)
    assert made.replicas == len(made.nodes) > 1
    assert made.nodes[0] == at
    assert made.revision == 1
    assert len(cell.core.cell.instances) == 1


def test_without_calls_given_it_is_for_those_that_have_come() -> None:
    cell = cell_of(deployment(slo=SLO))
    with pytest.raises(InvalidInput, match="no call within 300 s"):
        cell.core.plan(CHAT, None, cell.now_s)
    seconds(cell, 30, calls=2)
    made = cell.core.plan(CHAT, None, cell.now_s)
    assert made.calls.rate_per_s == pytest.approx(60 / 300)
    assert set(made.calls.prompts) == {64}


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(Unavailable, match="'chat' is not deployed yet"):
        CellUnderTest().core.plan(CHAT, CALLS, 0.0)
    cell = CellUnderTest(deployment(), profiles=[SLOW])
    with pytest.raises(Unavailable, match="no cpu node is up"):
        cell.core.plan(CHAT, CALLS, cell.now_s)
    cell.join(hello(memory_bytes=64 * MIB))
    with pytest.raises(InvalidInput, match=r"takes 101 MiB; the largest of 1 nodes has 64\.0 MiB"):
        cell.core.plan(CHAT, CALLS, cell.now_s)
    cell = cell_of(replace(deployment(), spec=replace(deployment().spec, task=Task.EMBED)))
    with pytest.raises(InvalidInput, match="has task embed: plans are for text"):
        cell.core.plan(CHAT, CALLS, cell.now_s)


def test_where_operators_were_counted_of_another_model_no_profile_is_needed() -> None:
    theirs = replace(SLOW, model_id=ModelId("another"), widths=MODEL.widths)
    down = OperatorTimes(name=Role.DOWN, prefill=SLOW.prefill, decode=SLOW.decode)
    cell = CellUnderTest(deployment(), profiles=[replace(theirs, operators=(down,))])
    cell.join()
    made = cell.core.plan(CHAT, CALLS, cell.now_s)
    assert made.tpot_s > SLOW.decode.seconds[0][0]
    assert made.error is None, "it has not computed yet"


def test_instances_that_the_calls_need_are_loaded_before_the_queue_asks_for_them() -> None:
    reactive, planned = (cell_of(deployment(slo=SLO, plan=rule)) for rule in (None, PLAN))
    loads = [commands(seconds(cell, 12, calls=2), LoadInstance) for cell in (reactive, planned)]
    assert [len(each) for each in loads] == [1, 3]
    said = planned.core.snapshot(planned.now_s).deployments[0].planned
    assert said is not None
    assert said.wanted == 3
    assert "calls a second with 64 tokens each" in said.why


def test_the_number_changes_once_a_period_at_most() -> None:
    cell = cell_of(deployment(slo=SLO, plan=PLAN))
    changes = [of_kind(seconds(cell, 10, calls=n % 3), WantInstances) for n in range(8)]
    assert all(len(each) <= 1 for each in changes)
    assert any(changes)


def test_a_plan_takes_no_memory_that_others_have() -> None:
    cell = cell_of(deployment(slo=SLO, plan=PLAN), deployment("other", slo=SLO), nodes=2)
    # Both nodes have room for one instance.
    for name, of in (("a", "chat"), ("b", "other")):
        load = only(commands(cell.invoke(request(name, of=of)), LoadInstance), LoadInstance)
        at = cell.core.cell.instances[load.instance_id].node.link_id
        cell.loaded(at, load.instance_id)
        cell.tokens(at, name, (5,), finish=FinishReason.STOP)
    said = seconds(cell, 12, calls=2)
    assert of_kind(said, WantInstances)[-1].wanted == 2
    assert not commands(said, UnloadInstance)
    assert not commands(said, LoadInstance)


def test_what_a_plan_wants_is_not_unloaded_for_idling_until_calls_have_ceased() -> None:
    never_parks = replace(LIMITS, parked_s_max=0.0)
    cell = cell_of(deployment(slo=SLO, plan=PLAN), nodes=1, limits=never_parks)
    load = cell.bring_up(1, request("r1", prompt=(1,) * 64))
    seconds(cell, 11)
    cell.tokens(1, "r1", (5,), finish=FinishReason.STOP)
    assert not commands(_expire(cell, load), UnloadInstance)
    seconds(cell, 10 * PLANS_KEPT + 1)
    assert commands(_expire(cell, load), UnloadInstance)


def _expire(cell: CellUnderTest, load: LoadInstance) -> list[ControllerAction]:
    idle_since_s = cell.core.cell.instances[load.instance_id].idle_since_s
    assert idle_since_s is not None
    return cell.tell(KeepAliveExpired(instance_id=load.instance_id, idle_since_s=idle_since_s))


def test_an_operator_who_unloads_is_not_overruled() -> None:
    cell = cell_of(deployment(slo=SLO, plan=PLAN))
    seconds(cell, 12, calls=2)
    cell.tell(UnloadRequested(operation_id=OperationId("u"), name=CHAT))
    assert not commands(seconds(cell, 30), LoadInstance)
