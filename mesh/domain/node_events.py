"""What the node core is told. Every event is one of these values, or the result of a verb as the
controller is told it (`mesh.domain.messages`); the controller's events are in `mesh.domain.events`.
"""

from mesh.domain.energy import EnergyReading
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.messages import (
    ImportDone,
    ImportFailed,
    ImportProgress,
    InstanceGone,
    InstanceLoaded,
    KvArrived,
    KvResized,
    LoadFailed,
    LoadProgress,
    NodeCommand,
)
from mesh.domain.node_rule import CELL_RULE, NodeRule
from mesh.domain.steps import HeldModel, PrefixChange, StepResult
from mesh.domain.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOpened:
    """The controller accepted the link, and says by which rule the node is to run."""

    rule: NodeRule = CELL_RULE


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkClosed:
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandReceived:
    command: NodeCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished:
    instance_id: InstanceId
    result: StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBroke:
    instance_id: InstanceId
    error: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureFinished:
    """An iteration of the shape that was asked for took so long."""

    instance_id: InstanceId
    elapsed_s: float
    operators: tuple[tuple[str, float], ...] = ()
    """What was counted of its operators, where that was wanted; see `CountedIteration`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureBroke:
    """The shape could not be computed; the instance is well."""

    instance_id: InstanceId
    error: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitBroke:
    """The engine would not take a request that the core had submitted."""

    request_id: RequestId
    attempt: int
    error: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitFinished:
    """The engine has a request that may share what others computed: so many of its tokens."""

    request_id: RequestId
    attempt: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixesTold:
    """What came to and went from the KV caches of instances beside their iterations."""

    changes: tuple[tuple[InstanceId, PrefixChange], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortFinished:
    """The engine has dropped a request; what its instance still uses is read right after."""

    instance_id: InstanceId
    kv_blocks_used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapFinished:
    """An instance's weights are where they were to go; with an `error`, the class name in
    mesh.domain.errors, they are where they were.
    """

    instance_id: InstanceId
    error: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatDue:
    """Time to tell the controller that the node lives. All of it is read when it fires."""

    rss_bytes: int
    engine_bytes: int = 0
    """Weights and KV caches by the engine's books."""
    models: tuple[HeldModel, ...] | None = None
    """What the node has at hand; None: as at the last beat."""
    kv_blocks_cached: tuple[tuple[InstanceId, int], ...] = ()
    """The cached blocks of the instances that have some."""
    leaves: bool = False
    """The node is to stop."""
    energy: EnergyReading = EnergyReading()


NodeEvent = (
    LinkOpened
    | LinkClosed
    | CommandReceived
    | ImportProgress
    | ImportDone
    | ImportFailed
    | LoadProgress
    | InstanceLoaded
    | LoadFailed
    | InstanceGone
    | KvArrived
    | KvResized
    | StepFinished
    | StepBroke
    | MeasureFinished
    | MeasureBroke
    | SubmitBroke
    | SubmitFinished
    | PrefixesTold
    | AbortFinished
    | SwapFinished
    | HeartbeatDue
)
