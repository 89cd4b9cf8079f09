"""What the controller core is told. Every event is one of these values; the node core's are in
`mesh.domain.node_events`.
"""

from mesh.domain.deployment import DeploymentSpec
from mesh.domain.ids import DeploymentName, InstanceId, NodeId, OperationId, RequestId
from mesh.domain.messages import NodeHello, NodeReport
from mesh.domain.request import Request, Resumed
from mesh.domain.slo import Slo
from mesh.domain.values import dataclass

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
class UndoRequested:
    """Back to the revision that served before, or to that of a number. One that has not taken over
    yet is given up instead, unless there is a number.
    """

    operation_id: OperationId
    name: DeploymentName
    to: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequested:
    """None leaves a limit as it is. It is refused where another than this revision serves."""

    operation_id: OperationId
    name: DeploymentName
    replicas_min: int | None = None
    replicas_max: int | None = None
    keep_alive_s: float | None = None
    revision: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequested:
    """An instance ahead of the first call; its keep-alive holds for it as for any other."""

    operation_id: OperationId
    name: DeploymentName


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadRequested:
    """Its instances go: idle ones at once, the others with their last request."""

    operation_id: OperationId
    name: DeploymentName


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
    operators: bool = False
    """Count what operators take, too."""
    cores: tuple[int, ...] = ()
    """Count it once more with each of these numbers of the node's cores."""


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
    slo: Slo | None = None
    """Its own, in place of its deployment's."""
    resumed: Resumed | None = None
    """What its client has of it from an earlier controller, or an earlier stream of this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    """The client went away, or its deadline passed."""

    request_id: RequestId
    others: tuple[RequestId, ...] = ()
    """The requests whose clients went in the same moment: what waits is placed once all of them
    have gone.
    """

    @property
    def request_ids(self) -> tuple[RequestId, ...]:
        return (self.request_id, *self.others)


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
    parked: bool = False
    """It has been parked for as long as it may."""


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
    """Requests wait: running ones have gained headroom since they were last tried, or deadlines
    have come too near.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationDue:
    """Requests are to move, or do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionTookLong:
    """The host's clock says so of the event before: the core has none."""

    seconds: float
    limit_s: float


ControllerTimer = (
    KeepAliveExpired
    | LeaseCheckDue
    | OperationExpired
    | LoadExpired
    | RetryLoadDue
    | PlaceRetryDue
    | MigrationDue
)
ControllerEvent = (
    DeployRequested
    | DeleteRequested
    | UndoRequested
    | ScaleRequested
    | LoadRequested
    | UnloadRequested
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
    | DecisionTookLong
    | ControllerTimer
)
