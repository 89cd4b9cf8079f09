"""What a policy may ask for, as values. It yields them; the core checks each against its books and
carries it out whole, or not at all; of a `Move` each request that finds room and time goes.

A plan holds views of what it is about. What has gone since it was made, and what no engine here can
do, the core refuses, and its journal says so (`mesh.domain.actions.NotePolicyFault`).
"""

from enum import StrEnum

from mesh.domain.ids import DeploymentName
from mesh.domain.reasons import RefusalReason
from mesh.domain.values import dataclass
from mesh.policy.views import InstanceView, NodeView, RequestView

LABEL_CHARS_MAX = 64


class Carry(StrEnum):
    """What of a request that runs goes with it."""

    TOKENS = "tokens"
    """Its KV cache is computed again where it goes."""
    KV = "kv"
    """Its KV blocks go to the other node, which computes nothing until they are there; only what
    does not arrive is computed again.
    """


class How(StrEnum):
    """What becomes of an instance that gives its memory up."""

    PARK = "park"
    """It keeps its weights, and gives its KV cache back."""
    UNLOAD = "unload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Compute a request on an instance, at once or when its load is over."""

    request: RequestView
    instance: InstanceView
    label: str | None = None
    """See `Label`: the instance gets it if it takes the request; `None` leaves the one it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Load an instance on a node for a request, or for the minimum of the deployment that is asked
    about. In `upkeep`, where neither is, it names its `deployment`.
    """

    request: RequestView | None = None
    node: NodeView
    deployment: DeploymentName | None = None
    label: str = ""
    """See `Label`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """Bring a deployment's model nearer on a node before anybody calls it: import it if no node has
    it, else load it for nobody, in the place of idle instances. All other loads go before it, and
    it goes when anybody wants its memory. The node has to have a budget for that.
    """

    deployment: DeploymentName
    node: NodeView
    instead_of: tuple[InstanceView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Remember something of an instance, as the role that it has: at most LABEL_CHARS_MAX
    characters, kept with the instance in the cell's books until it goes or the controller ends.
    """

    instance: InstanceView
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Have requests that run go on elsewhere, while they run (docs/migration.md)."""

    requests: tuple[RequestView, ...]
    to: InstanceView
    carry: Carry | None = None
    """`None`: whichever is quicker."""
    at_once: bool = False
    """They go on there as soon as their tokens are computed or their KV blocks have come, however
    long the target takes to its next turn; else where their clients hardly notice.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Have an instance give its memory up. If it serves, its requests first get other places, where
    each of them is in time; if one has none, nothing happens.
    """

    instance: InstanceView
    how: How = How.UNLOAD
    to: InstanceView | None = None
    """In `upkeep`: the only instance that its requests may go to. `None`: any, or a new one."""


Releases = tuple[Release, ...]
"""All that go together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Turn a request away that waits and has no promise. The message is what its client is told;
    a policy that has a reason of its own says it there.
    """

    request: RequestView
    why: RefusalReason = RefusalReason.POLICY
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """What a place lacks by the policy's own measure. The request waits, may go elsewhere, and is
    told so where it has waited in vain.
    """

    message: str


Plan = Join | Start | Move | Release | Refuse | Label | Prefetch
