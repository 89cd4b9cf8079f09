"""What a node's journal tells of its engine: how long iterations, loads, resizes and unloads took.

An iteration counts from its turn to the next decision, so that all of a node's own work is in it.
Times are points on the node's clock, which is its machine's. Before: `mesh.runtime.journal`. After:
`calibrating`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import field

from mesh.domain.actions import SendReport, StartMeasure, StartStep
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.messages import (
    InstanceGone,
    InstanceLoaded,
    KvResized,
    LoadInstance,
    ResizeKv,
    SubmitRequest,
    TokensReport,
    UnloadInstance,
)
from mesh.domain.model import Footprint
from mesh.domain.node_events import CommandReceived, HeartbeatDue, MeasureFinished, StepFinished
from mesh.domain.profile import IterationShape
from mesh.domain.values import dataclass
from mesh.runtime.journal import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """An iteration of any kind: a step, or a size that was computed for nobody."""

    shape: IterationShape
    began_s: float
    took_s: float
    """Until it was decided on."""
    engine_s: float
    """The part of `took_s` that was spent in the engine."""
    alone: bool
    """Neither a load, a resize nor an unload was under way meanwhile."""
    beside_load: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """A load, resize or unload."""

    began_s: float
    took_s: float


@dataclass(slots=True, kw_only=True)
class Observed:
    """In the order of their ends."""

    first_s: float | None = None
    """When the node decided for the first time."""
    steps: list[Iteration] = field(default_factory=list)
    primings: list[Iteration] = field(default_factory=list)
    loads: list[Spent] = field(default_factory=list)
    resizes: list[Spent] = field(default_factory=list)
    unloads: list[Spent] = field(default_factory=list)
    submitted_s: dict[RequestId, float] = field(default_factory=dict)
    """When a request reached the node that was placed at once."""
    tokens_s: dict[RequestId, list[float]] = field(default_factory=dict)
    """When each token was reported, by its index."""
    footprint: Footprint | None = None
    """The model's footprint, as the latest load measured it."""
    rss_bytes_max: int = 0
    """The most that the process said it takes."""
    engine_bytes_max: int = 0
    """The most that weights and KV caches came to, by the engine's books."""


def pooled(several: Sequence[Observed]) -> Observed:
    """What a node's calls took in several runs on one machine, in order; no requests."""
    return Observed(
        steps=[step for one in several for step in one.steps],
        primings=[priming for one in several for priming in one.primings],
        loads=[load for one in several for load in one.loads],
        resizes=[resize for one in several for resize in one.resizes],
        unloads=[unload for one in several for unload in one.unloads],
    )


AT_ONCE_S = 0.02
"""A request that was in the cell for longer than this had to wait for its place."""


class Observer:
    """Goes through a journal, decision by decision."""

    def __init__(self) -> None:
        self.observed = Observed()
        self._turn_s = 0.0
        """When the iteration under way began."""
        self._shape = IterationShape()
        """The shape that is being computed for nobody."""
        self._amid: dict[tuple[str, InstanceId], float] = {}
        """Loads, resizes and unloads under way: when they were ordered."""
        self._loaded_s = self._computed_s = 0.0
        """When the engine's lanes were last done with a call: what comes next waits for that."""
        self._alone = self._beside_load = False

    def run(self, decisions: Iterable[Decision]) -> Observed:
        for decision in decisions:
            event = decision.event
            if self.observed.first_s is None:
                self.observed.first_s = decision.now_s
            self._happened(event, decision.now_s)
            for action in decision.actions:
                self._decided(action, decision.now_s)
        return self.observed

    def _happened(self, event: object, now_s: float) -> None:
        seen = self.observed
        match event:
            case StepFinished(result=result):
                seen.steps.append(self._iteration(result.shape, result.elapsed_s, now_s))
            case MeasureFinished(elapsed_s=elapsed_s):
                seen.primings.append(self._iteration(self._shape, elapsed_s, now_s))
            case InstanceLoaded(instance_id=instance_id):
                seen.footprint = event.footprint
                self._end("load", instance_id, seen.loads, self._loaded_s, now_s)
                self._loaded_s = now_s
            case InstanceGone(instance_id=instance_id, error=""):
                self._end("unload", instance_id, seen.unloads, self._computed_s, now_s)
                self._computed_s = now_s
            case KvResized(instance_id=instance_id, elapsed_s=elapsed_s):
                self._amid.pop(("resize", instance_id), None)
                seen.resizes.append(Spent(began_s=now_s - elapsed_s, took_s=elapsed_s))
            case HeartbeatDue():
                seen.rss_bytes_max = max(seen.rss_bytes_max, event.rss_bytes)
                seen.engine_bytes_max = max(seen.engine_bytes_max, event.engine_bytes)
            case CommandReceived(command=SubmitRequest(order=order)):
                if order.age_s <= AT_ONCE_S and order.attempt == 1:
                    seen.submitted_s[order.request.request_id] = now_s
            case _:
                pass

    def _decided(self, action: object, now_s: float) -> None:
        match action:
            case StartStep():
                self._begin(now_s)
            case StartMeasure(shape=shape):
                self._shape = shape
                self._begin(now_s)
            case LoadInstance(instance_id=instance_id):
                self._disturb("load", instance_id, now_s)
            case UnloadInstance(instance_id=instance_id):
                self._disturb("unload", instance_id, now_s)
            case ResizeKv(instance_id=instance_id):
                self._disturb("resize", instance_id, now_s)
            case SendReport(report=TokensReport(outputs=outputs)):
                for output in outputs:
                    came = self.observed.tokens_s.setdefault(output.request_id, [])
                    came.extend([now_s] * len(output.token_ids))
            case _:
                pass

    def _begin(self, now_s: float) -> None:
        self._turn_s = now_s
        self._alone = not self._amid
        self._beside_load = bool(self._amid) and all(kind == "load" for kind, _ in self._amid)

    def _disturb(self, kind: str, instance_id: InstanceId, now_s: float) -> None:
        self._amid[kind, instance_id] = now_s
        self._alone = False
        self._beside_load = self._beside_load and kind == "load"

    def _end(
        self, kind: str, instance_id: InstanceId, ended: list[Spent], free_s: float, now_s: float
    ) -> None:
        ordered_s = self._amid.pop((kind, instance_id), None)
        if ordered_s is not None:
            began_s = max(ordered_s, free_s)
            ended.append(Spent(began_s=began_s, took_s=now_s - began_s))

    def _iteration(self, shape: IterationShape, engine_s: float, now_s: float) -> Iteration:
        self._computed_s = now_s
        return Iteration(
            shape=shape,
            began_s=self._turn_s,
            took_s=now_s - self._turn_s,
            engine_s=engine_s,
            alone=self._alone,
            beside_load=self._beside_load,
        )
