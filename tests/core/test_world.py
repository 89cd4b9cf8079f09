"""Both cores under random events and faults: nothing is lost, doubled, stuck, or promised twice."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from mesh.domain.events import (
    DeleteRequested,
    DeployRequested,
    OperationCancelled,
    ProfileRequested,
    ScaleRequested,
    UndoRequested,
)
from mesh.domain.ids import DeploymentName, OperationId
from mesh.domain.reasons import RefusalReason
from mesh.domain.slo import Slo
from mesh.runtime.node_actions import Lane
from tests.core.cells import FOOTPRINT, MIB, OTHER_MODEL, deployment
from tests.core.world.cell import World
from tests.core.world.checked import CheckedCell
from tests.support.depth import DEEP
from tests.support.profiles import PROFILE

EXAMPLES = 30 if DEEP else 5
"""Longer runs, and more: see test_world_seeds."""
NODES = st.integers(0, 2)
PROMPTS = st.sampled_from([1, 8, 100, 300, 500, 600])
ANSWERS = st.sampled_from([1, 8, 40, 120, 400])
"""Tokens; most of them more than the deployments' histories let expect."""
NAMES = st.sampled_from([DeploymentName(name) for name in "abcd"])
MEMORY_BYTES = (330 * MIB, 225 * MIB, 112 * MIB)
"""Room for three instances, for two and for one, all with little KV: four deployments compete."""


class CellMachine(CheckedCell):
    """Under a policy that validates: who waits has been refused for want of time, or of room."""

    rule_name = "llm-mesh"
    footprint, memory_bytes = FOOTPRINT, MEMORY_BYTES

    def __init__(self) -> None:
        super().__init__()
        deployments = (
            deployment("a", slo=Slo(ttft_s=8.0, tpot_s=0.5)),
            deployment("b", replicas_min=1, slo=Slo(ttft_s=0.05, tpot_s=0.004)),
            deployment("c", keep_alive_s=20.0, replicas_max=1, slo=Slo(ttft_s=8.0, tpot_s=1.0)),
            deployment("d", keep_alive_s=0.0, slo=Slo(ttft_s=0.5, tpot_s=0.03)),
        )
        stated = (("scripted", self.footprint),)
        self.world = World(
            tuple([replace(made, footprints=stated) for made in deployments]),
            self.memory_bytes,
            rule=self.rule_name,
            profiles=(PROFILE,),
            footprint=self.footprint,
        )
        self.worked = self.faults = 0
        """Calls of rules that let nodes work, and of those that break something."""
        self.profiles: list[OperationId] = []

    def is_calm(self) -> bool:
        """Nodes get to work between two faults."""
        return self.faults <= self.worked

    @initialize(up=st.sampled_from([True, True, True, False]))
    def begin(self, up: bool) -> None:
        """Often enough all nodes are there, so that there is something to go wrong."""
        for node in self.world.nodes if up else ():
            node.connect()
            node.run_all()

    @rule(name=NAMES, prompt=PROMPTS, max_tokens=ANSWERS, count=st.integers(1, 6))
    def invoke(self, name: DeploymentName, prompt: int, max_tokens: int, count: int) -> None:
        for n in range(count):
            self.world.invoke(name, (prompt + n,) * prompt, max_tokens)

    @rule(name=NAMES, prompt=PROMPTS, max_tokens=ANSWERS, count=st.integers(2, 6))
    def ask_for_several(
        self, name: DeploymentName, prompt: int, max_tokens: int, count: int
    ) -> None:
        """More than an instance has places for, too."""
        first = self.world.invoke(name, (prompt,) * prompt, max_tokens, answers=count)
        for _ in range(count - 1):
            self.world.invoke(name, (prompt,) * prompt, max_tokens, first=first)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        running = self.world.callers.open_ids()
        if running:
            self.world.cancel(data.draw(st.sampled_from(running)))

    @rule(node=NODES, steps=st.integers(1, 6), step_s=st.sampled_from([0.0, 0.001, 0.01, 0.1]))
    def compute(self, node: int, steps: int, step_s: float) -> None:
        """Slower and quicker than predicted."""
        for _ in range(steps):
            self.world.clock.advance(step_s)
            self.world.nodes[node].lanes.run_one(Lane.COMPUTE)

    @rule(rounds=st.sampled_from([2, 10, 40, 120]), step_s=st.sampled_from([0.001, 0.01, 0.1]))
    def serve(self, rounds: int, step_s: float) -> None:
        """Every node and link does a little."""
        self.worked += 1
        for _ in range(rounds):
            for node in self.world.nodes:
                node.deliver_down()
                node.lanes.run_one(Lane.COMPUTE)
                node.load()
                node.deliver_up()
            self.world.clock.advance(step_s)

    @rule(node=NODES)
    def loading(self, node: int) -> None:
        self.world.nodes[node].load()

    @rule(node=NODES, count=st.integers(1, 6))
    def deliver_up(self, node: int, count: int) -> None:
        for _ in range(count):
            self.world.nodes[node].deliver_up()

    @rule(node=NODES, count=st.integers(1, 6))
    def deliver_down(self, node: int, count: int) -> None:
        for _ in range(count):
            self.world.nodes[node].deliver_down()

    @rule(node=NODES)
    def connect(self, node: int) -> None:
        self.world.nodes[node].connect()

    @rule(node=NODES)
    def dial(self, node: int) -> None:
        self.world.nodes[node].dial()

    @precondition(is_calm)
    @rule(node=NODES)
    def break_link(self, node: int) -> None:
        self.faults += 1
        self.world.nodes[node].break_link()

    @precondition(is_calm)
    @rule(node=NODES, noticed=st.booleans())
    def crash(self, node: int, noticed: bool) -> None:
        self.faults += 1
        self.world.nodes[node].crash(noticed=noticed)

    @precondition(is_calm)
    @rule(node=NODES)
    def fail_a_load(self, node: int) -> None:
        self.faults += 1
        self.world.nodes[node].engine.script.fail_loads += 1

    @precondition(is_calm)
    @rule(node=NODES)
    def fail_a_step(self, node: int) -> None:
        self.faults += 1
        self.world.nodes[node].engine.script.fail_steps += 1

    @precondition(is_calm)
    @rule(node=NODES, pick=st.integers(0, 7))
    def lose_an_instance(self, node: int, pick: int) -> None:
        """Whatever it does: its process is killed."""
        engine = self.world.nodes[node].engine
        held = [memory.instance_id for memory in engine.memory()]
        if held:
            self.faults += 1
            engine.lose(held[pick % len(held)])

    @precondition(is_calm)
    @rule(node=NODES)
    def fail_a_measurement(self, node: int) -> None:
        self.faults += 1
        self.world.nodes[node].engine.script.fail_measures += 1

    @precondition(is_calm)
    @rule(node=NODES)
    def fail_a_resize(self, node: int) -> None:
        self.faults += 1
        self.world.nodes[node].engine.script.fail_resizes += 1

    @rule(node=NODES)
    def run_well(self, node: int) -> None:
        self.worked += 1
        self.world.nodes[node].connect()
        self.world.nodes[node].run_all()

    @rule(by_s=st.sampled_from([0.1, 1.1, 5.0, 11.0, 31.0]))
    def advance(self, by_s: float) -> None:
        self.world.clock.advance(by_s)

    @precondition(is_calm)
    @rule(node=NODES, undo=st.booleans())
    def drain(self, node: int, undo: bool) -> None:
        self.faults += 1
        self.world.drain(self.world.nodes[node].core_id(), undo=undo)

    @rule(name=NAMES, low=st.integers(0, 4))
    def scale(self, name: DeploymentName, low: int) -> None:
        self.world.operate(
            lambda op: ScaleRequested(
                operation_id=op, name=name, replicas_min=low, replicas_max=max(low, 1)
            )
        )

    @rule(name=NAMES, low=st.integers(0, 1), changed=st.booleans(), cancelled=st.booleans())
    def deploy(self, name: DeploymentName, low: int, changed: bool, cancelled: bool) -> None:
        spec = deployment(name, replicas_min=low).spec
        if changed:
            spec = replace(spec, source=OTHER_MODEL.source)
        made = self.world.operate(lambda op: DeployRequested(operation_id=op, spec=spec))
        if cancelled:
            self.world.tell(OperationCancelled(operation_id=made))

    @rule(name=NAMES, to=st.none() | st.integers(1, 3))
    def undo(self, name: DeploymentName, to: int | None) -> None:
        self.world.operate(lambda op: UndoRequested(operation_id=op, name=name, to=to))

    @rule(name=NAMES, node=st.none() | NODES)
    def profile(self, name: DeploymentName, node: int | None) -> None:
        node_id = None if node is None else self.world.nodes[node].core_id()
        made = self.world.operate(
            lambda op: ProfileRequested(operation_id=op, name=name, node_id=node_id)
        )
        self.profiles.append(made)

    @rule(data=st.data())
    def cancel_profile(self, data: st.DataObject) -> None:
        if self.profiles:
            made = data.draw(st.sampled_from(self.profiles))
            self.world.tell(OperationCancelled(operation_id=made))

    @precondition(lambda self: self.is_calm() and len(self.world.registry.deployments) > 2)
    @rule(name=NAMES)
    def delete(self, name: DeploymentName) -> None:
        self.faults += 1
        self.world.operate(lambda op: DeleteRequested(operation_id=op, name=name))

    @precondition(lambda self: self.is_calm() and self.world.epoch < 3)
    @rule()
    def restart_controller(self) -> None:
        self.faults += 1
        self.world.restart_controller()


class FirstComeCellMachine(CellMachine):
    """Under a policy that takes whatever there is room for."""

    rule_name = "fcfs"

    @invariant()
    def nobody_is_refused_for_want_of_time(self) -> None:
        reasons = {outcome.end for outcome in self.world.callers.outcomes}
        assert not reasons & FOR_WANT_OF_TIME
        assert all(held.refusals.verdict is None for held in self.world.core.cell.requests.values())


class SharingCellMachine(CellMachine):
    """Instances of one model share weights, and nodes have memory for no more than that."""

    footprint = replace(FOOTPRINT, shared_bytes=80 * MIB)
    memory_bytes = (190 * MIB, 145 * MIB, 112 * MIB)


FOR_WANT_OF_TIME = {
    RefusalReason.FIRST_TOKEN_LATE,
    RefusalReason.DELAYS_RUNNING,
    RefusalReason.TPOT_EXCEEDED,
}
CellMachine.TestCase.settings = settings(
    max_examples=2 * EXAMPLES, stateful_step_count=60, deadline=None, report_multiple_bugs=False
)
FirstComeCellMachine.TestCase.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=60, deadline=None, report_multiple_bugs=False
)
SharingCellMachine.TestCase.settings = FirstComeCellMachine.TestCase.settings
TestCell = CellMachine.TestCase
TestSharingCell = SharingCellMachine.TestCase
TestFirstComeCell = FirstComeCellMachine.TestCase
