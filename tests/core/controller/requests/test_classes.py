"""Requests of several SLO classes of one deployment."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mesh.core.controller.instances.node_schedule import _best_effort_s
from mesh.core.controller.requests.preemption import may_be_preempted
from mesh.core.controller.requests.serving import grow_or_evict
from mesh.domain.actions import ControllerAction, RefuseRequest
from mesh.domain.events import DeploymentStored, DeployRequested, InvokeRequested
from mesh.domain.ids import DeploymentName, InstanceId, NodeId, OperationId, RequestId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.limits import CellLimits
from mesh.domain.messages import AbortRequest, LoadInstance, SubmitRequest
from mesh.domain.profile import Grid
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.slo import BEST_EFFORT, Slo, best_effort
from tests.core.admission import SLOW, BusyCell, instance, node, submitted
from tests.core.cells import MIB, CellUnderTest, commands, deployment, hello, of_kind, request
from tests.core.two_nodes import TwoNodes

BATCH = best_effort("batch", 600.0)
QUICK = Slo(name="quick", ttft_s=8.0, ttft_tokens_per_s=1e9, tpot_s=0.15)
PATIENT = Slo(name="patient", ttft_s=8.0, ttft_tokens_per_s=1e9, tpot_s=1.0)


class Cell(BusyCell):
    """Deployments `a`, `b` and `c`, each with a loaded instance on one node and both classes."""

    def __init__(self) -> None:
        made = [deployment(name, slo=PATIENT) for name in "abc"]
        specs = [
            replace(one.spec, classes=(QUICK, PATIENT), class_default="patient") for one in made
        ]
        deployments = [replace(one, spec=spec) for one, spec in zip(made, specs, strict=True)]
        super().__init__(*deployments)

    def ask_in(
        self, slo: Slo, name: str, of: str = "a", answers: int = 1
    ) -> list[ControllerAction]:
        asked = request(name, of=of, prompt=(1,) * 3, max_tokens=256)
        return self.tell(InvokeRequested(request=replace(asked, answers=answers), slo=slo))


def test_a_class_that_finds_no_place_holds_up_no_other() -> None:
    """`b` has all the time of the node that a quick one would need, but not what a patient one
    needs.
    """
    cell = Cell()
    cell.ask_in(QUICK, "r1", of="b")
    cell.tokens(cell.link, "r1", [7])
    for number in range(5):
        assert submitted(cell.ask_in(QUICK, f"q{number}")) == []
    assert submitted(cell.ask_in(PATIENT, "p1")) == [("p1", "a")]


def test_requests_of_a_class_that_goes_keep_its_limits_until_they_end() -> None:
    """`q1` decodes and `q2` waits as their class goes, and both are answered."""
    cell = Cell()
    short = request("q1", of="b", prompt=(1,) * 3, max_tokens=4)
    assert submitted(cell.tell(InvokeRequested(request=short, slo=QUICK))) == [("q1", "b")]
    cell.tokens(cell.link, "q1", [7])
    assert submitted(cell.ask_in(QUICK, "q2")) == [], "there is no time for two"
    entries = [cell.core.cell.deployments[DeploymentName(name)] for name in "ab"]
    for entry in entries:
        operation = OperationId(f"op-{entry.name}")
        fewer = replace(entry.spec, classes=(PATIENT,))
        cell.tell(DeployRequested(operation_id=operation, spec=fewer))
        cell.tell(DeploymentStored(operation_id=operation))
        assert entry.spec.classes == (PATIENT,)
    said = cell.tokens(cell.link, "q1", [8], first=1, finish=FinishReason.STOP)
    (order,) = commands(said, SubmitRequest)
    assert (order.order.request.request_id, order.order.slo) == ("q2", QUICK)
    cell.tokens(cell.link, "q2", [7], finish=FinishReason.STOP)
    assert [(entry.served, entry.refused, entry.by_class) for entry in entries] == [(1, 0, {})] * 2


def test_a_class_that_no_node_can_keep_is_told_and_the_others_are_served() -> None:
    cell = Cell()
    never = Slo(name="never", ttft_s=8.0, ttft_tokens_per_s=1e9, tpot_s=0.05)
    (refusal,) = of_kind(cell.ask_in(never, "n1"), RefuseRequest)
    assert refusal.reason is RefusalReason.TPOT_EXCEEDED
    assert refusal.hint == "no node is quick enough: raise spec.classes.never.tpot_s"
    assert submitted(cell.ask_in(PATIENT, "p1")) == [("p1", "a")]


def test_each_class_has_a_bound_of_its_own_for_those_who_wait() -> None:
    made = deployment(slo=PATIENT)
    spec = replace(made.spec, classes=(QUICK, PATIENT), class_default="patient")
    cell = CellUnderTest(replace(made, spec=spec), limits=CellLimits(queue_requests_max=1))
    cell.join(hello())

    def refused(slo: Slo, name: str) -> list[RefusalReason]:
        said = cell.tell(InvokeRequested(request=request(name), slo=slo))
        return [refusal.reason for refusal in of_kind(said, RefuseRequest)]

    assert refused(QUICK, "q1") == [], "it waits for a load"
    assert refused(PATIENT, "p1") == []
    assert refused(QUICK, "q2") == [RefusalReason.QUEUE_FULL]


def test_lines_of_batch_files_take_no_place_of_those_who_wait() -> None:
    """A deployment without classes has a bound of its own for them."""
    cell = CellUnderTest(deployment(slo=PATIENT), limits=CellLimits(queue_requests_max=1))
    cell.join(hello())

    def refused(slo: Slo | None, name: str) -> list[RefusalReason]:
        said = cell.tell(InvokeRequested(request=request(name), slo=slo))
        return [refusal.reason for refusal in of_kind(said, RefuseRequest)]

    assert refused(BEST_EFFORT, "b1") == []
    assert refused(BEST_EFFORT, "b2") == [RefusalReason.QUEUE_FULL]
    assert refused(None, "p1") == []
    assert refused(None, "p2") == [RefusalReason.QUEUE_FULL]


def test_lengths_and_ends_are_counted_by_class() -> None:
    cell = Cell()
    cell.ask_in(PATIENT, "r1")
    cell.tokens(cell.link, "r1", [7] * 9, finish=FinishReason.STOP)
    entry = cell.core.cell.deployments[DeploymentName("a")]
    assert entry.by_class["patient"].met == 1
    cell.ask_in(QUICK, "r2")
    cell.tokens(cell.link, "r2", [7], finish=FinishReason.STOP)
    assert entry.history.mean_of("quick") < entry.history.mean_of("patient")
    assert (entry.by_class["quick"].served, entry.served) == (1, 2)
    known = entry.history.classes
    cell.tell(InvokeRequested(request=request("r3", of="a", prompt=(0,), max_tokens=1), slo=QUICK))
    cell.tokens(cell.link, "r3", [7], finish=FinishReason.LENGTH)
    assert (entry.history.classes, entry.served) == (known, 3), "a call that only loads"


def test_best_effort_takes_no_time_from_a_class_and_waits_behind_all_of_them() -> None:
    cell = Cell()
    for number in range(30):
        assert submitted(cell.ask_in(BATCH, f"b{number}")) == [(f"b{number}", "a")]
    assert submitted(cell.ask_in(QUICK, "q1", of="b")) == [("q1", "b")]
    cell.tokens(cell.link, "q1", [7])
    assert submitted(cell.ask_in(QUICK, "q2")) == [], "the class itself has no time for two"


@pytest.mark.parametrize("slo", [BATCH, BEST_EFFORT])
def test_best_effort_gives_its_place_up_to_a_class_and_goes_on_later(slo: Slo) -> None:
    """An instance takes 32 requests at a time."""
    cell = Cell()
    for number in range(32):
        cell.ask_in(slo, f"b{number}")
    cell.tokens(cell.link, "b31", [7, 8])
    said = cell.ask_in(PATIENT, "p1")
    assert [abort.request_id for abort in commands(said, AbortRequest)] == ["b31"]
    assert submitted(said) == [("p1", "a")]
    said = cell.tokens(cell.link, "p1", [7], finish=FinishReason.STOP)
    (again,) = commands(said, SubmitRequest)
    assert again.order.request.request_id == "b31"
    assert again.order.output_tokens == (7, 8), "no token is lost, and none comes twice"


def aborted(actions: Sequence[ControllerAction]) -> list[str]:
    return [abort.request_id for abort in commands(actions, AbortRequest)]


class SmallCell(CellUnderTest):
    """A node that holds one instance, of 16 KV blocks of 32 tokens, with best effort on it."""

    def __init__(self, rule: str = "llm-mesh", memory_mib: int = 116) -> None:
        super().__init__(deployment("a"), deployment("b"), profiles=(SLOW,), rule=rule)
        there = replace(instance("a", "a"), kv_blocks=16)
        self.link, _ = self.join(node("n1", there, memory_bytes=memory_mib * MIB))
        self.ask_in(BATCH, "b1", of="a")

    def ask_in(
        self, slo: Slo, name: str, *, of: str, prompt: int = 100, answers: int = 1
    ) -> list[ControllerAction]:
        asked = request(name, of=of, prompt=(1,) * prompt, max_tokens=100)
        return self.tell(InvokeRequested(request=replace(asked, answers=answers), slo=slo))


@pytest.mark.parametrize("rule", ["llm-mesh", "fcfs"])
def test_best_effort_stays_where_a_request_would_lack_memory_without_it(rule: str) -> None:
    """Two answers to 300 tokens need more blocks than the instance can have."""
    cell = SmallCell(rule)
    assert aborted(cell.ask_in(PATIENT, "r1", of="a", prompt=300, answers=2)) == []
    assert aborted(cell.retry()) == []
    assert submitted(cell.ask_in(BATCH, "b2", of="a")) == [], "it waits behind the other"


@pytest.mark.parametrize("rule", ["llm-mesh", "fcfs"])
def test_best_effort_gives_the_memory_up_that_a_request_lacks(rule: str) -> None:
    cell = SmallCell(rule)
    said = cell.ask_in(PATIENT, "r1", of="a", prompt=300)
    assert (aborted(said), submitted(said)) == (["b1"], [("r1", "a")])


def test_who_lacks_time_beside_best_effort_that_has_the_memory_is_refused_for_the_time() -> None:
    """r1 computes for 0.7 s, and r2, which needs 0.4 s, has 0.9 s."""
    cell = SmallCell()
    cell.ask_in(PATIENT, "r1", of="a", prompt=180)
    soon = replace(PATIENT, name="", ttft_s=0.9)
    said = cell.ask_in(soon, "r2", of="a", prompt=90)
    while not (told := of_kind(said, RefuseRequest)):
        cell.now_s += 0.05
        assert cell.now_s < 102.0
        said = cell.retry()
    assert [(no.request_id, no.reason) for no in told] == [("r2", RefusalReason.FIRST_TOKEN_LATE)]


def test_no_more_best_effort_leaves_than_several_answers_need_places() -> None:
    cell = Cell()
    for number in range(30):
        cell.ask_in(BATCH, f"b{number}")
    said = cell.ask_in(PATIENT, "p1", answers=4)
    assert (aborted(said), submitted(said)) == (["b29", "b28"], [("p1", "a")])


def test_best_effort_of_others_stays_where_a_request_lacks_time() -> None:
    cell = Cell()
    cell.ask_in(BATCH, "b1")
    cell.ask_in(QUICK, "q1", of="b")
    cell.tokens(cell.link, "q1", [7])
    said = cell.ask_in(QUICK, "q2", of="c")
    assert (aborted(said), submitted(said)) == ([], [])


@pytest.mark.parametrize("rule", ["llm-mesh", "fcfs"])
def test_an_instance_of_best_effort_alone_goes_for_a_load_that_lacks_its_memory(rule: str) -> None:
    cell = SmallCell(rule, memory_mib=130)
    said = cell.ask_in(PATIENT, "r1", of="b")
    assert aborted(said) == ["b1"]
    assert cell.core.cell.instances[InstanceId("a")].state is InstanceState.UNLOADING
    assert not commands(said, LoadInstance), "the memory comes free later"


def test_best_effort_stays_where_a_starved_cache_can_grow() -> None:
    cell = Cell()
    cell.ask_in(BATCH, "b1")
    cell.ask_in(PATIENT, "p1")
    starved = cell.core.cell.instances[InstanceId("a")]
    starved.note_demand(starved.requests[RequestId("p1")], 300)
    ctx = cell.core._context(cell.now_s)
    grow_or_evict(ctx, starved)
    assert aborted(ctx.actions) == []
    assert starved.promised_blocks >= starved.required_blocks


def test_best_effort_that_was_evicted_often_keeps_no_instance_in_its_place() -> None:
    cell = Cell()
    cell.ask_in(BATCH, "b1")
    there = cell.core.cell.instances[InstanceId("a")]
    for _ in range(cell.core._limits.preempted_max):
        there.requests[RequestId("b1")].note_evicted()
    assert may_be_preempted(cell.core._context(cell.now_s), there)


def test_no_more_of_best_effort_is_counted_on_than_one_iteration_may_have() -> None:
    """The whole of its prompt would take more than a second."""
    cell = Cell()
    cell.ask_in(PATIENT, "q1", of="b")
    cell.tokens(cell.link, "q1", [7])
    asked = request("b1", of="a", prompt=(1,) * 256, max_tokens=256)
    cell.tell(InvokeRequested(request=asked, slo=BATCH))
    soon = replace(PATIENT, name="", ttft_s=0.6)
    asked = request("s1", of="b", max_tokens=256)
    assert submitted(cell.tell(InvokeRequested(request=asked, slo=soon))) == [("s1", "b")]


def test_a_request_that_moves_counts_once_in_its_class() -> None:
    cell = TwoNodes(slo=PATIENT)
    entry = cell.core.cell.deployments[DeploymentName("a")]
    assert entry.deployment is not None
    entry.use(replace(entry.deployment, spec=replace(entry.spec, classes=(PATIENT,))))
    cell.moving()
    (seen, _) = cell.core.snapshot(cell.now_s).deployments
    assert [(of.name, of.running) for of in seen.classes] == [("patient", 1)]


def test_an_iteration_of_best_effort_is_longer_late_in_a_long_prompt() -> None:
    """100 tokens take 0.1 s at the beginning of a prompt, and 1 s after 400 others."""
    cost = Grid(rows=(100,), columns=(0, 400), seconds=((0.1, 1.0),))
    seconds = []
    for prompt in (100, 500):
        cell = BusyCell(deployment("a"), profiles=(replace(SLOW, prefill=cost),))
        asked = request("b1", of="a", prompt=(1,) * prompt, max_tokens=1)
        cell.tell(InvokeRequested(request=asked, slo=BATCH))
        cell.iterated("a", b1=100)
        seconds.append(_best_effort_s(cell.core.cell.nodes[NodeId("n1")], cell.now_s))
    assert seconds[1] > 3 * seconds[0] > 0.0
