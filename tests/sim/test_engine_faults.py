"""Engines in trouble: slow, failing, and with memory that is taken until a call has ended."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.domain.errors import EngineError, OutOfMemory
from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.reasons import DeviceKind
from mesh.domain.request import SamplingParams
from mesh.domain.steps import EngineRequest, LoadOrder
from mesh.sim.clock import HeapClock
from mesh.sim.costs import ModelCosts, NodeCosts
from mesh.sim.faults import EngineFaults, FaultKind, FaultyEngine
from mesh.sim.testbed import known_model

KNOWN = known_model("llama-3.2-3b")
MODEL = KNOWN.info
"""The model takes 6 GB; the node has room for one and a half."""


class Node:
    def __init__(self, *, shares: bool = False) -> None:
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
            costs=NodeCosts(unload_s=0.5),
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
            output_tokens=(),
            sampling=SamplingParams(max_tokens=9, ignore_eos=True),
            stop_token_ids=(),
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
