"""Policies that do what they must not: the cell goes on, and its actions say whose fault it was."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, ClassVar

import pytest

from mesh.domain.actions import ControllerAction, NotePolicyFault, RefuseRequest
from mesh.domain.events import (
    DecisionTookLong,
    InvokeRequested,
    KeepAliveExpired,
    LeaseCheckDue,
)
from mesh.domain.ids import DeploymentName, InstanceId
from mesh.domain.limits import CellLimits
from mesh.domain.messages import InstanceGone, SubmitRequest, UnloadInstance
from mesh.domain.reasons import FinishReason, PolicyFaultKind, RefusalReason, Verdict
from mesh.domain.slo import PACE, Pace
from mesh.policy.interface import KvSize
from mesh.policy.llm_mesh import LLM_MESH
from mesh.policy.plans import Carry, Join, Label, Move, Prefetch, Refuse, Release, Start
from mesh.policy.rules.run_queues import RunQueue
from mesh.policy.rules.turns import Grant, TurnBounds
from mesh.runtime.controller_actions import took_long
from mesh.runtime.host import DECISION_S_MAX, Host
from tests.core.admission import SLOW, instance, node
from tests.core.cells import CellUnderTest, commands, deployment, request

CHAT = DeploymentName("chat")


class Other:
    """`llm-mesh` but for the methods that it is given."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        self.methods = methods

    def __getattr__(self, name: str) -> Any:
        methods = self.__dict__["methods"]
        return methods[name] if name in methods else getattr(LLM_MESH, name)


class Cell(CellUnderTest):
    """A node with an instance of `chat` loaded, under a policy that differs from then on."""

    def __init__(self, other: Other, replicas_min: int = 0) -> None:
        methods, other.methods = other.methods, {}
        limits = CellLimits(delivery_s_max=0.02, queue_wait_s_max=1.0)
        super().__init__(deployment(replicas_min=replicas_min), limits=limits, rule=other)
        self.link_id, _ = self.join()
        self.invoke(request("first"))
        self.loaded(self.link_id, self.instance.instance_id)
        other.methods = methods

    @property
    def instance(self) -> Any:
        return next(iter(self.core.cell.instances.values()))


def faults(actions: Sequence[object]) -> list[tuple[PolicyFaultKind, str]]:
    return [(a.kind, a.call) for a in actions if isinstance(a, NotePolicyFault)]


def submitted(actions: Sequence[object]) -> list[str]:
    return [command.order.request.request_id for command in commands(actions, SubmitRequest)]


def raises(*_: object) -> Any:
    raise ZeroDivisionError("by nobody")


@pytest.mark.parametrize("call", ["places", "passes", "kv", "instance_rank"])
def test_a_policy_that_raises_places_nobody_badly_and_the_cell_goes_on(call: str) -> None:
    cell = Cell(Other(**{call: raises}))
    said = cell.invoke(request("second"))
    assert (PolicyFaultKind.RAISED, call) in faults(said)
    message = next(a.message for a in said if isinstance(a, NotePolicyFault))
    assert message == "ZeroDivisionError: by nobody"
    if call in ("places", "passes"):
        assert not submitted(said)
        cell.now_s += 40.0
        assert any(isinstance(a, RefuseRequest) for a in cell.retry()), "it does not wait for ever"
    else:
        assert submitted(said) == ["second"], "an order by ids, and a cache by demand, do as well"


def test_one_that_raises_while_nodes_rank_and_instances_idle_does_no_harm_either() -> None:
    cell = Cell(Other(node_rank=raises, idle=raises, upkeep=raises, relieve=raises))
    assert faults(cell.tell(LeaseCheckDue())) == [(PolicyFaultKind.RAISED, "upkeep")]
    assert submitted(cell.invoke(request("second"))) == ["second"]


@pytest.mark.parametrize("answer", [raises, lambda *_: None])
def test_one_that_does_not_say_who_waits_has_all_wait_as_long_as_any_may(answer: Any) -> None:
    passes = {"passes": lambda plan, tests: Verdict.FIRST_TOKEN_LATE}
    cell = Cell(Other(waits=answer, may_be_late=raises, **passes))
    said = cell.invoke(request("second"))
    assert "waits" in [call for _, call in faults(said)]
    assert not [a for a in said if isinstance(a, RefuseRequest)]
    cell.now_s += 1.0
    assert [a for a in cell.retry() if isinstance(a, RefuseRequest)]


def test_one_that_yields_for_ever_is_cut_off() -> None:
    looked = []

    def joins(asked: Any, cell: Any) -> Iterator[Join]:
        instance = next(iter(cell.instances()))
        for _ in repeat(None):
            looked.append(1)
            yield Join(request=asked, instance=instance)

    cell = Cell(Other(places=joins, passes=lambda plan, tests: Verdict.FIRST_TOKEN_LATE))
    said = cell.invoke(request("second"))
    assert (PolicyFaultKind.NO_END, "places") in faults(said)
    assert not submitted(said)
    assert len(looked) < 1000


def test_what_it_yields_that_is_no_plan_is_its_fault() -> None:
    cell = Cell(Other(places=lambda asked, cell: iter(["join it"])))
    assert (PolicyFaultKind.RAISED, "places") in faults(cell.invoke(request("second")))


def test_a_plan_for_an_instance_that_has_died_since_is_not_carried_out() -> None:
    remembered: list[Any] = []

    def joins(asked: Any, cell: Any) -> Iterator[Join]:
        remembered.extend(cell.instances())
        yield Join(request=asked, instance=remembered[0])

    cell = Cell(Other(places=joins))
    assert submitted(cell.invoke(request("second"))) == ["second"]
    gone = InstanceGone(instance_id=remembered[0].instance_id, message="killed")
    again = cell.report(cell.link_id, gone)
    assert (PolicyFaultKind.NOT_IN_BOOKS, "Join") in faults(again)
    assert not submitted(again)
    assert not cell.core.cell.instances, "and nobody is on what is gone"


def test_a_plan_that_passes_and_that_the_books_refuse_changes_nothing() -> None:
    def keep_up(cell: Any) -> Iterator[Release]:
        yield Release(instance=next(iter(cell.instances())))

    cell = Cell(Other(upkeep=keep_up), replicas_min=1)
    before = cell.instance.promised_bytes
    said = cell.tell(LeaseCheckDue())
    assert faults(said) == [(PolicyFaultKind.NOT_IN_BOOKS, "Release")]
    assert cell.instance.promised_bytes == before


def test_who_is_to_go_for_a_request_goes_once_places_have_been_looked_for() -> None:
    """Not while its request has no other place; asked for with each look at each request of an
    event, it is carried out once.
    """

    def places(asked: Any, cell: Any) -> Iterator[Release]:
        for there in cell.instances():
            yield Release(instance=there)

    cell = Cell(Other(places=places))
    assert not commands(cell.invoke(request("second")), UnloadInstance)
    said = cell.tokens(cell.link_id, "first", [7], finish=FinishReason.STOP)
    assert [u.instance_id for u in commands(said, UnloadInstance)] == [cell.instance.instance_id]
    assert not faults(said)


@pytest.mark.parametrize("pace", [Pace(share=1.5), Pace(share=0.0), None])
def test_a_pace_that_does_not_keep_the_slo_is_a_fault_and_the_default_stands(pace: object) -> None:
    cell = Cell(Other(pace=lambda slo: pace))
    said = cell.invoke(request("second"))
    assert [call for _, call in faults(said)] == ["pace"]
    (command,) = commands(said, SubmitRequest)
    assert command.order.pace_share == PACE.share


def test_a_policy_s_pace_goes_with_its_requests() -> None:
    cell = Cell(Other(pace=lambda slo: Pace(share=0.5)))
    (command,) = commands(cell.invoke(request("second")), SubmitRequest)
    assert command.order.pace_share == 0.5


def test_what_no_engine_can_do_is_refused_with_what_is_missing() -> None:
    def keep_up(cell: Any) -> Iterator[Any]:
        instance = next(iter(cell.instances()))
        yield Move(requests=tuple(cell.requests(instance)), to=instance, carry=Carry.KV)

    cell = Cell(Other(upkeep=keep_up))
    (fault,) = [a for a in cell.tell(LeaseCheckDue()) if isinstance(a, NotePolicyFault)]
    assert fault.kind is PolicyFaultKind.NO_CAPABILITY
    assert "KV blocks" in fault.message


def test_idle_instances_go_by_upkeep_and_who_waits_can_be_refused_by_it() -> None:
    def keep_up(cell: Any) -> Iterator[Release]:
        yield Release(instance=next(iter(cell.instances())))

    def refuses(asked: Any, cell: Any) -> Iterator[Any]:
        yield Refuse(request=asked, why=RefusalReason.MEMORY_FULL)

    cell = Cell(Other(upkeep=keep_up, places=refuses))
    said = cell.invoke(request("second"))
    assert [a.reason for a in said if isinstance(a, RefuseRequest)] == [RefusalReason.MEMORY_FULL]
    cell.tokens(cell.link_id, "first", [7], finish=FinishReason.STOP)
    said = cell.tell(LeaseCheckDue())
    assert commands(said, UnloadInstance)


def test_the_host_tells_of_a_decision_that_took_10_ms_and_the_journal_has_it() -> None:
    class Clock:
        at_s = 100.0

        def now_s(self) -> float:
            return self.at_s

        def call_at(self, at_s: float, call: Callable[[], None]) -> None:
            raise NotImplementedError

    clock, lines = Clock(), []

    class Lines:
        def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
            lines.append((event, list(actions)))

    def slow(plan: Any, tests: Any) -> Verdict:
        clock.at_s += DECISION_S_MAX
        return Verdict.PASSES

    cell = Cell(Other(passes=slow))
    host: Host[Any, ControllerAction] = Host(
        core=cell.core,
        clock=clock,
        perform=lambda action: None,
        recorders=[Lines()],
        took_long=took_long,
    )
    host.post(InvokeRequested(request=request("second")))
    (decided, told) = lines
    assert submitted(decided[1]) == ["second"], "it counts all the same"
    assert isinstance(told[0], DecisionTookLong)
    assert faults(told[1]) == [(PolicyFaultKind.TOOK_LONG, "handle")]
    assert InstanceId(cell.instance.instance_id) in cell.core.cell.instances


def _any(cell: Any) -> Any:
    """An instance, which passes for a request, too."""
    return Both(next(iter(cell.instances())))


class Both:
    def __init__(self, instance: Any) -> None:
        self.instance_id, self.node, self.request_id = instance.instance_id, instance.node, "r"


@pytest.mark.parametrize(
    "plan",
    [
        lambda cell: Start(node=None, deployment=CHAT),  # type: ignore[arg-type]
        lambda cell: Start(node=next(iter(cell.nodes())), label=None),  # type: ignore[arg-type]
        lambda cell: Release(instance=None),  # type: ignore[arg-type]
        lambda cell: Move(requests=(), to=None),  # type: ignore[arg-type]
        lambda cell: Move(requests=(None,), to=next(iter(cell.instances()))),  # type: ignore[arg-type]
        lambda cell: Label(instance=next(iter(cell.instances())), label=None),  # type: ignore[arg-type]
        lambda cell: Refuse(request=None),  # type: ignore[arg-type]
        lambda cell: Join(request=_any(cell), instance=_any(cell), label=5),  # type: ignore[arg-type]
        lambda cell: Start(node=_any(cell).node, deployment=[]),  # type: ignore[arg-type]
        lambda cell: Prefetch(deployment=CHAT, node=_any(cell).node, instead_of=(None,)),  # type: ignore[arg-type]
    ],
)
@pytest.mark.parametrize("call", ["upkeep", "places"])
def test_a_plan_without_what_it_is_about_is_a_fault(plan: Callable[..., Any], call: str) -> None:
    cell = Cell(Other(**{call: lambda *asked: iter([plan(asked[-1])])}))
    said = [*cell.tell(LeaseCheckDue()), *cell.invoke(request("second"))]
    assert (PolicyFaultKind.RAISED, call) in faults(said)
    assert any(isinstance(a, NotePolicyFault) and "TypeError" in a.message for a in said)


@pytest.mark.parametrize(
    "size",
    [
        KvSize(required_blocks=8.5, wanted_blocks=9),  # type: ignore[arg-type]
        KvSize(required_blocks=8, wanted_blocks=9, batch_max=0),
        KvSize(required_blocks=8, wanted_blocks=9, batch_max=2.5),  # type: ignore[arg-type]
    ],
)
def test_a_cache_of_parts_of_blocks_or_for_nobody_is_a_fault(size: KvSize) -> None:
    cell = Cell(Other(kv=lambda demand: size))
    said = cell.invoke(request("second", prompt=(1,) * 300))
    assert (PolicyFaultKind.NO_ANSWER, "kv") in faults(said)
    assert submitted(said) == ["second"]


@pytest.mark.parametrize("answer", [float("nan"), None, Release(instance=None)])  # type: ignore[arg-type]
def test_an_idle_instance_goes_where_a_policy_does_not_say_when_to_ask_again(answer: Any) -> None:
    cell = Cell(Other(idle=lambda *_: answer))
    cell.tokens(cell.link_id, "first", (7,), finish=FinishReason.STOP)
    idle = cell.instance
    expired = KeepAliveExpired(instance_id=idle.instance_id, idle_since_s=idle.idle_since_s)
    said = cell.tell(expired)
    assert faults(said) == [(PolicyFaultKind.RAISED, "idle")]
    assert commands(said, UnloadInstance)


@dataclass(frozen=True)
class BadRule:
    """A turn rule that raises, or gives a turn that cannot be."""

    grant: Callable[[RunQueue], Any]
    name: ClassVar[str] = "bad"
    period: ClassVar[int | None] = None

    def turn(self, queues: Sequence[RunQueue], now_s: float, bounds: TurnBounds) -> Grant:
        made: Grant = self.grant(queues[0])
        return made


@pytest.mark.parametrize(
    "grant",
    [
        raises,
        lambda queue: None,
        lambda queue: Grant(queue=queue, prefill=0, seconds=float("nan")),
        lambda queue: Grant(queue=queue, prefill=2.5, seconds=1.0),  # type: ignore[arg-type]
        lambda queue: Grant(queue=queue, prefill=(("r1", None),), seconds=1.0),  # type: ignore[arg-type]
        lambda queue: Grant(queue=queue, prefill=0, seconds=1.0, iterations=10**9),
        lambda queue: Grant(queue=queue, prefill=0, seconds=1.0, iterations=2.0),  # type: ignore[arg-type]
        lambda queue: Grant(queue=queue, prefill=0, seconds=1.0, decode=5),  # type: ignore[arg-type]
    ],
)
def test_a_turn_rule_that_raises_while_it_is_rolled_forward_is_a_fault(grant: Any) -> None:
    """The controller goes on: those who wait are looked at by the same rule."""
    rule = replace(LLM_MESH, rule=BadRule(grant))
    cell = CellUnderTest(deployment("a"), profiles=(SLOW,), rule=rule)
    cell.join(node("n1", instance("i1", "a")))
    said = [*cell.invoke(request("r1", of="a", prompt=(1,) * 256))]
    for name in ("r2", "r3"):
        said += cell.invoke(request(name, of="a", prompt=(1,) * 256))
    cell.now_s += 1.0
    said += cell.retry()
    assert (PolicyFaultKind.RAISED, "turn") in faults(said)
    assert submitted(said)[:1] == ["r1"]
