"""The state machines of mesh, one transition table each.

The cores change a state only through `advance`: an impossible change fails where it is made.
The diagrams in docs/lifecycle.md are generated from these tables, and a test keeps them current.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

S = TypeVar("S", bound=StrEnum)


class DeploymentState(StrEnum):
    """IMPORTING until a node has the model; only a READY deployment takes requests. A further
    revision is STARTING until its instances are ready; the one before it is RETIRING then, until
    its last request has ended. A READY one whose texts cannot be used is shown as FAILED.
    """

    IMPORTING = "importing"
    SAVING = "saving"
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    RETIRING = "retiring"
    DELETING = "deleting"
    GONE = "gone"


class InstanceState(StrEnum):
    """PARKED keeps its weights and next to no KV cache after its keep-alive, until a request wants
    it or somebody wants its memory. DRAINING takes no new request and goes when its last one ends.
    """

    LOADING = "loading"
    READY = "ready"
    PARKED = "parked"
    DRAINING = "draining"
    UNLOADING = "unloading"
    GONE = "gone"


class RequestState(StrEnum):
    """QUEUED waits in the controller; RUNNING is with a node; a lost node sends it back."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


class MigrationState(StrEnum):
    """The states of a migration. The request runs on while its target is FETCHING the KV blocks of
    its first tokens, if it does, and then COMPUTING the tokens that it has been given. CAUGHT_UP
    has computed them, and waits for the source's next token. Then the target computes what came
    meanwhile, or, if that is little, is DRAWING tokens beside the source, until it owns the
    request: HANDED_OVER.
    """

    FETCHING = "fetching"
    COMPUTING = "computing"
    CAUGHT_UP = "caught_up"
    DRAWING = "drawing"
    HANDED_OVER = "handed_over"
    GIVEN_UP = "given_up"


class NodeState(StrEnum):
    """STARTING has not joined yet; DRAINING gets no new work; LOST missed its lease or its link
    broke.
    """

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


class BatchState(StrEnum):
    """A file of calls, by the words of OpenAI's protocol. Its calls are made while it is
    IN_PROGRESS, and those that are left when it is CANCELLING or its time is over never are.
    """

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"


Table = Mapping[StrEnum, tuple[StrEnum, ...]]

DEPLOYMENT: Table = {
    DeploymentState.IMPORTING: (DeploymentState.SAVING, DeploymentState.GONE),
    DeploymentState.SAVING: (
        DeploymentState.READY,
        DeploymentState.STARTING,
        DeploymentState.GONE,
    ),
    DeploymentState.STARTING: (DeploymentState.READY, DeploymentState.GONE),
    DeploymentState.READY: (
        DeploymentState.FAILED,
        DeploymentState.DELETING,
        DeploymentState.RETIRING,
    ),
    DeploymentState.FAILED: (DeploymentState.READY, DeploymentState.DELETING),
    DeploymentState.RETIRING: (DeploymentState.GONE,),
    DeploymentState.DELETING: (DeploymentState.READY, DeploymentState.GONE),
    DeploymentState.GONE: (),
}
INSTANCE: Table = {
    InstanceState.LOADING: (InstanceState.READY, InstanceState.UNLOADING, InstanceState.GONE),
    InstanceState.READY: (
        InstanceState.PARKED,
        InstanceState.DRAINING,
        InstanceState.UNLOADING,
        InstanceState.GONE,
    ),
    InstanceState.PARKED: (InstanceState.READY, InstanceState.UNLOADING, InstanceState.GONE),
    InstanceState.DRAINING: (InstanceState.UNLOADING, InstanceState.GONE),
    InstanceState.UNLOADING: (InstanceState.GONE,),
    InstanceState.GONE: (),
}
REQUEST: Table = {
    RequestState.QUEUED: (RequestState.RUNNING, RequestState.ENDED),
    RequestState.RUNNING: (RequestState.QUEUED, RequestState.ENDED),
    RequestState.ENDED: (),
}
MIGRATION: Table = {
    MigrationState.COMPUTING: (MigrationState.CAUGHT_UP, MigrationState.GIVEN_UP),
    MigrationState.FETCHING: (MigrationState.COMPUTING, MigrationState.GIVEN_UP),
    MigrationState.CAUGHT_UP: (
        MigrationState.COMPUTING,
        MigrationState.DRAWING,
        MigrationState.GIVEN_UP,
    ),
    MigrationState.DRAWING: (MigrationState.HANDED_OVER, MigrationState.GIVEN_UP),
    MigrationState.HANDED_OVER: (),
    MigrationState.GIVEN_UP: (),
}
NODE: Table = {
    NodeState.STARTING: (NodeState.READY,),
    NodeState.READY: (NodeState.DRAINING, NodeState.LOST),
    NodeState.DRAINING: (NodeState.READY, NodeState.LOST),
    NodeState.LOST: (),
}
_CUT_SHORT = (BatchState.CANCELLING, BatchState.EXPIRED, BatchState.FAILED)
BATCH: Table = {
    BatchState.VALIDATING: (BatchState.IN_PROGRESS, *_CUT_SHORT),
    BatchState.IN_PROGRESS: (BatchState.FINALIZING, *_CUT_SHORT),
    BatchState.FINALIZING: (BatchState.COMPLETED, BatchState.FAILED),
    BatchState.CANCELLING: (BatchState.CANCELLED, BatchState.FAILED),
    BatchState.COMPLETED: (),
    BatchState.CANCELLED: (),
    BatchState.EXPIRED: (),
    BatchState.FAILED: (),
}
TABLES: Mapping[str, Table] = {
    "deployment": DEPLOYMENT,
    "instance": INSTANCE,
    "request": REQUEST,
    "migration": MIGRATION,
    "node": NODE,
    "batch": BATCH,
}


def advance(table: Table, state: S, to: S) -> S:
    """The new state. Raises ValueError when the table has no such transition."""
    if to not in table[state]:
        raise ValueError(f"no transition from {state} to {to}")
    return to
