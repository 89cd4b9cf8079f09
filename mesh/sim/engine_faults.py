"""What is wrong with a virtual node's engine: slow loads, failing calls, times that no table knows.

`EngineFaults` outlast the engine, as a broken disk outlasts a process; faults are written into
them, and the engine looks at them in every call. What an unload or a shrink gives back is taken
until the call has ended, for a real engine may be no quicker. Before: `injection`. After: `engine`,
which does the work.
"""

import random
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from functools import partial

from mesh.domain.errors import EngineError, OutOfMemory
from mesh.domain.ids import InstanceId, ModelId, RequestId
from mesh.domain.messages import InstanceLoaded, KvResized
from mesh.domain.model import Footprint
from mesh.domain.steps import Decode, LoadOrder, Prefill, StepResult
from mesh.domain.values import dataclass
from mesh.memory.shared_weights import SharedWeights
from mesh.runtime.clock import Clock
from mesh.runtime.engine import Progress
from mesh.sim.costs import ModelCosts, NodeCosts
from mesh.sim.engine import CostEngine
from mesh.sim.faults import FaultKind
from mesh.sim.virtual_engine import NO_LENGTHS, kind_of


@dataclass(slots=True)
class EngineFaults:
    """The faults of one node's engine. Counts are of calls that will fail; factors are of the time
    that calls take.
    """

    loads_failing: int = 0
    steps_failing: int = 0
    resizes_failing: int = 0
    load_factor: float = 1.0
    step_factor: float = 1.0
    freeze_s: float = 0.0
    """The time that the next iteration loses."""
    overbooked: list[str] = field(default_factory=list)
    """Calls for which there was no memory: the controller has promised some of it twice."""

    def strike(self, kind: FaultKind, size: float) -> None:
        """`size` is the factor, the seconds, or the number of calls that will fail (rounded)."""
        match kind:
            case FaultKind.SLOW_LOADS:
                self.load_factor = size
            case FaultKind.WRONG_PROFILE:
                self.step_factor = size
            case FaultKind.FREEZE:
                self.freeze_s = size
            case FaultKind.FAILING_LOADS:
                self.loads_failing = int(size)
            case FaultKind.FAILING_STEPS:
                self.steps_failing = int(size)
            case FaultKind.FAILING_RESIZES:
                self.resizes_failing = int(size)
            case _:
                raise ValueError(f"{kind} is nothing that ails an engine")

    def heal(self, kind: FaultKind) -> None:
        """All is well again; calls that have not failed by now do not."""
        factor = kind in (FaultKind.SLOW_LOADS, FaultKind.WRONG_PROFILE)
        self.strike(kind, 1.0 if factor else 0.0)


_LEAVING = "leaving"


class FaultyEngine(CostEngine):
    """A cost-model engine that fails, and takes its time, as its node's faults say."""

    def __init__(
        self,
        *,
        models: Mapping[ModelId, ModelCosts],
        costs: NodeCosts,
        memory_bytes: int,
        spend: Callable[[float], None],
        engine_faults: EngineFaults,
        clock: Clock,
        lengths: Mapping[RequestId, int] = NO_LENGTHS,
        drawn: random.Random | None = None,
    ) -> None:
        super().__init__(
            models=models,
            costs=costs,
            memory_bytes=memory_bytes,
            spend=spend,
            now_s=clock.now_s,
            lengths=lengths,
            drawn=drawn,
        )
        self._engine_faults = engine_faults
        self._clock = clock
        self._leaving_bytes = 0
        """The memory that calls give back which have not ended."""
        self._leaving_weights: dict[Hashable, SharedWeights] = {}
        """As well, by their kind: whoever loads them meanwhile takes them over."""

    def load(self, order: LoadOrder, progress: Progress) -> InstanceLoaded:
        engine_faults = self._engine_faults
        if engine_faults.loads_failing:
            engine_faults.loads_failing -= 1
            self._spend(self._costs.load_s)
            raise EngineError(f"instance {order.instance_id} does not load: the node is in trouble")
        with self._noting_overbooked():
            return super().load(order, progress)

    def swap(self, instance_id: InstanceId, share: float) -> None:
        engine_faults = self._engine_faults
        if engine_faults.loads_failing:
            engine_faults.loads_failing -= 1
            raise EngineError(f"instance {instance_id} is not swapped: the node is in trouble")
        seconds, before_bytes = self._swap_s(instance_id, share), self.held_bytes()
        with self._noting_overbooked():
            super().swap(instance_id, share)
        self._leave(before_bytes - self.held_bytes(), seconds)

    @contextmanager
    def _noting_overbooked(self) -> Iterator[None]:
        """Memory that is missing, though cached blocks have gone for what comes and for what is
        leaving, was promised twice.
        """
        try:
            yield
        except OutOfMemory as error:
            self._engine_faults.overbooked.append(error.message)
            raise

    def unload(self, instance_id: InstanceId) -> None:
        instance = self._instances.get(instance_id)
        # Nobody waits for what was cached beyond its size: it is no part of what its end frees.
        beyond = 0 if instance is None else instance.pool.extra * instance.pool.block_bytes
        shared = None if instance is None else instance.pool.shared
        before_bytes, kept_bytes = self.held_bytes() - beyond, -self.kept_bytes()
        super().unload(instance_id)
        kept_bytes += self.kept_bytes()
        given_bytes = before_bytes - self.held_bytes() + min(kept_bytes, beyond)
        if instance is not None and shared and not self._is_shared(instance.order):
            self._leave_weights(shared)
            given_bytes -= shared.size_bytes
        self._leave(given_bytes, self._costs.unload_s)

    def step(
        self, instance_id: InstanceId, prefill: Prefill, iterations: int = 1, decode: Decode = None
    ) -> StepResult:
        engine_faults = self._engine_faults
        if engine_faults.steps_failing:
            engine_faults.steps_failing -= 1
            raise EngineError(f"instance {instance_id} does not compute: the node is in trouble")
        return super().step(instance_id, prefill, iterations, decode)

    def _load_alone_s(self, weights_bytes: int) -> float:
        return super()._load_alone_s(weights_bytes) * self._engine_faults.load_factor

    def _swap_s(self, instance_id: InstanceId, share: float) -> float:
        return super()._swap_s(instance_id, share) * self._engine_faults.load_factor

    def _slower(self) -> float:
        return super()._slower() * self._engine_faults.step_factor

    def _lost_s(self) -> float:
        frozen_s, self._engine_faults.freeze_s = self._engine_faults.freeze_s, 0.0
        return frozen_s

    def resize_kv(self, instance_id: InstanceId, kv_blocks: int) -> KvResized:
        engine_faults = self._engine_faults
        if engine_faults.resizes_failing:
            engine_faults.resizes_failing -= 1
            raise OutOfMemory(f"instance {instance_id} is not resized: the node is in trouble")
        before_bytes = self.held_bytes()
        with self._noting_overbooked():
            resized = super().resize_kv(instance_id, kv_blocks)
        self._leave(before_bytes - self.held_bytes(), resized.elapsed_s)
        return resized

    def held_bytes(self) -> int:
        weights_bytes = sum(shared.size_bytes for shared in self._leaving_weights.values())
        return super().held_bytes() + self._leaving_bytes + weights_bytes

    def _enter(self, order: LoadOrder, footprint: Footprint) -> tuple[int, ...]:
        taken = self._leaving_weights.pop(kind_of(order), None)
        try:
            return super()._enter(order, footprint)
        except EngineError:
            if taken is not None:
                self._leaving_weights[taken.key] = taken
            raise

    def _leave_weights(self, shared: SharedWeights) -> None:
        """The last that has them is being unloaded."""
        self._leaving_weights[shared.key] = shared

        def end() -> None:
            # They may have been taken over meanwhile, and be leaving with another instance.
            if self._leaving_weights.get(shared.key) is shared:
                del self._leaving_weights[shared.key]

        self._clock.call_at(self._clock.now_s() + self._costs.unload_s, end)

    def _leave(self, given_bytes: int, elapsed_s: float) -> None:
        """The call that is being made gives memory back, once it has ended: at once, if it takes no
        time, as its lane tells of its end before the clock goes on.
        """
        if given_bytes <= 0 or elapsed_s <= 0.0:
            return
        self._note_leaving(given_bytes)
        at_s = self._clock.now_s() + elapsed_s
        self._clock.call_at(at_s, partial(self._note_leaving, -given_bytes))

    def _note_leaving(self, more_bytes: int) -> None:
        """Cached blocks do not take what is leaving."""
        self._leaving_bytes += more_bytes
        self._budget.begin_load(_LEAVING, self._leaving_bytes)
