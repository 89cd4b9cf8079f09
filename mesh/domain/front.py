"""What the core of a front is told, and what it decides: the cell of each request.

Clients see a front in the place of a controller, and a front sees cells in the place of nodes. So
its core takes a controller's events of invocations and tells clients by the same actions; what is
here is its side of the cells. A look is what a cell has told of itself; its times are the front's.
"""

from mesh.domain.actions import DeliverTokens, RefuseRequest, TellAccepted, TellWaiting
from mesh.domain.events import CancelRequested, InvokeRequested, ShutdownRequested
from mesh.domain.ids import CellName, DeploymentName, ModelId, RequestId
from mesh.domain.invocation import InvocationEvent
from mesh.domain.reasons import RefusalReason
from mesh.domain.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentLook:
    """A deployment that a cell serves."""

    name: DeploymentName
    model_id: ModelId
    """The model of the revision that serves: prompts are tokenised for it."""
    room: int
    """How many more requests the batches of its loaded instances have places for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellLook:
    """What a cell serves and how busy it is."""

    deployments: tuple[DeploymentLook, ...]
    nodes: int
    """The nodes that are ready."""
    requests: int
    """The requests that it answers, or has queued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSeen:
    """A controller of the cell leads it."""

    cell: CellName
    leader: str
    """Its address."""
    look: CellLook | None = None
    """`None`: the last look holds on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSilent:
    """No controller of the cell says that it leads."""

    cell: CellName
    drains: bool = False
    """The one that led last answers that it takes no further calls: those that it has go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellTold:
    """An event of a call that was made to a cell."""

    request_id: RequestId
    attempt: int
    told: InvocationEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class CellEnded:
    """A call to a cell ended with an error: the cell's own, or that of the way to it."""

    request_id: RequestId
    attempt: int
    error: str
    """The name of its class in `mesh.domain.errors`."""
    message: str
    hint: str = ""
    reason: RefusalReason | None = None
    """The reason, where it is a `Refused`."""
    retry_after_s: float = 0.0
    lost: bool = False
    """The stream broke, and the cell has said nothing of why."""
    taken: bool = True
    """Whether the cell may have it: not where nobody took the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskCell:
    """Make the call to a cell; what comes of it is CellTold and CellEnded of this attempt."""

    cell: CellName
    request_id: RequestId
    attempt: int
    resumes: bool = False
    """A cell may know it: it is asked for again by its key, with what follows."""
    output_tokens: tuple[int, ...] = ()
    age_s: float = 0.0
    vouched: bool = False
    """A cell has accepted it: it is to be served, late or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCall:
    """Nobody listens to this attempt any more: end the call."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailRequest:
    """Its client is told the error of the cell that was asked."""

    request_id: RequestId
    error: str
    """The name of its class in `mesh.domain.errors`."""
    message: str
    hint: str = ""


FrontEvent = (
    InvokeRequested
    | CancelRequested
    | ShutdownRequested
    | CellSeen
    | CellSilent
    | CellTold
    | CellEnded
)
FrontAction = (
    AskCell | DropCall | FailRequest | TellAccepted | TellWaiting | DeliverTokens | RefuseRequest
)
