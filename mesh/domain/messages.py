"""What crosses the link between the controller and a node: commands down, reports up.

Both cores speak in these values; the mapping of `mesh.wire` turns them into protobuf and back, the
simulator's links carry them as they are. A verb (import, load, unload, resize) and its results are
declared here once: the node core's actions and events are the same values. No field is a point in
time: ages and spans only.
"""

from pathlib import Path
from typing import Any, TypeVar

from mesh.domain.energy import Energy
from mesh.domain.errors import MeshError
from mesh.domain.ids import DeploymentName, InstanceId, ModelId, NodeId, OperationId, RequestId
from mesh.domain.limits import BATCH_MAX
from mesh.domain.model import Footprint, ModelInfo, WeightPrecision
from mesh.domain.profile import Profile, Stalls
from mesh.domain.ranges import Count, Factor, Name, Part, Rate, Seconds, Share
from mesh.domain.reasons import DeviceKind
from mesh.domain.request import RequestOrder, RequestTokens
from mesh.domain.steps import HeldModel, LoadOrder, LoadRate, LoadTier, PrefixChange
from mesh.domain.text import TextAssets
from mesh.domain.values import dataclass

# Commands: controller to node.


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportModel:
    """Fetch and import a source into the node's store, unless it is there; then report."""

    operation_id: OperationId
    source: str
    weights: WeightPrecision | None = None
    """The precision in which the weights are to be held; `None` stands for the node's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelImport:
    operation_id: OperationId


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadInstance:
    """Load a model. A node whose store lacks it imports `model.source` first."""

    instance_id: InstanceId
    deployment: DeploymentName
    model: ModelInfo
    kv_blocks: int
    context_tokens_max: int
    batch_max: int
    profile: Profile
    """The profile of the model on this node, measured or scaled."""
    swapped_bytes: int = 0
    """What it takes while it is loaded, where it comes up with its weights off the device for its
    node to bring in by its turn rule: its KV cache, and its weights if the engine
    `loads_on_device`. 0: it comes up whole.
    """

    def order(self, model_path: Path, import_s: float = 0.0) -> LoadOrder:
        """What the node's engine is asked for, once the model is in this folder."""
        return LoadOrder(
            instance_id=self.instance_id,
            deployment=self.deployment,
            model=self.model,
            model_path=model_path,
            kv_blocks=self.kv_blocks,
            context_tokens_max=self.context_tokens_max,
            batch_max=self.batch_max,
            import_s=import_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadInstance:
    instance_id: InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeKv:
    """Grow or shrink the KV cache of a loaded instance; KvResized answers."""

    instance_id: InstanceId
    kv_blocks: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitRequest:
    instance_id: InstanceId
    order: RequestOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinueRequest:
    """A paused request has these further tokens, generated where it came from. It is computed up to
    them, and goes on by itself unless it stays `paused`. One that runs is `paused` until it is let
    go, or the iteration of others that it is left out of has ended.
    """

    instance_id: InstanceId
    request_id: RequestId
    attempt: int
    token_ids: tuple[int, ...]
    paused: bool
    due_in_s: float
    """Seconds until its next token is due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferKv:
    """Hand the KV blocks of a request that runs to another node, if that shows the ticket."""

    instance_id: InstanceId
    request_id: RequestId
    attempt: int
    to: NodeId
    ticket: str
    """The controller's link replaces it by a random one, the same for both nodes: see
    `mesh.controller.kv_tickets`.
    """
    expires_s: Seconds
    """The ticket is good for this long from now, and for at most four connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileInstance:
    """Measure iteration times of a loaded instance, whenever nothing else is to be computed."""

    operation_id: OperationId
    instance_id: InstanceId
    operators: bool = False
    """Count what operators take, too."""
    cores: tuple[int, ...] = ()
    """Count it once more with each of these numbers of the node's cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelProfile:
    operation_id: OperationId


@dataclass(frozen=True, slots=True, kw_only=True)
class UseProfile:
    """A better profile of a loaded instance's model than the one that its load came with."""

    instance_id: InstanceId
    profile: Profile


NodeCommand = (
    ImportModel
    | CancelImport
    | LoadInstance
    | UnloadInstance
    | ResizeKv
    | SubmitRequest
    | AbortRequest
    | ContinueRequest
    | OfferKv
    | ProfileInstance
    | CancelProfile
    | UseProfile
)

# Reports: node to controller.


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReport:
    """A loaded instance, as the node knows it."""

    instance_id: InstanceId
    deployment: DeploymentName
    model_id: ModelId
    footprint: Footprint
    kv_blocks: int
    kv_blocks_used: int
    context_tokens_max: int
    batch_max: int
    batch: int
    correction: Factor = 1.0
    """Recent iteration times, measured over predicted."""
    correction_planned: Factor = 1.0
    """What is promised of it is to be planned with this instead, until the next report."""
    stalls: Stalls = Stalls()
    kv_blocks_cached: int = 0
    """The blocks that are kept for requests to come, beside those used."""
    off_p50: Share = 0.0
    off_p95: Share = 0.0
    """The share by which predictions of its last iterations were off; 0 where there was none."""
    prefixes: tuple[int, ...] = ()
    """In a hello: digests of the keys of its KV blocks; see `PrefixChange`."""
    out: bool = False
    """Weights of it are off the device, so that it cannot compute. Its requests and its KV cache
    stay.
    """
    here: Part = 0.0
    """The share of its weights that is on the device where it is `out`."""
    swapping: bool = False
    """Its weights are on their way, to the device or off it."""
    swaps_to: Part = 0.0
    """The share of them that will be on the device then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStarting:
    """What a node does before its hello, which that has to wait for."""

    node_id: NodeId
    device: DeviceKind
    hardware: str
    cores: int
    engine: str
    memory_bytes: int
    phase: str
    """In words, such as "measures precisions"."""
    share: float = 0.0
    """How much of the phase is done: 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRequest:
    """A request that the node has computed on without a controller."""

    instance_id: InstanceId
    order: RequestOrder
    """As of now; its `output_tokens` are those before `outputs`."""
    outputs: tuple[RequestTokens, ...] = ()
    """Its last ones, one after the other, those that a controller may have told its client, too.
    One that ends it is the last.
    """
    prefill_left: Count = 0
    """Tokens that are still to be computed before its next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHello:
    """A node's first report on a link: who it is and what is loaded on it."""

    node_id: NodeId
    run_id: Name
    """A random name, drawn when the agent starts. It tells a reconnecting node from a second one of
    its name.
    """
    device: DeviceKind
    hardware: str
    cores: int
    engine: str
    memory_bytes: int
    """Limit of the node's process: what it takes without any instance, weights, KV caches."""
    base_bytes: int = 0
    """The part of `memory_bytes` that the process takes without any instance."""
    fingerprint: str = ""
    """Equal on nodes of equal hardware, cores and engine: they share profiles."""
    tensor_parallel_max: Count = 1
    """Devices that an instance of its engine can span."""
    batch_max: Count = BATCH_MAX
    """Requests that an iteration of its engine can carry."""
    computes_ahead: bool = False
    """Its engine holds requests: they may move to it while they run elsewhere."""
    embeds: bool = False
    """Its engine serves deployments with a task."""
    swaps: bool = False
    """Its engine takes an instance's weights off the device while its requests stay."""
    swaps_parts: bool = False
    """It moves any share of them; else all."""
    loads_on_device: bool = False
    """Its engine needs room for weights during a load, also where they are off the device after."""
    as_published: bool = False
    """Its engine holds and multiplies weights as they were published, whatever is asked for."""
    shares_weights: bool = False
    """Whether instances of one model and context limit share its weights."""
    busy_load_factor: Factor = 1.0
    """The factor by which a load takes longer while the node computes, as long as no such load has
    been seen. 1 means that it makes no difference, and none is learned.
    """
    models: tuple[HeldModel, ...] | None = None
    """All that the node has at hand; None: it does not say."""
    prefetch_bytes: int = 0
    """How much of the memory may hold what is loaded before anybody calls for it; 0: nothing is
    prefetched.
    """
    precision: str = ""
    """In which precisions the node computes and why, in words; empty where it does not say."""
    load_rates: tuple[tuple[LoadTier, LoadRate], ...] = ()
    """What loads are expected to take, by the tiers that it knows of: as loads on it have taken in
    the past, or as it measured when it started.
    """
    version: str = ""
    """The version of mesh on the node."""
    kv_address: str = ""
    """Where other nodes fetch KV blocks from it; empty where it neither gives nor takes any."""
    kv_format: str = ""
    """Equal on nodes that can use each other's KV blocks, if they have the same model loaded."""
    kv_bytes_per_s: Rate = 1e9
    """What it expects a transfer of KV blocks to carry, until one has shown it."""
    rule_digest: str = ""
    """The digest of the policy file whose turn rule it has beside the built-in ones; empty without
    one.
    """
    instances: tuple[InstanceReport, ...] = ()
    requests: tuple[HeldRequest, ...] = ()
    leaves: bool = False
    """It is to stop, and takes no new work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The node reports every HEARTBEAT_S that it lives. `rss_bytes` is its process's own
    account.
    """

    rss_bytes: int
    engine_bytes: int = 0
    """Weights and KV caches by the engine's books, with pages that are still being given back."""
    base_bytes: int = 0
    """The most that the process has held beside them for two heartbeats in a row, while nothing was
    loaded or unloaded: what is not any instance's. 0: not known.
    """
    instances: tuple[InstanceReport, ...] = ()
    load_slowdown: Factor = 1.0
    """The learned factor by which a load lengthens the iterations beside it; 1 on a node that knows
    none.
    """
    models: tuple[HeldModel, ...] | None = None
    """All that the node has at hand; None: as it said last on this link."""
    swapped_bytes: int = 0
    """The weights of an instance some of which a swap has brought to the device just now; 0: it
    tells of none.
    """
    swapped_s: Seconds = 0.0
    """The time that all of them would have taken, from the node's decision to swap them in until
    they were there.
    """
    leaves: bool = False
    """It is to stop once nothing is loaded on it, and takes no new work."""
    energy: Energy | None = None
    """What the node took since the one before; `None`: it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportProgress:
    operation_id: OperationId
    phase: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportDone:
    operation_id: OperationId
    model: ModelInfo
    footprint: Footprint
    text: TextAssets


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportFailed:
    """`error` is the class name in mesh.domain.errors."""

    operation_id: OperationId
    error: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    instance_id: InstanceId
    phase: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLoaded:
    instance_id: InstanceId
    footprint: Footprint
    kv_blocks: int
    elapsed_s: Seconds
    tier: LoadTier = LoadTier.DISK
    computed_s: Seconds = 0.0
    """The part of the load's time in which the node computed beside it."""
    swapped: bool = False
    """It came up without its weights: what it took says nothing of other loads."""
    prefixes: tuple[int, ...] = ()
    """Digests of the keys of cached KV blocks that an earlier instance has left to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailed:
    instance_id: InstanceId
    error: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceGone:
    """The instance was unloaded as commanded, or ended by itself (then `error` and `message` say
    why).
    """

    instance_id: InstanceId
    error: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvResized:
    """A ResizeKv has come to its end. `kv_blocks` are in force now: what they were if `error`, the
    class name in mesh.domain.errors, is set (the performer leaves that to the core and says 0), and
    more than wanted where a shrink met blocks in use.
    """

    instance_id: InstanceId
    kv_blocks: int
    elapsed_s: Seconds
    error: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensReport:
    """What one iteration yielded, for all requests of its batch at once; sent after each one."""

    instance_id: InstanceId
    outputs: tuple[RequestTokens, ...]
    prefill_left: tuple[tuple[RequestId, int], ...] = ()
    """Requests with prompt tokens still to compute, and how many."""
    starved: tuple[RequestId, ...] = ()
    """Requests that made no progress for want of KV blocks."""
    correction: float = 1.0
    busy_s: tuple[float, ...] = ()
    """The seconds of it that went to each of `outputs`, and then of `prefill_left`; empty where the
    node knows nothing of its joules.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixesChanged:
    """What came to and went from an instance's KV cache, since it was told of last."""

    instance_id: InstanceId
    change: PrefixChange
    left_to: DeploymentName | None = None
    """The deployment whose next instance on the node finds this, where the instance is unloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMissed:
    """Fewer of a request's tokens were in the cache than it was submitted with: it has to compute
    the others, too.
    """

    request_id: RequestId
    attempt: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReturned:
    """The node gives a request back unfinished: its instance is gone, or its engine would not take
    it. The controller places it anew, or ends it.
    """

    request_id: RequestId
    attempt: int
    error: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedAhead:
    """A paused request has been computed up to the last of the tokens that its node was given."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvArrived:
    """The KV blocks of a request that is computed ahead have come from its source, or not: what is
    missing is computed.
    """

    request_id: RequestId
    attempt: int
    tokens: int
    """That need not be computed."""
    moved_bytes: int
    elapsed_s: Seconds
    error: str = ""
    """The class name in mesh.domain.errors, where they have not come."""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileProgress:
    operation_id: OperationId
    phase: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileDone:
    operation_id: OperationId
    profile: Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRefined:
    """What predicts an instance's iterations is better known: they have told where its profile was
    off, or some sizes were timed while its node had nothing else to do.
    """

    instance_id: InstanceId
    profile: Profile
    correction: Factor | None = None
    """What it is corrected by from now on, and by what to plan; see `InstanceReport`. None: its
    node does not say, and what was known of that holds.
    """
    correction_planned: Factor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileFailed:
    """`error` is the class name in mesh.domain.errors."""

    operation_id: OperationId
    error: str
    message: str
    hint: str = ""


NodeReport = (
    NodeHello
    | Heartbeat
    | ImportProgress
    | ImportDone
    | ImportFailed
    | LoadProgress
    | InstanceLoaded
    | LoadFailed
    | InstanceGone
    | KvResized
    | TokensReport
    | RequestReturned
    | PrefixesChanged
    | PrefixMissed
    | ComputedAhead
    | KvArrived
    | ProfileProgress
    | ProfileDone
    | ProfileRefined
    | ProfileFailed
)

Failure = TypeVar("Failure")


def failure(kind: type[Failure], error: MeshError, **whose: Any) -> Failure:
    """A report, or an event of the node, that says with which error an operation has failed. `kind`
    has the fields `error` and `message`, and may have `hint`; `whose` are its other ones.
    """
    made: Any = kind
    said = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
    return made(  # type: ignore[no-any-return]
        **whose, **{name: said[name] for name in said if name in made.__dataclass_fields__}
    )
