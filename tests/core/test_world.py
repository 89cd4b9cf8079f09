"""Both cores under random events and faults: nothing is lost, doubled, stuck, or promised twice."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mesh.core.cell import DeploymentEntry, InstanceEntry
from mesh.domain.events import (
    DeleteRequested,
    DeployRequested,
    DrainRequested,
    OperationCancelled,
    ProfileRequested,
    ScaleRequested,
)
from mesh.domain.ids import DeploymentName, OperationId, RequestId
from mesh.domain.lifecycle import InstanceState, NodeState, RequestState
from mesh.domain.reasons import RefusalReason
from mesh.domain.slo import Slo
from mesh.runtime.node_actions import Lane
from tests.core.cells import FOOTPRINT, MIB, MODEL, deployment
from tests.core.world.cell import LIMITS, World
from tests.support.profiles import PROFILE

NODES = st.integers(0, 2)
PROMPTS = st.sampled_from([1, 8, 100, 300, 500, 600])
NAMES = st.sampled_from([DeploymentName(name) for name in "abcd"])
MEMORY_BYTES = (300 * MIB, 300 * MIB, 110 * MIB)
"""Room for two instances with little KV on two nodes, and for none on the third: four deployments
compete for it."""
LEAST_BYTES = FOOTPRINT.instance_bytes(FOOTPRINT.blocks_for(MODEL.context_tokens_max))
"""Of an instance that any request may be placed on."""


class CellMachine(RuleBasedStateMachine):
    """Under a policy that validates: who waits has been refused for want of time, or of room."""

    rule_name = "llm-mesh"

    def __init__(self) -> None:
        super().__init__()
        deployments = (
            deployment("a"),
            deployment("b", replicas_min=1, slo=Slo(ttft_s=0.05, tpot_s=0.004)),
            deployment("c", keep_alive_s=20.0, replicas_max=1, slo=Slo(ttft_s=8.0, tpot_s=1.0)),
            deployment("d", keep_alive_s=0.0, slo=Slo(ttft_s=0.5, tpot_s=0.03)),
        )
        self.world = World(deployments, MEMORY_BYTES, rule=self.rule_name, profiles=(PROFILE,))
        self.profiles: list[OperationId] = []
        self.room_since_s: dict[RequestId, float] = {}

    @initialize(up=st.booleans())
    def begin(self, up: bool) -> None:
        """Often enough all nodes are there, so that there is something to go wrong."""
        for node in self.world.nodes if up else ():
            node.connect()
            node.run_all()

    @rule(name=NAMES, prompt=PROMPTS, max_tokens=st.integers(1, 40), count=st.integers(1, 6))
    def invoke(self, name: DeploymentName, prompt: int, max_tokens: int, count: int) -> None:
        for n in range(count):
            self.world.invoke(name, (prompt + n,) * prompt, max_tokens)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        running = [r for r, c in self.world.clients.items() if not c.ended and not c.gone]
        if running:
            self.world.cancel(data.draw(st.sampled_from(running)))

    @rule(node=NODES, steps=st.integers(1, 6), step_s=st.sampled_from([0.0, 0.001, 0.01, 0.1]))
    def compute(self, node: int, steps: int, step_s: float) -> None:
        """Slower and quicker than predicted."""
        for _ in range(steps):
            self.world.clock.advance(step_s)
            self.world.nodes[node].lanes.run_one(Lane.COMPUTE)

    @rule(rounds=st.integers(1, 20), step_s=st.sampled_from([0.001, 0.01, 0.1]))
    def serve(self, rounds: int, step_s: float) -> None:
        """Every node and link does a little."""
        for _ in range(rounds):
            for node in self.world.nodes:
                node.deliver_down()
                node.lanes.run_one(Lane.COMPUTE)
                node.lanes.run_one(Lane.LOADING)
                node.deliver_up()
            self.world.clock.advance(step_s)

    @rule(node=NODES)
    def loading(self, node: int) -> None:
        self.world.nodes[node].lanes.run_one(Lane.LOADING)

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

    @rule(node=NODES)
    def break_link(self, node: int) -> None:
        self.world.nodes[node].break_link()

    @rule(node=NODES, noticed=st.booleans())
    def crash(self, node: int, noticed: bool) -> None:
        self.world.nodes[node].crash(noticed=noticed)

    @rule(node=NODES)
    def fail_a_load(self, node: int) -> None:
        self.world.nodes[node].engine.fail_loads += 1

    @rule(node=NODES)
    def fail_a_step(self, node: int) -> None:
        self.world.nodes[node].engine.fail_steps += 1

    @rule(node=NODES)
    def fail_a_measurement(self, node: int) -> None:
        self.world.nodes[node].engine.fail_measures += 1

    @rule(node=NODES)
    def fail_a_resize(self, node: int) -> None:
        self.world.nodes[node].engine.fail_resizes += 1

    @rule(node=NODES)
    def run_well(self, node: int) -> None:
        self.world.nodes[node].connect()
        self.world.nodes[node].run_all()

    @rule(by_s=st.sampled_from([0.1, 1.1, 5.0, 11.0, 31.0]))
    def advance(self, by_s: float) -> None:
        self.world.clock.advance(by_s)

    @rule(node=NODES, undo=st.booleans())
    def drain(self, node: int, undo: bool) -> None:
        node_id = self.world.nodes[node].core_id()
        if node_id in self.world.core.cell.nodes:
            self.world.operate(
                lambda op: DrainRequested(operation_id=op, node_id=node_id, undo=undo)
            )

    @rule(name=NAMES, low=st.integers(0, 4))
    def scale(self, name: DeploymentName, low: int) -> None:
        self.world.operate(
            lambda op: ScaleRequested(
                operation_id=op, name=name, replicas_min=low, replicas_max=max(low, 1)
            )
        )

    @rule(name=NAMES, low=st.integers(0, 1), cancelled=st.booleans())
    def deploy(self, name: DeploymentName, low: int, cancelled: bool) -> None:
        spec = deployment(name, replicas_min=low).spec
        made = self.world.operate(lambda op: DeployRequested(operation_id=op, spec=spec))
        if cancelled:
            self.world.tell(OperationCancelled(operation_id=made))

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

    @precondition(lambda self: len(self.world.deployments) > 2)
    @rule(name=NAMES)
    def delete(self, name: DeploymentName) -> None:
        self.world.operate(lambda op: DeleteRequested(operation_id=op, name=name))

    @precondition(lambda self: self.world.epoch < 3)
    @rule()
    def restart_controller(self) -> None:
        self.world.restart_controller()

    @invariant()
    def books_balance(self) -> None:
        cell = self.world.core.cell
        for node in cell.nodes.values():
            station = node.station
            assert station.promised_bytes == sum(station.size_bytes(i) for i in node.instances)
            assert station.tracked_bytes <= station.capacity_bytes
        for instance in cell.instances.values():
            self._check_instance(instance)
        for name, entry in cell.deployments.items():
            assert all(held.state is RequestState.QUEUED for held in entry.queue)
            assert all(i.deployment == name for i in entry.instances.values())
            assert entry.replicas() <= entry.spec.scaling.replicas_max

    def _check_instance(self, instance: InstanceEntry) -> None:
        assert instance.state is not InstanceState.GONE
        assert instance.node.instances[instance.instance_id] is instance
        assert instance.required_blocks == sum(
            held.required_blocks for held in instance.requests.values()
        )
        assert instance.batch <= instance.batch_max
        assert all(held.instance is instance for held in instance.requests.values())

    @invariant()
    def every_open_request_is_queued_or_running_in_one_place(self) -> None:
        cell = self.world.core.cell
        open_ids = {r for r, c in self.world.clients.items() if not c.ended and not c.gone}
        assert set(cell.requests) == open_ids
        places = [h.request.request_id for d in cell.deployments.values() for h in d.queue]
        places += [r for i in cell.instances.values() for r in i.requests]
        assert sorted(places) == sorted(open_ids)

    @invariant()
    def no_request_waits_long_for_room_that_is_there(self) -> None:
        """The end of a request is looked at on its node; all others are tried when it is time."""
        now_s, before, self.room_since_s = self.world.clock.now_s(), self.room_since_s, {}
        for entry in self.world.core.cell.deployments.values():
            if entry.queue and not entry.queue[0].refused:
                head = entry.queue[0].request
                ready = [i for i in entry.instances.values() if i.takes_now and not i.is_full]
                if any(_has_room(i, head.tokens_max) for i in ready):
                    since_s = before.get(head.request_id, now_s)
                    assert now_s <= since_s + LIMITS.place_retry_s
                    self.room_since_s[head.request_id] = since_s

    @invariant()
    def no_request_waits_for_an_instance_that_could_be_loaded(self) -> None:
        cell, now_s = self.world.core.cell, self.world.clock.now_s()
        for entry in cell.deployments.values():
            coming = any(i.state is InstanceState.LOADING for i in entry.instances.values())
            full = entry.replicas() >= entry.spec.scaling.replicas_max
            if not entry.queue or coming or full or now_s < entry.paused_until_s:
                continue
            taken = [i.node for i in entry.instances.values()]
            for node in cell.nodes.values():
                closed = node in taken or node.node_id in entry.avoided
                full = node.state is not NodeState.READY or node.free_bytes < LEAST_BYTES
                assert closed or full or entry.queue[0].refused

    @invariant()
    def a_waiting_request_is_tried_again_soon_and_waits_no_longer_than_it_may(self) -> None:
        now_s = self.world.clock.now_s()
        for entry in self.world.core.cell.deployments.values():
            if entry.queue:
                retry_at_s = self.world.core.cell.retry_at_s
                assert retry_at_s is not None
                assert now_s <= retry_at_s <= now_s + LIMITS.place_retry_s
            for held in entry.queue:
                assert now_s - held.queued_at_s <= LIMITS.queue_wait_s_max + LIMITS.place_retry_s

    @invariant()
    def nobody_is_overtaken_too_often(self) -> None:
        for held in self.world.core.cell.requests.values():
            assert held.overtaken <= LIMITS.overtaken_max

    @invariant()
    def an_iteration_is_under_way_only_where_requests_are(self) -> None:
        for node in self.world.core.cell.nodes.values():
            assert (node.iteration_started_s is None) == node.is_idle()

    @invariant()
    def an_instance_is_kept_for_a_profile_only_while_one_is_asked_for(self) -> None:
        cell = self.world.core.cell
        measured = [operation.instance for operation in cell.operations.values()]
        for instance in cell.instances.values():
            assert instance.profiling == (instance in measured)

    def _check_minimum(self, entry: DeploymentEntry) -> None:
        """It is kept as far as memory goes."""
        assert len(entry.instances) <= entry.spec.scaling.replicas_min
        if len(entry.instances) < entry.spec.scaling.replicas_min:
            taken = [i.node for i in entry.instances.values()]
            for node in self.world.core.cell.nodes.values():
                assert node in taken or node.free_bytes < LEAST_BYTES

    def teardown(self) -> None:
        """Once the faults end, every request ends, and idle cells are empty but for minima."""
        for node in self.world.nodes:
            engine = node.engine
            engine.fail_loads = engine.fail_steps = engine.fail_measures = engine.fail_resizes = 0
        self.world.settle(15.0)
        for node in self.world.nodes:
            self.drain(int(node.name[1:]), undo=True)
        self.world.settle(90.0)
        assert all(self.world.operations.values()), "an operation was never answered"
        for client in self.world.clients.values():
            assert client.ended or client.gone, "a request is stuck"
        self.books_balance()
        cell = self.world.core.cell
        assert cell.requests == {}
        assert cell.operations == {}
        assert not any(i.profiling for i in cell.instances.values())
        for entry in cell.deployments.values():
            self._check_minimum(entry)
        assert all(i.kv_blocks_used == 0 for i in cell.instances.values())
        for node in self.world.nodes:
            loaded = node.engine.held()
            assert set(loaded) == set(cell.nodes[node.core_id()].instances)
            assert all(count == 0 for count in loaded.values()), "a place was leaked"


def _has_room(instance: InstanceEntry, tokens: int) -> bool:
    """Whether its KV cache would hold so many tokens more, all else being as it is."""
    blocks = instance.required_blocks + instance.footprint.blocks_for(tokens)
    return blocks <= instance.promised_blocks


class FirstComeCellMachine(CellMachine):
    """Under a policy that takes whatever there is room for."""

    rule_name = "fcfs"

    @invariant()
    def nobody_is_refused_for_want_of_time(self) -> None:
        reasons = {client.reason for client in self.world.clients.values()}
        assert not reasons & FOR_WANT_OF_TIME
        assert all(held.refused is None for held in self.world.core.cell.requests.values())


FOR_WANT_OF_TIME = {
    RefusalReason.FIRST_TOKEN_LATE,
    RefusalReason.DELAYS_RUNNING,
    RefusalReason.TPOT_EXCEEDED,
}
CellMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, report_multiple_bugs=False
)
FirstComeCellMachine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=60, deadline=None, report_multiple_bugs=False
)
TestCell = CellMachine.TestCase
TestFirstComeCell = FirstComeCellMachine.TestCase
