"""A deployment's instances in its policy's order, kept as their batches change."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mesh.domain.ids import InstanceId
from mesh.domain.reasons import DeviceKind
from mesh.policy.interface import Rank
from mesh.policy.registry import policy
from mesh.request.candidates import Candidates

rank: Callable[[Any], Rank] = policy("llm-mesh").instance_rank


@dataclass(eq=False, kw_only=True)
class Instance:
    instance_id: InstanceId
    device: DeviceKind = DeviceKind.CPU
    batch: int = 0


def ordered(*instances: Instance) -> list[InstanceId]:
    candidates: Candidates[Any] = Candidates(rank)
    for instance in instances:
        candidates.rank(instance)
    return [instance.instance_id for instance in candidates]


def test_cpus_come_first_then_the_largest_batch_then_the_lesser_id() -> None:
    small = Instance(instance_id=InstanceId("a"), batch=1)
    twin = Instance(instance_id=InstanceId("b"), batch=1)
    large = Instance(instance_id=InstanceId("c"), batch=5)
    gpu = Instance(instance_id=InstanceId("d"), batch=8, device=DeviceKind.GPU)
    assert ordered(gpu, twin, small, large) == ["c", "a", "b", "d"]


class CandidatesMachine(RuleBasedStateMachine):
    """Against sorting all of them whenever one is asked for."""

    def __init__(self) -> None:
        super().__init__()
        devices = (DeviceKind.CPU, DeviceKind.CPU, DeviceKind.GPU)
        self.all = [
            Instance(instance_id=InstanceId(f"i{n}"), device=device)
            for n, device in enumerate(devices)
        ]
        self.inside: set[InstanceId] = set()
        self.candidates: Candidates[Any] = Candidates(rank)

    @rule(which=st.integers(0, 2), batch=st.integers(0, 3))
    def rank(self, which: int, batch: int) -> None:
        instance = self.all[which]
        instance.batch = batch
        self.candidates.rank(instance)
        self.inside.add(instance.instance_id)

    @rule(which=st.integers(0, 2))
    def discard(self, which: int) -> None:
        self.candidates.discard(self.all[which])
        self.inside.discard(self.all[which].instance_id)

    @invariant()
    def in_order(self) -> None:
        inside = [instance for instance in self.all if instance.instance_id in self.inside]
        assert list(self.candidates) == sorted(inside, key=lambda i: (rank(i), i.instance_id))
        assert len(self.candidates) == len(inside)


TestCandidates = CandidatesMachine.TestCase
