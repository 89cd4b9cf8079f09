"""Faults that are put into a simulated cell: of links, processes, clients and engines."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.domain.errors import EngineError, OutOfMemory
from mesh.domain.ids import DeploymentName, InstanceId, NodeId, RequestId
from mesh.domain.outcome import Outcome
from mesh.domain.reasons import DeviceKind, FinishReason, RefusalReason
from mesh.domain.request import SamplingParams
from mesh.domain.steps import EngineRequest, LoadOrder
from mesh.sim.checking import FaultyRun
from mesh.sim.clock import HeapClock
from mesh.sim.cluster import Arrival, CellPlan
from mesh.sim.costs import ModelCosts, NodeCosts
from mesh.sim.engine_faults import EngineFaults, FaultyEngine
from mesh.sim.faults import Fault, FaultKind
from mesh.sim.scenario import plan
from mesh.sim.testbed import known_model
from tests.sim.scenarios import SMALL, scenario

LONG = Arrival(0.0, "chat-1", 100, 200)
AT_S = 5.0
"""Amid the long answer, which a CPU takes 20 s for."""


@pytest.fixture
def made(tmp_path: Path) -> CellPlan:
    return plan(scenario(tmp_path))


def fault(kind: FaultKind, node: str = "cpu", *, size: float = 0.0, chance: float = 0.0) -> Fault:
    return Fault(
        at_s=AT_S, kind=kind, node_id=NodeId(node), until_s=AT_S + 2.0, size=size, chance=chance
    )


def run(made: CellPlan, one: Fault, *more: Arrival) -> tuple[FaultyRun, list[Outcome]]:
    """Runs the cell under checks to the end. The outcomes are ordered by their arrival."""
    faulty = FaultyRun(made, [one], check=True)
    outcomes = faulty.run([LONG, *more])
    assert faulty.counts().faults == ((one.kind.value, 1),)
    return faulty, sorted(outcomes, key=lambda outcome: outcome.arrival_s)


def loads(faulty: FaultyRun) -> dict[str, int]:
    return {node.node_id: node.engine.loads for node in faulty.cell.nodes if node.engine.loads}


@pytest.mark.parametrize(
    ("kind", "pause_s"), [(FaultKind.CRASH, 0.0), (FaultKind.VANISH, 9.0), (FaultKind.BREAK, 0.0)]
)
def test_requests_of_a_lost_node_continue_elsewhere_after_their_tokens(
    made: CellPlan, kind: FaultKind, pause_s: float
) -> None:
    """Where nobody is told, when the lease has run out."""
    faulty, (outcome,) = run(made, fault(kind, size=0.3, chance=0.3))
    assert outcome.end is FinishReason.STOP
    assert len(outcome.tokens_s) == 200
    gaps = [b - a for a, b in zip(outcome.tokens_s, outcome.tokens_s[1:], strict=False)]
    before = [at for at in outcome.tokens_s if at < faulty.cell.started_s + AT_S]
    assert 10 < len(before) < 190
    assert max(gaps) > pause_s
    assert gaps.index(max(gaps)) == pytest.approx(len(before) - 1, abs=1)


def test_a_killed_controller_finds_its_instances_again(made: CellPlan) -> None:
    down = Arrival(AT_S + 1.0, "chat-1", 10, 5)
    later = Arrival(AT_S + 2.9, "chat-1", 10, 5)
    faulty, (first, second, third) = run(made, fault(FaultKind.KILL_CONTROLLER), down, later)
    assert first.end is FinishReason.FAILED
    assert 0 < len(first.tokens_s) < 200
    assert (second.end, second.tokens_s) == (FinishReason.FAILED, ())
    assert third.end is FinishReason.STOP
    assert faulty.cell.controller.epoch == 2
    assert loads(faulty) == {"cpu": 1}, "what was loaded is adopted"


def test_a_controller_that_stops_answers_everybody_first(made: CellPlan) -> None:
    faulty, (outcome,) = run(made, fault(FaultKind.STOP_CONTROLLER))
    assert outcome.end is RefusalReason.SHUTTING_DOWN
    assert outcome.ended_s == faulty.cell.started_s + AT_S


def test_a_client_that_goes_away_frees_its_place(made: CellPlan) -> None:
    faulty, (outcome,) = run(made, fault(FaultKind.CANCEL))
    assert outcome.end is FinishReason.CANCELLED
    assert not faulty.cell.core.cell.requests


def test_an_instance_that_is_killed_is_loaded_again_for_its_requests(made: CellPlan) -> None:
    faulty, (outcome,) = run(made, fault(FaultKind.LOSE))
    assert (outcome.end, len(outcome.tokens_s)) == (FinishReason.STOP, 200)
    before = [at for at in outcome.tokens_s if at < faulty.cell.started_s + AT_S]
    assert 10 < len(before) < 190
    assert sum(loads(faulty).values()) == 2


def test_an_idle_instance_that_is_killed_is_loaded_again_for_its_minimum(tmp_path: Path) -> None:
    """And the request of its neighbour goes on."""
    small = 'name = "small"\n'
    text = SMALL.replace(small, small + "scaling = { replicas_min = 1 }\n")
    faulty, (outcome,) = run(plan(scenario(tmp_path, text)), fault(FaultKind.LOSE, chance=0.9))
    assert (outcome.end, len(outcome.tokens_s)) == (FinishReason.STOP, 200)
    assert loads(faulty) == {"cpu": 2, "gpu-1": 1}, "the next one goes where none has broken"
    assert "small" in {i.deployment for i in faulty.cell.core.cell.instances.values()}


def test_an_agent_whose_name_is_still_taken_is_started_until_it_is_taken_in(made: CellPlan) -> None:
    """Its machine went without a word and is back before the lease has run out."""
    faulty, _ = run(made, fault(FaultKind.VANISH))
    (node,) = (node for node in faulty.cell.nodes if node.node_id == "cpu")
    run_id = faulty.cell.core.cell.nodes[node.node_id].hello.run_id
    assert int(run_id.rpartition("-")[2]) > 3


def test_a_fault_that_meets_nothing_is_none(made: CellPlan) -> None:
    early = fault(FaultKind.CANCEL)
    faulty = FaultyRun(made, [early], check=True)
    faulty.run([Arrival(0.0, "small", 10, 2)])
    assert faulty.counts().faults == ()


def test_faults_that_overlap_end_each_for_itself(made: CellPlan) -> None:
    """Those that began 0.3 s later end 0.3 s later."""

    def looks() -> None:
        store, links = faulty.cell.store, faulty.cell.links
        seen.append((store.away, 0 in store.cut_from, ("cpu", 0) in links._cut))

    kinds = (FaultKind.STORE_AWAY, FaultKind.CUT_STORE, FaultKind.CUT_NODE)
    first = [fault(kind) for kind in kinds]
    later = [fault(kind) for kind in (FaultKind.STORE_AWAY, FaultKind.CUT_LEADER)]
    later = [replace(one, at_s=AT_S + 0.3, until_s=AT_S + 2.3) for one in later]
    faulty = FaultyRun(replace(made, controllers=2), [*first, *later], check=True)
    seen: list[tuple[int, bool, bool]] = []
    for after_s in (2.1, 2.4):
        faulty.cell.clock.call_at(faulty.cell.started_s + AT_S + after_s, looks)
    faulty.run([LONG])
    assert seen == [(1, True, True), (0, False, False)]


KNOWN = known_model("llama-3.2-3b")
MODEL = KNOWN.info
"""The model takes 6 GB; the node has room for one and a half."""


class Node:
    def __init__(self, *, shares: bool = False, unload_s: float = 0.5) -> None:
        self.clock = HeapClock()
        self.engine_faults = EngineFaults()
        self.spent_s = 0.0
        costs = next(c for c in KNOWN.costs.values() if c.profile.device is DeviceKind.GPU)
        if shares:
            shared = replace(costs.footprint, shared_bytes=costs.footprint.weights_bytes)
            costs = replace(costs, footprint=shared)
        self.costs: ModelCosts = costs
        self.engine = FaultyEngine(
            models={MODEL.model_id: costs},
            costs=NodeCosts(unload_s=unload_s),
            memory_bytes=costs.footprint.instance_bytes(64) * 3 // 2,
            spend=self._spend,
            engine_faults=self.engine_faults,
            clock=self.clock,
        )

    def _spend(self, seconds: float) -> None:
        self.spent_s += seconds

    def load(self, name: str, kv_blocks: int = 64) -> float:
        """Seconds that it took, as the engine says."""
        order = LoadOrder(
            instance_id=InstanceId(name),
            deployment=DeploymentName("d"),
            model=MODEL,
            model_path=Path("none"),
            kv_blocks=kv_blocks,
            context_tokens_max=512,
            batch_max=4,
        )
        return self.engine.load(order, lambda phase, share: None).elapsed_s

    def step(self) -> float:
        return self.engine.step(InstanceId("a"), 256).elapsed_s


@pytest.fixture
def node() -> Node:
    return Node()


def test_a_slow_load_takes_as_many_times_as_long_until_it_heals(node: Node) -> None:
    quick_s = node.load("a")
    node.engine.unload(InstanceId("a"))
    node.clock.run_until(1.0)
    node.engine_faults.strike(FaultKind.SLOW_LOADS, 4.0)
    node.spent_s = 0.0
    assert node.load("a") == pytest.approx(4 * quick_s)
    assert node.spent_s == pytest.approx(4 * quick_s)
    node.engine.unload(InstanceId("a"))
    node.clock.run_until(2.0)
    node.engine_faults.heal(FaultKind.SLOW_LOADS)
    assert node.load("a") == quick_s


def test_iterations_take_longer_than_their_tables_say(node: Node) -> None:
    node.load("a")
    node.engine.submit(
        InstanceId("a"),
        EngineRequest(
            request_id=RequestId("r"),
            prompt_tokens=(1,) * 8,
            sampling=SamplingParams(max_tokens=9, ignore_eos=True),
        ),
    )
    node.step()
    node.spent_s = 0.0
    quick_s = node.step()
    node.engine_faults.strike(FaultKind.WRONG_PROFILE, 2.0)
    assert node.step() == pytest.approx(2 * quick_s, rel=0.01)
    assert node.spent_s == pytest.approx(3 * quick_s, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (FaultKind.FAILING_LOADS, EngineError),
        (FaultKind.FAILING_STEPS, EngineError),
        (FaultKind.FAILING_RESIZES, OutOfMemory),
    ],
)
def test_as_many_calls_fail_as_were_to(node: Node, kind: FaultKind, error: type[Exception]) -> None:
    if kind is not FaultKind.FAILING_LOADS:
        node.load("a")
    calls: dict[FaultKind, Callable[[], float]] = {
        FaultKind.FAILING_LOADS: lambda: node.load("a"),
        FaultKind.FAILING_STEPS: node.step,
        FaultKind.FAILING_RESIZES: lambda: node.engine.resize_kv(InstanceId("a"), 32).elapsed_s,
    }
    node.engine_faults.strike(kind, 2.9)
    for _ in range(2):
        with pytest.raises(error, match="trouble"):
            calls[kind]()
    calls[kind]()
    assert node.engine_faults.overbooked == []


def test_memory_is_taken_until_the_unload_has_ended(node: Node) -> None:
    node.load("a")
    node.engine.unload(InstanceId("a"))
    with pytest.raises(OutOfMemory):
        node.load("b")
    assert len(node.engine_faults.overbooked) == 1, "somebody thought that it was free"
    node.clock.run_until(0.5)
    node.load("b")
    assert node.engine.held_bytes() == node.costs.footprint.instance_bytes(64)


def test_so_are_weights_that_are_taken_over_and_leave_again() -> None:
    """Until the later of the two unloads has ended."""
    node = Node(shares=True)
    for name, until_s in (("a", 0.25), ("b", 0.5)):
        node.load(name)
        node.engine.unload(InstanceId(name))
        node.clock.run_until(until_s)
    assert node.engine.held_bytes() > node.costs.footprint.weights_bytes, "with b's own"
    node.clock.run_until(0.75)
    assert node.engine.held_bytes() == 0


def test_an_unload_that_takes_no_time_has_given_its_memory_back() -> None:
    node = Node(unload_s=0.0)
    node.load("a")
    node.engine.unload(InstanceId("a"))
    node.load("b")
    assert node.engine_faults.overbooked == []


@pytest.mark.parametrize(
    ("kind", "follows"),
    [
        (FaultKind.CUT_STORE, True),
        (FaultKind.CUT_LEADER, True),
        (FaultKind.FREEZE_LEADER, True),
        (FaultKind.RESET_SESSIONS, True),
        (FaultKind.KILL_CONTROLLER, True),
        (FaultKind.RESTORE, True),
        (FaultKind.STORE_AWAY, False),
    ],
)
def test_who_has_a_key_goes_on_under_the_one_that_stood_by(
    made: CellPlan, kind: FaultKind, follows: bool
) -> None:
    """And nothing is loaded anew."""
    standby = replace(made, resumes=True, controllers=2)
    faulty, (other, keyed) = run(standby, fault(kind), LONG._replace(at_s=0.5))
    assert (keyed.end, len(keyed.tokens_s)) == (FinishReason.STOP, 200)
    assert other.end is (FinishReason.FAILED if follows else FinishReason.STOP)
    assert (faulty.cell.controller.epoch > 1) == follows
    assert loads(faulty) == {"cpu": 1}


@pytest.mark.parametrize("chance", [0.0, 0.9])
def test_a_stream_that_breaks_goes_on_at_the_same_controller(made: CellPlan, chance: float) -> None:
    """Its controller felt it at once, or when its client came again."""
    keyed = replace(made, resumes=True)
    one = replace(fault(FaultKind.BREAK_STREAM, chance=chance), until_s=AT_S + 1.0)
    _, (_, outcome) = run(keyed, one, LONG._replace(at_s=0.5))
    assert (outcome.end, len(outcome.tokens_s)) == (FinishReason.STOP, 200)
