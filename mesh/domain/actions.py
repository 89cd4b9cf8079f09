"""What the two cores decide. A core's action list is its log; the shells only carry it out."""

from mesh.domain.deployment import Deployment
from mesh.domain.events import ControllerTimer
from mesh.domain.history import OutputHistory
from mesh.domain.ids import DeploymentName, InstanceId, NodeId, OperationId, RequestId
from mesh.domain.messages import (
    CancelImport,
    ImportModel,
    LoadInstance,
    NodeCommand,
    NodeReport,
    OfferKv,
    ResizeKv,
    UnloadInstance,
)
from mesh.domain.node_rule import CELL_RULE, NodeRule
from mesh.domain.profile import IterationShape, Profile
from mesh.domain.reasons import DeviceKind, PolicyFaultKind, RefusalReason
from mesh.domain.request import KvSource, RequestTokens
from mesh.domain.revision import Revisions
from mesh.domain.steps import EngineRequest, Prefill
from mesh.domain.text import TextAssets
from mesh.domain.values import dataclass

# The controller's.


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCommand:
    link_id: int
    command: NodeCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptLink:
    """The node behind this link belongs to the cell now, and runs by this rule."""

    link_id: int
    rule: NodeRule = CELL_RULE


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseLink:
    """`error` is the class name in mesh.domain.errors that the node is told."""

    link_id: int
    error: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotePolicyFault:
    """The policy did what it must not; the cell goes on without that answer."""

    policy: str
    kind: PolicyFaultKind
    call: str
    """The method of `mesh.policy.interface.Policy` that was called, or the plan that it gave."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WantNodes:
    """The cell wants so many nodes of a kind from now on; whoever asks is told."""

    device: DeviceKind
    wanted: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WantInstances:
    """By its plan a deployment wants so many instances loaded, where memory is free."""

    name: DeploymentName
    wanted: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportMissingNodes:
    """Nodes that are wanted have not joined for so long."""

    device: DeviceKind
    wanted: int
    ready: int
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDeployment:
    """Write durably, then say DeploymentStored or StoreFailed. `text` None: keep what is there."""

    operation_id: OperationId
    deployment: Deployment
    """The deployment that serves from now on, in the place of the one before it under its public
    name.
    """
    text: TextAssets | None = None
    """The text assets of the newest revision's model."""
    revisions: Revisions | None = None
    """The others; None: keep what is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRevisions:
    """Write durably; nobody waits for it. What is lost is decided again after the next start."""

    deployment: Deployment
    """The deployment that serves from now on."""
    revisions: Revisions


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveDeployment:
    """The deployment is to be removed with all of its revisions."""

    operation_id: OperationId
    name: DeploymentName


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreProfile:
    """Write durably, over an earlier one of its model and fingerprint. Without an operation nobody
    waits for it.
    """

    operation_id: OperationId | None
    profile: Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHistory:
    """Write durably, over the earlier one; nobody waits for it."""

    name: DeploymentName
    history: OutputHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyProgress:
    operation_id: OperationId
    phase: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyDone:
    operation_id: OperationId
    message: str = ""
    amiss: str = ""
    """What of it does not work, though it is done; empty where all does."""

    @property
    def text(self) -> str:
        """The message and what is amiss, for people."""
        return "; ".join(filter(None, (self.message, self.amiss)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyError:
    operation_id: OperationId
    error: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TellAccepted:
    """A request has its place, or is promised a load: its client learns which deadlines hold. Told
    once of each request that is not refused before, ahead of its tokens.
    """

    request_id: RequestId
    grace_s: float
    """The seconds by which its first token may come after its limit because of a load; 0 means that
    it will be in time.
    """
    cached_tokens: int = 0
    """How many of its prompt's tokens are believed to be in the cache of its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TellWaiting:
    """A queued request's client learns what it waits for."""

    request_id: RequestId
    phase: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverTokens:
    """New output for a client. With `outputs.finish` set it is the last."""

    outputs: RequestTokens
    node_id: NodeId | None = None
    """The node that computed the answer; it comes with the last output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseRequest:
    """The request ends without (further) tokens."""

    request_id: RequestId
    reason: RefusalReason
    message: str
    retry_after_s: float = 0.0
    hint: str = ""
    """Empty: what helps against the reason, see `reasons.hint_for`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer:
    """Say `timer` at `at_s` or soon after, once."""

    at_s: float
    timer: ControllerTimer


ControllerAction = (
    SendCommand
    | AcceptLink
    | CloseLink
    | StoreDeployment
    | StoreRevisions
    | RemoveDeployment
    | StoreProfile
    | StoreHistory
    | ReplyProgress
    | ReplyDone
    | ReplyError
    | TellAccepted
    | TellWaiting
    | DeliverTokens
    | RefuseRequest
    | SetTimer
    | NotePolicyFault
    | WantInstances
    | WantNodes
    | ReportMissingNodes
)

# The node's. Verbs that it passes on to its store and its engine are the commands themselves.


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    report: NodeReport


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMeasure:
    """Time one iteration of this shape on an instance, beside no other."""

    instance_id: InstanceId
    shape: IterationShape
    counted: bool = False
    """Count what its operators take, too."""
    cores: int | None = None
    """So many of the node's cores count it; `None` stands for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitToEngine:
    instance_id: InstanceId
    request: EngineRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchKv:
    """Fetch the KV blocks of a request and submit it with them; KvArrived says what came of it. One
    that is aborted meanwhile is not submitted.
    """

    instance_id: InstanceId
    request: EngineRequest
    source: KvSource


@dataclass(frozen=True, slots=True, kw_only=True)
class AskPrefixes:
    """What has come to and gone from the KV caches of instances?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortInEngine:
    instance_id: InstanceId
    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class StartStep:
    """A turn: one iteration of one instance, or several decodes in a row. See `Engine.step`."""

    instance_id: InstanceId
    prefill: Prefill
    iterations: int = 1
    """The most iterations; they go on as long as the batch stays as it is."""
    decode: tuple[RequestId, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapWeights:
    """Take weights of an instance off the device, or bring them back. See `Engine.swap`."""

    instance_id: InstanceId
    share: float
    """The share of its weights that is on the device then."""


NodeAction = (
    SendReport
    | ImportModel
    | CancelImport
    | LoadInstance
    | UnloadInstance
    | ResizeKv
    | OfferKv
    | FetchKv
    | AskPrefixes
    | SubmitToEngine
    | AbortInEngine
    | StartStep
    | StartMeasure
    | SwapWeights
)
