"""What the controller core and the node core are told. Every event is one of these values."""

from dataclasses import dataclass

from mesh.domain.deployment import DeploymentSpec
from mesh.domain.ids import DeploymentName, InstanceId, NodeId, OperationId, RequestId
from mesh.domain.messages import NodeCommand, NodeHello, NodeReport
from mesh.domain.model import Footprint, ModelInfo
from mesh.domain.reasons import TurnRule
from mesh.domain.request import Request
from mesh.domain.steps import LoadedInstance, StepResult
from mesh.domain.text import TextAssets

# The controller's: administrative calls.


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployRequested:
    operation_id: OperationId
    spec: DeploymentSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteRequested:
    operation_id: OperationId
    name: DeploymentName


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequested:
    """None leaves a limit as it is."""

    operation_id: OperationId
    name: DeploymentName
    replicas_min: int | None = None
    replicas_max: int | None = None
    keep_alive_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """`undo` lets a draining node take new work again."""

    operation_id: OperationId
    node_id: NodeId
    undo: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequested:
    """Measure a deployment's model on a node; None: on any that has it or has room for it."""

    operation_id: OperationId
    name: DeploymentName
    node_id: NodeId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationCancelled:
    """The caller of an operation went away."""

    operation_id: OperationId


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentStored:
    """The registry has written (or removed) what it was asked to, durably: a deployment, or a
    profile.
    """

    operation_id: OperationId


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFailed:
    """The registry could not write; nothing changed."""

    operation_id: OperationId
    message: str


# The controller's: invocations.


@dataclass(frozen=True, slots=True, kw_only=True)
class InvokeRequested:
    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    """The client went away, or its deadline passed."""

    request_id: RequestId


# The controller's: nodes.


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConnected:
    """A link opened and its node said who it is. Link ids are never used twice."""

    link_id: int
    hello: NodeHello


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReported:
    link_id: int
    report: NodeReport


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDisconnected:
    link_id: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutdownRequested:
    """The controller is about to stop: every open request and operation ends with that reason."""


# Timers. The cores set them by action and check at the event whether they still mean anything.


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAliveExpired:
    instance_id: InstanceId
    idle_since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseCheckDue:
    """Time to look for nodes that have been silent too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationExpired:
    operation_id: OperationId


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadExpired:
    """A load has had all the time that it may take."""

    instance_id: InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryLoadDue:
    """A failed load's pause is over."""

    name: DeploymentName


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRetryDue:
    """Requests of this deployment wait: running requests have gained headroom since they were last
    tried, or deadlines have come too near.
    """

    name: DeploymentName


ControllerTimer = (
    KeepAliveExpired | LeaseCheckDue | OperationExpired | LoadExpired | RetryLoadDue | PlaceRetryDue
)
ControllerEvent = (
    DeployRequested
    | DeleteRequested
    | ScaleRequested
    | DrainRequested
    | ProfileRequested
    | OperationCancelled
    | DeploymentStored
    | StoreFailed
    | InvokeRequested
    | CancelRequested
    | NodeConnected
    | NodeReported
    | NodeDisconnected
    | ShutdownRequested
    | ControllerTimer
)

# The node's.


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOpened:
    """The controller accepted the link, and says who is to compute next."""

    turns: TurnRule = TurnRule.HEADROOM


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkClosed:
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandReceived:
    command: NodeCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportProgressed:
    operation_id: OperationId
    phase: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportFinished:
    operation_id: OperationId
    model: ModelInfo
    footprint: Footprint
    text: TextAssets


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportBroke:
    operation_id: OperationId
    error: str
    message: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgressed:
    instance_id: InstanceId
    phase: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFinished:
    instance_id: InstanceId
    loaded: LoadedInstance


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBroke:
    instance_id: InstanceId
    error: str
    message: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadFinished:
    instance_id: InstanceId


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureBroke:
    """The shape could not be computed; the instance is well."""

    instance_id: InstanceId
    error: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitBroke:
    """The engine would not take a request that the core had submitted."""

    request_id: RequestId
    attempt: int
    error: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortFinished:
    """The engine has dropped a request; what its instance still uses is read right after."""

    instance_id: InstanceId
    kv_blocks_used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatDue:
    """Time to tell the controller that the node lives. `rss_bytes` is read when it fires."""

    rss_bytes: int


NodeEvent = (
    LinkOpened
    | LinkClosed
    | CommandReceived
    | ImportProgressed
    | ImportFinished
    | ImportBroke
    | LoadProgressed
    | LoadFinished
    | LoadBroke
    | UnloadFinished
    | StepFinished
    | StepBroke
    | MeasureFinished
    | MeasureBroke
    | SubmitBroke
    | AbortFinished
    | HeartbeatDue
)
