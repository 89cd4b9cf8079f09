"""Which faults a run has, and when, and what is wrong with a virtual node's engine meanwhile.

A scenario says how often each kind of fault comes and when the last of them is over; `occurrences`
draws from its seed, before anything runs, the list of what comes of it. `EngineFaults` outlast the
engine, as a broken disk outlasts a process; faults are written into them, and the engine looks at
them in every call. What an unload or a shrink gives back is taken until the call has ended, for a
real engine may be no quicker. Before: `scenario`. After: `checking`, which makes faults happen, and
`engine`, which does the work.
"""

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from mesh.domain.errors import EngineError, InvalidInput, OutOfMemory
from mesh.domain.ids import InstanceId, ModelId, NodeId, RequestId
from mesh.domain.messages import InstanceLoaded, KvResized
from mesh.domain.model import Footprint
from mesh.domain.steps import Decode, LoadOrder, Prefill, StepResult
from mesh.memory.shares import Share
from mesh.runtime.clock import Clock
from mesh.runtime.engine import Progress
from mesh.sim.costs import ModelCosts, NodeCosts
from mesh.sim.engine import CostEngine
from mesh.sim.virtual_engine import NO_LENGTHS, kind_of


class FaultKind(StrEnum):
    """What can go wrong, beyond what the workload does."""

    CRASH = "crash"
    """A node's agent dies, and is started again."""
    VANISH = "vanish"
    """A machine goes without a word, and comes back."""
    BREAK = "break"
    """A link breaks; what was on its way is lost."""
    SILENCE = "silence"
    """Nothing gets through a link any more, in one direction or both, and nobody is told."""
    LATE = "late"
    """All messages of a node are late, each way."""
    STALL = "stall"
    """They are so late that welcomes come after the node has given up, and leases run out."""
    SLOW_LOADS = "slow_loads"
    """A node loads more slowly than ever."""
    FAILING_LOADS = "failing_loads"
    FAILING_STEPS = "failing_steps"
    FAILING_RESIZES = "failing_resizes"
    WRONG_PROFILE = "wrong_profile"
    """A node computes more slowly, or quicker, than its tables say."""
    FREEZE = "freeze"
    """A node stands still for a moment: one iteration takes so much longer."""
    KILL_CONTROLLER = "kill_controller"
    STOP_CONTROLLER = "stop_controller"
    """It ends as asked, and is started again."""
    CANCEL = "cancel"
    """A client goes away."""
    LOSE = "lose"
    """An instance ends by itself, busy or idle: its engine process is killed."""
    DRAIN = "drain"
    """An operator drains a node, and takes that back: requests move while all else goes wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How faults of a kind turn out: uniform within these bounds."""

    lasts_s: tuple[float, float] = (0.0, 0.0)
    """Until the node or the controller is back, or all is well again."""
    size: tuple[float, float] = (0.0, 0.0)
    """A factor, a number of calls, or seconds: see `checking`."""


UNTIL_S_MAX = 86_400.0
"""A day: every fault is drawn before the first of them happens."""
MIX = (0.0, 0.5, 1.0, 3.0)
"""What the rate of a kind is multiplied by, any alike, where each seed has its own mix."""
SHAPES: Mapping[FaultKind, Shape] = {
    FaultKind.CRASH: Shape(lasts_s=(0.1, 20.0)),
    FaultKind.VANISH: Shape(lasts_s=(0.1, 20.0)),
    FaultKind.BREAK: Shape(size=(0.0, 1.0)),
    FaultKind.SILENCE: Shape(size=(5.0, 15.0)),
    FaultKind.LATE: Shape(lasts_s=(0.5, 10.0), size=(0.01, 3.0)),
    FaultKind.STALL: Shape(lasts_s=(5.0, 40.0), size=(3.0, 14.0)),
    FaultKind.SLOW_LOADS: Shape(lasts_s=(5.0, 30.0), size=(2.0, 20.0)),
    FaultKind.FAILING_LOADS: Shape(lasts_s=(1.0, 20.0), size=(1.0, 4.0)),
    FaultKind.FAILING_STEPS: Shape(lasts_s=(1.0, 20.0), size=(1.0, 3.0)),
    FaultKind.FAILING_RESIZES: Shape(lasts_s=(1.0, 20.0), size=(1.0, 4.0)),
    FaultKind.WRONG_PROFILE: Shape(lasts_s=(5.0, 30.0), size=(0.5, 3.0)),
    FaultKind.FREEZE: Shape(lasts_s=(1.0, 5.0), size=(0.2, 3.0)),
    FaultKind.KILL_CONTROLLER: Shape(lasts_s=(0.1, 8.0)),
    FaultKind.STOP_CONTROLLER: Shape(lasts_s=(0.1, 8.0)),
    FaultKind.CANCEL: Shape(),
    FaultKind.LOSE: Shape(),
    FaultKind.DRAIN: Shape(lasts_s=(1.0, 20.0)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often things go wrong in a cell."""

    until_s: float
    """From the start of the workload; every fault is over by then."""
    per_minute: Mapping[FaultKind, float]
    """In the whole cell."""
    vary: bool = False
    """Each seed has its own mix: it leaves some kinds out, and has others more often. What many
    seeds of a single mix never meet, some mix has all the time.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One occurrence."""

    at_s: float
    """From the start of the workload."""
    kind: FaultKind
    node_id: NodeId
    """The node; it has no meaning for faults of no node."""
    until_s: float
    size: float
    chance: float
    """From 0 to 1, for what else there is to choose when it happens."""


def check_faults(faults: Faults) -> None:
    """Raises InvalidInput for what cannot be meant."""
    if not 0 < faults.until_s <= UNTIL_S_MAX:
        raise InvalidInput(
            f"faults: until_s is {faults.until_s:g}; it must be above 0 and at most {UNTIL_S_MAX:g}"
        )
    for kind, rate in faults.per_minute.items():
        if not 0 <= rate <= 600:
            raise InvalidInput(f"faults: {rate:g} {kind} a minute cannot be meant; 0 to 600 can")


def occurrences(faults: Faults, node_ids: Sequence[NodeId], seed: int) -> tuple[Fault, ...]:
    """The occurrences of all faults, ordered by time. Each kind is a Poisson process on its own, so
    that a further kind leaves the others alone.
    """
    found = [
        fault
        for kind in FaultKind
        for fault in _of_kind(kind, faults, node_ids, random.Random(f"{seed} {kind}"))
    ]
    return tuple(sorted(found, key=lambda fault: fault.at_s))


def _of_kind(
    kind: FaultKind, faults: Faults, node_ids: Sequence[NodeId], rng: random.Random
) -> list[Fault]:
    mixed = rng.choice(MIX) if faults.vary else 1.0
    rate = faults.per_minute.get(kind, 0.0) * mixed / 60
    found: list[Fault] = []
    at_s = rng.expovariate(rate) if rate else faults.until_s
    while at_s < faults.until_s:
        shape = SHAPES[kind]
        found.append(
            Fault(
                at_s=at_s,
                kind=kind,
                node_id=rng.choice(node_ids),
                until_s=min(at_s + rng.uniform(*shape.lasts_s), faults.until_s),
                size=rng.uniform(*shape.size),
                chance=rng.random(),
            )
        )
        at_s += rng.expovariate(rate)
    return found


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
        self._leaving_weights: dict[Hashable, Share] = {}
        """As well, by their kind: whoever loads them meanwhile takes them over."""

    def load(self, order: LoadOrder, progress: Progress) -> InstanceLoaded:
        engine_faults = self._engine_faults
        if engine_faults.loads_failing:
            engine_faults.loads_failing -= 1
            self._spend(self._costs.load_s)
            raise EngineError(f"instance {order.instance_id} does not load: the node is in trouble")
        try:
            return super().load(order, progress)
        except OutOfMemory as error:
            engine_faults.overbooked.append(error.message)
            raise

    def unload(self, instance_id: InstanceId) -> None:
        instance = self._instances.get(instance_id)
        # Nobody waits for what was cached beyond its size: it is no part of what its end frees.
        beyond = 0 if instance is None else instance.pool.extra * instance.pool.block_bytes
        before_bytes = self.held_bytes() - beyond
        super().unload(instance_id)
        given_bytes = before_bytes - self.held_bytes()
        if instance is not None and instance.pool.share and not self._is_shared(instance.order):
            self._leave_weights(instance.pool.share)
            given_bytes -= instance.pool.share.size_bytes
        self._leave(given_bytes, self._costs.unload_s)

    def step(
        self,
        instance_id: InstanceId,
        prefill: Prefill,
        iterations: int = 1,
        decode: Decode = None,
    ) -> StepResult:
        engine_faults = self._engine_faults
        if engine_faults.steps_failing:
            engine_faults.steps_failing -= 1
            raise EngineError(f"instance {instance_id} does not compute: the node is in trouble")
        return super().step(instance_id, prefill, iterations, decode)

    def _load_alone_s(self, weights_bytes: int) -> float:
        return super()._load_alone_s(weights_bytes) * self._engine_faults.load_factor

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
        try:
            resized = super().resize_kv(instance_id, kv_blocks)
        except OutOfMemory as error:
            engine_faults.overbooked.append(error.message)
            raise
        self._leave(before_bytes - self.held_bytes(), resized.elapsed_s)
        return resized

    def held_bytes(self) -> int:
        weights_bytes = sum(share.size_bytes for share in self._leaving_weights.values())
        return super().held_bytes() + self._leaving_bytes + weights_bytes

    def _enter(self, order: LoadOrder, footprint: Footprint) -> None:
        taken = self._leaving_weights.pop(kind_of(order), None)
        try:
            super()._enter(order, footprint)
        except EngineError:
            if taken is not None:
                self._leaving_weights[taken.key] = taken
            raise

    def _leave_weights(self, share: Share) -> None:
        """The last that has them is being unloaded."""
        self._leaving_weights[share.key] = share

        def end() -> None:
            # They may have been taken over meanwhile, and be leaving with another instance.
            if self._leaving_weights.get(share.key) is share:
                del self._leaving_weights[share.key]

        self._clock.call_at(self._clock.now_s() + self._costs.unload_s, end)

    def _leave(self, given_bytes: int, elapsed_s: float) -> None:
        """The call that is being made gives memory back, once it has ended."""
        if given_bytes <= 0:
            return
        self._leaving_bytes += given_bytes

        def end() -> None:
            self._leaving_bytes -= given_bytes

        self._clock.call_at(self._clock.now_s() + elapsed_s, end)
