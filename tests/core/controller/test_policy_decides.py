"""What only a policy decides: the order of joins and starts, reasons of its own, who waits and who
may be late, labels, loads that nobody asked for, and whose KV cache goes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import pytest

from mesh.domain.actions import ControllerAction, RefuseRequest, TellAccepted
from mesh.domain.events import LeaseCheckDue
from mesh.domain.ids import DeploymentName
from mesh.domain.limits import CellLimits
from mesh.domain.messages import InstanceReport, LoadInstance, SubmitRequest
from mesh.domain.reasons import FinishReason, RefusalReason, Verdict
from mesh.domain.slo import Slo
from mesh.policy import interface
from mesh.policy.interface import Rank
from mesh.policy.llm_mesh import LlmMesh
from mesh.policy.plans import LABEL_CHARS_MAX, Join, Label, Plan, Refuse, Shortage, Start
from mesh.policy.views import CellView, NodeView, Outlook, RequestView
from tests.core.admission import SLOW, instance, node, submitted
from tests.core.cells import (
    FOOTPRINT,
    CellUnderTest,
    commands,
    deployment,
    hello,
    of_kind,
    only,
    request,
)

A = DeploymentName("a")


@dataclass(frozen=True, kw_only=True)
class StartsFirst(LlmMesh):
    """A new instance rather than one that is there; one that is there before a second node."""

    def places(self, request: RequestView | None, cell: CellView) -> Iterator[Plan]:
        first, *others = cell.starts() or (None,)
        if first is not None:
            yield Start(request=request, node=first)
        if request is not None:
            for there in cell.candidates():
                yield Join(request=request, instance=there)
        for one in others:
            yield Start(request=request, node=one)


@pytest.mark.parametrize(
    ("beside", "joins", "starts"), [((), 1, 0), (("n2",), 0, 1)], ids=["nowhere else", "n2"]
)
@pytest.mark.parametrize("promises", [True, False])
def test_a_policy_may_start_an_instance_rather_than_join_one(
    beside: tuple[str, ...], joins: int, starts: int, promises: bool
) -> None:
    cell = CellUnderTest(deployment("a"), rule=StartsFirst(promises=promises))
    cell.join(node("n1", instance("i1", "a")))
    for name in beside:
        cell.join(node(name))
    said = cell.invoke(request(of="a"))
    assert len(commands(said, SubmitRequest)) == joins
    assert len(commands(said, LoadInstance)) == starts


@pytest.mark.parametrize("promises", [True, False])
def test_whoever_waits_for_a_load_rather_than_join_has_its_place_when_that_is_over(
    promises: bool,
) -> None:
    cell = CellUnderTest(deployment("a"), rule=StartsFirst(promises=promises))
    cell.join(node("n1", instance("i1", "a")))
    link, _ = cell.join(node("n2"))
    said = cell.invoke(request(of="a"))
    load = only(commands(said, LoadInstance), LoadInstance)
    assert not submitted(said)
    assert submitted(cell.loaded(link, load.instance_id)) == [("r1", load.instance_id)]


@dataclass(frozen=True, kw_only=True)
class StartsFirstPairs(StartsFirst):
    """Two requests to an instance."""

    def passes(self, plan: Plan, tests: interface.Tests) -> Verdict | Shortage:
        full = isinstance(plan, Join) and plan.instance.batch >= 2
        return Shortage(message="two are enough") if full else tests.shadow(plan)


def test_whoever_would_rather_have_a_start_has_the_place_that_comes_free_at_once() -> None:
    """An instance that serves others still has lost a request: it alone is looked at first."""
    cell = CellUnderTest(deployment("a"), rule=StartsFirstPairs())
    cell.join(node("n1", instance("i1", "a")))
    told = [submitted(cell.invoke(request(name, of="a"))) for name in ("r1", "r2", "r3")]
    assert told == [[("r1", "i1")], [("r2", "i1")], []]
    ended = cell.tokens(1, "r1", (7,), finish=FinishReason.STOP)
    assert submitted(ended) == [("r3", "i1")]


@dataclass(frozen=True, kw_only=True)
class Mixing(StartsFirst):
    """It orders nodes by their names and starts nothing on n2."""

    def node_rank(self, node: NodeView) -> Rank:
        return ()

    def passes(self, plan: Plan, tests: interface.Tests) -> Verdict | Shortage:
        closed = isinstance(plan, Start) and plan.node.node_id == "n2"
        return Shortage(message="n2 is closed") if closed else tests.shadow(plan)


def test_joins_and_starts_are_tried_in_the_order_of_the_policy() -> None:
    """A start on n2, which is closed, then the instance that is there, then a start on n3."""
    cell = CellUnderTest(deployment("a"), rule=Mixing())
    for name, there in (("n1", (instance("i1", "a"),)), ("n2", ()), ("n3", ())):
        cell.join(node(name, *there))
    said = cell.invoke(request(of="a"))
    assert submitted(said) == [("r1", "i1")]
    assert not commands(said, LoadInstance)


@dataclass(frozen=True, kw_only=True)
class Quota(LlmMesh):
    """One request of a deployment at a time."""

    def passes(self, plan: Plan, tests: interface.Tests) -> Verdict | Shortage:
        if isinstance(plan, Join) and not plan.instance.batch:
            return tests.shadow(plan)
        return Shortage(message="the quota is one request at a time")


def test_a_reason_of_its_own_is_told_to_the_client_whose_request_waited_in_vain() -> None:
    cell = CellUnderTest(deployment("a"), rule=Quota())
    cell.join(node("n1", instance("i1", "a")))
    cell.join(node("n2"))
    assert submitted(cell.invoke(request("r1", of="a"))) == [("r1", "i1")]
    assert not of_kind(cell.invoke(request("r2", of="a")), RefuseRequest), "it waits"
    cell.now_s += 10.0
    refused = only(cell.retry(), RefuseRequest)
    assert (refused.request_id, refused.reason) == ("r2", RefusalReason.POLICY)
    assert refused.message == "the quota is one request at a time"


@dataclass(frozen=True, kw_only=True)
class Turning(LlmMesh):
    """It turns whoever waits away with words of its own."""

    def places(self, request: RequestView | None, cell: CellView) -> Iterator[Plan]:
        if request is not None:
            yield Refuse(request=request, message="closed on Wednesdays")


@pytest.mark.parametrize("promises", [True, False])
@pytest.mark.parametrize("there", [(instance("i1", "a"),), ()], ids=["loaded", "cold"])
def test_a_policy_refuses_in_its_own_words(
    promises: bool, there: tuple[InstanceReport, ...]
) -> None:
    cell = CellUnderTest(deployment("a"), rule=Turning(promises=promises))
    cell.join(node("n1", *there))
    refused = only(cell.invoke(request(of="a")), RefuseRequest)
    assert (refused.reason, refused.message) == (RefusalReason.POLICY, "closed on Wednesdays")


@dataclass(frozen=True, kw_only=True)
class Roles(LlmMesh):
    """It has an instance for prompts on each node, and remembers that by its label."""

    label: str = "prompts"

    def upkeep(self, cell: CellView) -> Iterator[Plan]:
        for there in cell.instances():
            if there.label == self.label:
                yield Label(instance=there, label=f"{there.label}, seen")
        for place in cell.nodes():
            if not any(True for _ in cell.instances(place)):
                yield Start(node=place, deployment=A, label=self.label)


def test_upkeep_loads_instances_that_nobody_asked_for_and_remembers_what_for() -> None:
    cell = CellUnderTest(deployment("a"), rule=Roles())
    cell.join(node("n1"))
    load = only(commands(cell.tell(LeaseCheckDue()), LoadInstance), LoadInstance)
    made = cell.core.cell.instances[load.instance_id]
    assert made.label == "prompts"
    assert not commands(cell.tell(LeaseCheckDue()), LoadInstance), "there is one"
    assert made.label == "prompts, seen"
    cell.tell(LeaseCheckDue())
    assert made.label == "prompts, seen", "it is labelled no more"


@dataclass(frozen=True, kw_only=True)
class Naming(LlmMesh):
    """Each instance that it starts has the name of its node for a label."""

    def places(self, request: RequestView | None, cell: CellView) -> Iterator[Plan]:
        for place in cell.starts():
            yield Start(request=request, node=place, label=place.node_id)


@pytest.mark.parametrize("replicas_min", [0, 1], ids=["a request", "a minimum"])
def test_what_starts_for_a_request_or_a_minimum_is_labelled_too(replicas_min: int) -> None:
    cell = CellUnderTest(deployment("a", replicas_min=replicas_min), rule=Naming())
    cell.join(node("n1"))
    if not replicas_min:
        cell.invoke(request(of="a"))
    assert [made.label for made in cell.core.cell.instances.values()] == ["n1"]


def test_a_label_has_a_bound_and_a_start_of_no_deployment_is_a_fault() -> None:
    cell = CellUnderTest(deployment("b"), rule=Roles(label="x" * 100))
    cell.join(node("n1"))
    said = cell.tell(LeaseCheckDue())
    assert not commands(said, LoadInstance)
    assert any("no a to start" in repr(action) for action in said)
    cell = CellUnderTest(deployment("a"), rule=Roles(label="x" * 100))
    cell.join(node("n1"))
    cell.tell(LeaseCheckDue())
    (made,) = cell.core.cell.instances.values()
    assert made.label == "x" * LABEL_CHARS_MAX


def test_a_full_node_or_a_maximum_keeps_an_instance_from_starting_in_upkeep() -> None:
    for replicas_max, memory_mib, loads in ((1, 1024, 1), (4, 1, 0), (4, 1024, 2)):
        cell = CellUnderTest(deployment("a", replicas_max=replicas_max), rule=Roles())
        for name in ("n1", "n2"):
            cell.join(node(name, memory_bytes=memory_mib << 20))
        assert len(commands(cell.tell(LeaseCheckDue()), LoadInstance)) == loads


@dataclass(frozen=True, kw_only=True)
class QuotaThenNobody(Quota):
    """The same, and every second whoever waits is turned away with the number of those who do."""

    def upkeep(self, cell: CellView) -> Iterator[Plan]:
        for made in cell.deployments():
            waiting = cell.waiting(made.name)
            for one in tuple(waiting):
                yield Refuse(request=one, message=f"one of {len(waiting)} that wait")


def test_a_policy_sees_the_queues() -> None:
    cell = CellUnderTest(deployment("a"), rule=QuotaThenNobody())
    cell.join(node("n1", instance("i1", "a")))
    for name in ("r1", "r2", "r3"):
        cell.invoke(request(name, of="a"))
    refused = of_kind(cell.tell(LeaseCheckDue()), RefuseRequest)
    assert [(r.request_id, r.message) for r in refused] == [
        ("r2", "one of 2 that wait"),
        ("r3", "one of 1 that wait"),
    ]


@dataclass(frozen=True, kw_only=True)
class Patient(Quota):
    """Whoever waits does so, for no reason or for this one."""

    until_s: float = inf
    message: str = ""

    def waits(self, request: RequestView, outlook: Outlook) -> bool | Shortage:
        waits = outlook.now_s - request.arrival_s < self.until_s
        return waits or (Shortage(message=self.message) if self.message else False)

    def may_be_late(self, request: RequestView, outlook: Outlook) -> bool:
        return True


def waits_in_vain(rule: Patient) -> tuple[CellUnderTest, list[ControllerAction]]:
    """A request behind one that has the only place, and what it was told at once."""
    cell = CellUnderTest(deployment("a"), rule=rule)
    cell.join(node("n1", instance("i1", "a")))
    assert submitted(cell.invoke(request("r1", of="a"))) == [("r1", "i1")]
    return cell, cell.invoke(request("r2", of="a"))


def test_a_policy_keeps_a_request_waiting_that_is_late_already() -> None:
    cell, told = waits_in_vain(Patient())
    cell.now_s += 10.0
    assert not of_kind([*told, *cell.retry()], RefuseRequest)
    served = cell.tokens(1, "r1", (7,), finish=FinishReason.STOP)
    assert submitted(served) == [("r2", "i1")]


def test_nobody_waits_for_longer_than_the_cell_allows() -> None:
    cell, _ = waits_in_vain(Patient())
    cell.now_s += CellLimits().queue_wait_s_max
    assert only(cell.retry(), RefuseRequest).request_id == "r2"


@pytest.mark.parametrize("message", ["", "it will not be in time"])
def test_a_policy_refuses_before_it_is_too_late_and_may_say_why(message: str) -> None:
    _, told = waits_in_vain(Patient(until_s=0.0, message=message))
    refused = only(told, RefuseRequest)
    assert refused.request_id == "r2"
    assert refused.reason is RefusalReason.POLICY
    assert refused.message == (message or "the quota is one request at a time")


@dataclass(frozen=True, kw_only=True)
class Shedding(Patient):
    """Nobody joins a long prompt; after it, whoever comes first has the others turned away."""

    def places(self, request: RequestView | None, cell: CellView) -> Iterator[Plan]:
        free = any(there.tokens < 100 for there in cell.candidates())
        for other in tuple(cell.waiting(A)) if request is not None and free else ():
            if other is not request:
                yield Refuse(request=other, message="shed")
        yield from super().places(request, cell)

    def passes(self, plan: Plan, tests: interface.Tests) -> Verdict | Shortage:
        full = isinstance(plan, Join) and plan.instance.tokens >= 100
        return Shortage(message="behind a long prompt") if full else Verdict.PASSES


def test_who_is_refused_while_another_is_placed_is_placed_no_more() -> None:
    cell = CellUnderTest(deployment("a"), rule=Shedding())
    cell.join(node("n1", instance("i1", "a")))
    for name, tokens in (("r1", 100), ("r2", 3), ("r3", 3), ("r4", 3)):
        cell.invoke(request(name, of="a", prompt=(1,) * tokens))
    said = cell.tokens(1, "r1", (7,), finish=FinishReason.STOP)
    assert [r.request_id for r in of_kind(said, RefuseRequest)] == ["r3", "r4"]
    assert submitted(said) == [("r2", "i1")]


@dataclass(frozen=True, kw_only=True)
class Late(LlmMesh):
    """Everybody may be late, or nobody."""

    late: bool

    def may_be_late(self, request: RequestView, outlook: Outlook) -> bool:
        return self.late


@pytest.mark.parametrize("late", [True, False])
def test_a_policy_has_a_request_join_an_instance_that_serves_it_late(late: bool) -> None:
    """A prompt of 200 tokens takes 0.8 s, behind one that takes a second."""
    slo = Slo(ttft_s=1.5, ttft_tokens_per_s=1e6, tpot_s=10.0)
    cell = CellUnderTest(deployment("a", slo=slo), profiles=(SLOW,), rule=Late(late=late))
    cell.join(node("n1", instance("i1", "a")))
    cell.invoke(request("r1", of="a", prompt=(1,) * 256))
    told = cell.invoke(request("r2", of="a", prompt=(1,) * 200))
    assert submitted(told) == [("r2", "i1")] * late
    assert [1.0 > accepted.grace_s > 0.2 for accepted in of_kind(told, TellAccepted)] == (
        [True] * late
    )


@pytest.mark.parametrize("late", [True, False])
def test_a_policy_says_whether_the_first_caller_waits_for_a_load_that_is_late(late: bool) -> None:
    cell = CellUnderTest(deployment("a"), rule=Late(late=late))
    cell.core.cell.expectations.learn_load(hello(), FOOTPRINT.weights_bytes, 10.0)
    cell.join(node("n1"))
    told = cell.invoke(request(of="a"))
    assert len(commands(told, LoadInstance)) == late
    assert len(of_kind(told, RefuseRequest)) == (not late)
