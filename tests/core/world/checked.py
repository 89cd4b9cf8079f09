"""What holds of a world after every call, and what holds once it has come to rest."""

from hypothesis.stateful import RuleBasedStateMachine, invariant

from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.domain.deployment import Deployment
from mesh.domain.lifecycle import InstanceState
from mesh.sim.invariants import check_rest
from mesh.sim.invariants.cell import check_callers
from tests.core.cells import FOOTPRINT, MODEL
from tests.core.world.cell import REST_STEP_S, World

LEAST_BYTES = FOOTPRINT.instance_bytes(FOOTPRINT.blocks_for(MODEL.context_tokens_max))
"""The bytes of an instance that any request may be placed on."""


def _made(entry: DeploymentEntry) -> Deployment:
    assert entry.deployment is not None
    return entry.deployment


class CheckedCell(RuleBasedStateMachine):
    """The rules come with the tests. The cores are checked after each of their events, as in all
    tests; `World` and `StrictEngine` check as they go.
    """

    world: World

    @invariant()
    def every_open_request_is_queued_or_running(self) -> None:
        check_callers(self.world.core.cell, self.world.callers.open_ids())

    @invariant()
    def nobody_waits_for_long(self) -> None:
        self.world.watch.look(self.world.core, self.world.clock.now_s())

    @invariant()
    def engines_hold_no_more_than_is_tracked_of_them(self) -> None:
        self.world.check_engines()

    def _check_minimum(self, entry: DeploymentEntry) -> None:
        """It is kept as far as memory goes. What is loaded ahead of a call comes beside it."""
        called = [instance for instance in entry.instances.values() if not instance.prefetched]
        assert len(called) <= entry.spec.scaling.replicas_min
        if len(entry.instances) < entry.spec.scaling.replicas_min:
            taken = [i.node for i in entry.instances.values()]
            for node in self.world.core.cell.nodes.values():
                assert node in taken or node.free_bytes_for(_made(entry)) < LEAST_BYTES

    def teardown(self) -> None:
        """Once the faults end, every request ends, and idle cells are empty but for minima."""
        for node in self.world.nodes:
            node.engine.heal()
        self.world.settle(15.0)
        for node in self.world.nodes:
            self.world.drain(node.core_id(), undo=True)
        self.world.settle(90.0, REST_STEP_S)
        assert all(self.world.operations.values()), "an operation was never answered"
        assert not self.world.callers.open_ids(), "requests are stuck"
        cell = self.world.core.cell
        check_rest(cell, {node.core_id(): node.engine for node in self.world.nodes})
        for entry in cell.deployments.values():
            self._check_minimum(entry)
        for instance in cell.instances.values():
            parked = instance.state is InstanceState.PARKED
            short = self.world.watch.seen["short shrinks"]
            assert not parked or instance.kv_blocks == 1 or short
