"""The state machines of mesh, one transition table each.

The cores change a state only through `advance`: an impossible change fails where it is made.
The diagrams in docs/lifecycle.md are generated from these tables, and a test keeps them current.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

S = TypeVar("S", bound=StrEnum)


class DeploymentState(StrEnum):
    """IMPORTING until a node has the model; only a READY deployment has been acknowledged."""

    IMPORTING = "importing"
    SAVING = "saving"
    READY = "ready"
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


class NodeState(StrEnum):
    """DRAINING gets no new work; LOST missed its lease or its link broke."""

    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


Table = Mapping[StrEnum, tuple[StrEnum, ...]]

DEPLOYMENT: Table = {
    DeploymentState.IMPORTING: (DeploymentState.SAVING, DeploymentState.GONE),
    DeploymentState.SAVING: (DeploymentState.READY, DeploymentState.GONE),
    DeploymentState.READY: (DeploymentState.DELETING,),
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
NODE: Table = {
    NodeState.READY: (NodeState.DRAINING, NodeState.LOST),
    NodeState.DRAINING: (NodeState.READY, NodeState.LOST),
    NodeState.LOST: (),
}
TABLES: Mapping[str, Table] = {
    "deployment": DEPLOYMENT,
    "instance": INSTANCE,
    "request": REQUEST,
    "node": NODE,
}


def advance(table: Table, state: S, to: S) -> S:
    """The new state. Raises ValueError when the table has no such transition."""
    if to not in table[state]:
        raise ValueError(f"no transition from {state} to {to}")
    return to
