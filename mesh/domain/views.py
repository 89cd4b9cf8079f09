"""Read-only pictures of a cell, for people and APIs. Decisions do not use them."""

from dataclasses import field
from enum import StrEnum

from mesh.domain.deployment import DeploymentSpec
from mesh.domain.energy import NO_ENERGY, EnergyView
from mesh.domain.ids import DeploymentName, InstanceId, ModelId, NodeId, RequestId
from mesh.domain.lifecycle import DeploymentState, InstanceState, NodeState
from mesh.domain.model import Footprint, ModelInfo
from mesh.domain.profile import Profile, Stalls
from mesh.domain.ranges import Factor, Instant, Share
from mesh.domain.reasons import DeviceKind, ProfileSource, RefusalReason, Verdict
from mesh.domain.revision import RevisionState
from mesh.domain.steps import LoadTier
from mesh.domain.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOperationView:
    """A load, resize or unload that is promised, and runs or waits in the reservation station."""

    kind: str
    instance_id: InstanceId
    size_bytes: int
    """What its instance is to hold once it is done."""
    running: bool
    needed_in_s: Instant
    """Until when it is needed; negative when that has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSnapshot:
    instance_id: InstanceId
    deployment: DeploymentName
    node_id: NodeId
    state: InstanceState
    batch: int
    batch_max: int
    kv_blocks: int
    kv_blocks_used: int
    kv_blocks_cached: int = 0
    """The blocks that are kept for requests to come, beside those used; they may go at any time."""
    weights_bytes: int
    kv_bytes: int
    """The size of `kv_blocks` in bytes."""
    kv_used_bytes: int
    kv_required_bytes: int
    """M_require of its requests (LLM-Mesh eq. 2)."""
    load_s: float
    """How long its load took, or has taken so far."""
    phase: str
    """While it loads: what is being done."""
    share: float
    headroom_least_s: float | None = None
    """The least headroom of its requests (LLM-Mesh eq. 1); `None` when it has none."""
    headroom_p50_s: float | None = None
    iteration_s: float = 0.0
    """The predicted time of its next decode with its present batch, or of one request when it has
    none.
    """
    correction: Factor = 1.0
    """Recent iteration times, measured over predicted."""
    correction_planned: Factor = 1.0
    """The same as promises are planned with: what the last seconds have seldom exceeded."""
    stalls: Stalls = field(default_factory=Stalls)
    """The stalls as of its node's last heartbeat."""
    profile: str = ""
    """`measured`, `measured as` another model of its shape, or what its iteration times are scaled
    from.
    """
    profile_source: ProfileSource | None = None
    """How its iteration times are known; None where nothing predicts them."""
    off_p50: Share = 0.0
    off_p95: Share = 0.0
    """The shares by which predictions of its last iterations were off (median and 95th percentile),
    as its node told; 0 where there was none.
    """
    resident_share: Share | None = None
    """The share of its weights that is on the device; None while it loads."""
    swaps_to: Share | None = None
    """The share that will be once the swap ends that is under way; None where none is."""
    tier: LoadTier | None = None
    """From where its weights came; None while it loads, and where nobody knows any more."""
    load_expected_s: float = 0.0
    """How long its load was expected to take when it began, as likely longer as shorter; 0 for one
    that a node brought along.
    """
    load_planned_s: float = 0.0
    """The same as it was promised with: longer by what loads there deviate."""

    @property
    def kv_cached_bytes(self) -> int:
        """The bytes of cached blocks, within `kv_bytes` and beyond."""
        return self.kv_blocks_cached * self.kv_bytes // max(self.kv_blocks, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionView:
    """One of a deployment's revisions, and what there is of it now."""

    number: int
    state: RevisionState
    spec: DeploymentSpec
    message: str = ""
    """Why it failed, or what keeps it from starting."""
    ready: int = 0
    """How many of its instances are loaded."""
    wanted: int = 0
    """How many instances it is to have before it takes over, or its minimum."""
    requests: int = 0
    """The requests that the revision answers, or has queued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassView:
    """What becomes of the requests of one SLO class. `met` of those `served` kept TTFT and mean
    TPOT, as was promised.
    """

    name: str
    queued: int
    running: int
    served: int
    met: int
    refused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedView:
    """How many instances a deployment keeps loaded by `spec.scaling.plan`, and why."""

    wanted: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """A deployment without what its instances do, which is most of the work of a snapshot."""

    spec: DeploymentSpec
    model: ModelInfo | None
    """None while it is being imported."""
    state: DeploymentState


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSnapshot:
    spec: DeploymentSpec
    model: ModelInfo | None
    """None while it is being imported."""
    state: DeploymentState
    context_tokens_max: int
    queued: int
    running: int
    served: int
    refused: int
    instances: tuple[InstanceSnapshot, ...]
    footprints: tuple[tuple[str, Footprint], ...] = ()
    """What an instance takes, by the name of the engine that said so."""
    phase: str = ""
    """While it is imported: what is being done; why, where it has failed."""
    share: float = 0.0
    revision: int = 1
    """The revision that serves."""
    revisions: tuple[RevisionView, ...] = ()
    """The revisions by number, with the one that serves; empty where there never was another."""
    prompt_tokens: int = 0
    """The prompt tokens of the requests that have had a first token."""
    cached_tokens: int = 0
    """How many of those were found in the prefix cache."""
    classes: tuple[ClassView, ...] = ()
    """In the order of its spec."""
    differs: str = ""
    """At a front: in which of its cells it is missing, or is another one; empty where all agree."""
    energy: EnergyView = NO_ENERGY
    """What nodes took while they computed for it."""
    planned: PlannedView | None = None
    """`None` where its scaling has no plan, and before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTimesView:
    """What loads of a node are expected to take: a fixed part and a rate, as the node stated them,
    times a factor, as loads have shown since.
    """

    tier: LoadTier
    fixed_s: float
    bytes_per_s: float
    loads: int
    """The last ones, of which the factor is the mean; on nodes like it where it has had none."""
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshot:
    node_id: NodeId
    state: NodeState
    device: DeviceKind
    hardware: str
    cores: int
    engine: str
    memory_bytes: int
    """Limit of the node's process."""
    base_bytes: int
    """What the process takes without any instance."""
    promised_bytes: int
    """What instances will hold once all that was issued is done."""
    tracked_bytes: int
    """What instances may hold now."""
    rss_bytes: int
    unaccounted_bytes: int
    """RSS above what the process takes by itself and what the engine's books say; negative when
    the system has taken pages back."""
    operations: tuple[MemoryOperationView, ...]
    """Memory operations, the running ones first, then by deadline."""
    silent_s: float
    """The seconds since its last report."""
    instances: tuple[InstanceSnapshot, ...]
    fingerprint: str = ""
    load_slowdown: Factor = 1.0
    """The factor by which a load lengthens the iterations beside it."""
    busy_load_factor: Factor = 1.0
    """The factor by which a load takes longer if the node computes beside it all along."""
    prefetch_bytes: int = 0
    """How much of its memory may hold what is loaded before anybody calls for it."""
    precision: str = ""
    """In which precisions the node computes and why, in words; empty where it does not say."""
    asleep: tuple[ModelId, ...] = ()
    """Unloaded models whose weights are in its host's memory."""
    load_times: tuple[LoadTimesView, ...] = ()
    footprints: tuple[tuple[str, Footprint], ...] = ()
    """What an instance is booked at here, by shape, as the last one that was loaded said."""
    phase: str = ""
    """What a node that starts does before it joins, in words."""
    share: float = 0.0
    """How much of the phase is done: 0 to 1."""
    energy: EnergyView = NO_ENERGY


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchView:
    """Imports and loads that were begun before anybody called, since the controller started."""

    begun: int = 0
    used: int = 0
    """How many a caller found."""
    wasted: int = 0
    """How many were given up, or had gone again, before there was a call."""
    loads: int = 0
    """The loads that callers needed, or would have needed without a prefetch."""
    felt: int = 0
    """How many of these callers waited for, at least in part."""

    @property
    def hit_rate(self) -> float:
        """The share of these loads that a prefetch made shorter or spared; 0 where there
        was none.
        """
        return self.used / self.loads if self.loads else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesWanted:
    """How many nodes of a kind the cell wants, where somebody starts and stops as many."""

    device: DeviceKind
    wanted: int
    ready: int
    """Those that have joined and take new work."""
    least: int
    most: int
    lacking_s: float = 0.0
    """For so long fewer have been ready than are wanted; 0: none lacks."""
    why: str = ""
    """What changed the number last, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSnapshot:
    deployments: tuple[DeploymentSnapshot, ...]
    nodes: tuple[NodeSnapshot, ...]
    queued: int
    running: int
    served: int
    refused: tuple[tuple[RefusalReason, int], ...]
    prefetches: PrefetchView = PrefetchView()
    wanted: tuple[NodesWanted, ...] = ()
    """By kind; none where nobody asked for it, and in the first seconds of a controller."""
    energy: EnergyView = NO_ENERGY


class RequestPhase(StrEnum):
    """How far an open request is, as its client has been told."""

    QUEUED = "queued"
    ACCEPTED = "accepted"
    """It has a place, or the promise of one."""
    ANSWERING = "answering"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSnapshot:
    """A request whose client waits for it."""

    request_id: RequestId
    deployment: DeploymentName
    phase: RequestPhase
    prompt_tokens: int
    output_tokens: int
    output_tokens_max: int
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileView:
    """A profile that the cell knows of a deployment's model, and the nodes that it holds for."""

    profile: Profile
    nodes: tuple[NodeId, ...]


class Fit(StrEnum):
    """When a node has the memory for one more instance."""

    NOW = "now"
    ONCE_IDLE_GO = "once idle instances go"
    """They go by themselves for one that is called."""
    ONCE_OTHERS_GO = "once others go"
    """What is there now is in use, or is to stay."""
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProspect:
    """What an instance of a deployment that is not there yet would meet with on a node. Times are
    in seconds; those to a first token are infinite where no forecast was made.
    """

    node_id: NodeId
    fit: Fit
    needed_bytes: int
    """What it needs at least."""
    free_bytes: int
    """What the node has for it now, without any instance going."""
    capacity_bytes: int
    tier: LoadTier
    """From where its weights would come."""
    load_s: float
    measured: bool
    """Whether its iteration times were measured; otherwise they are an estimate."""
    cold: Verdict
    """What becomes of a call that comes now, and has it loaded; `passes` where the policy promises
    nothing.
    """
    cold_ttft_s: float
    warm: Verdict
    """What would become of a call that comes now, were it loaded."""
    warm_ttft_s: float
    batch: int
    """How many would be decoded at once, if it were called as often as so far."""
    tpot_s: float
    """The time of a decode of so many."""
    busy_share: float
    """The share of the node's time that all decodes would take then; above 1 not all keep pace."""
    keeps_slo: bool
    """Whether it would keep its SLO there once it is loaded, and the node could carry its calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """What would become of a deployment, were it deployed so."""

    like: DeploymentName
    """The deployment whose calls so far are expected again."""
    prompt_tokens: int
    output_tokens: int
    calls_per_s: float
    nodes: tuple[NodeProspect, ...]
    """The nodes that would take it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """What comes, or is to come, for a deployment."""

    rate_per_s: float
    prompts: tuple[int, ...]
    """Tokens of prompts, each as likely as the others."""
    answer_tokens: float
    """The mean length of an answer."""

    @property
    def words(self) -> str:
        """In words, such as for why so many instances are planned."""
        mean = sum(self.prompts) / len(self.prompts) if self.prompts else 0.0
        return (
            f"{self.rate_per_s:.3g} calls a second with {mean:.0f} tokens each, answers of "
            f"{self.answer_tokens:.0f}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InstancePlan:
    """How many instances a deployment needs, on which nodes, and what callers are to expect then.

    Whole models are planned: no engine here runs single operators on other devices. Times are means
    in seconds.
    """

    calls: Arrivals
    replicas: int = 0
    nodes: tuple[NodeId, ...] = ()
    batch_max: int = 0
    """Sequences at a time with which an instance carries most at the pace of the SLO."""
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    error: float | None = None
    """By what share iterations may take longer than predicted, as the last ones of all these
    instances did (p95); `None` where one has not computed yet.
    """
    ttft_most_s: float | None = None
    """What is expected when iterations take so much longer."""
    tpot_most_s: float | None = None
    utilisation: float = 0.0
    """The calls over what the instances carry at the most."""
    watts: float | None = None
    """What the nodes draw; `None` where one does not know its joules."""
    j_per_token: float | None = None
    """For a token of an answer, idle power included."""
    revision: int = 0
    """The deployment's when the plan was made."""
    lacks: str = ""
    """Why the SLO is not kept, in words; empty where it is."""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBatches:
    """The batch files of a tenant that have not ended."""

    tenant: str
    batches: int
    lines: int
    """Calls of those files that have been checked."""
    done: int
    """Calls that have an answer or an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellStatus:
    """The cell in a few numbers."""

    version: str
    """The version of mesh in the controller."""
    uptime_s: float
    nodes_ready: int
    nodes: int
    deployments: int
    instances: int
    queued: int
    running: int
    served: int
    refused: tuple[tuple[RefusalReason, int], ...]
    state_path: str
    """The controller's state folder, on its machine."""
    prefetches: PrefetchView = PrefetchView()
    wanted: tuple[NodesWanted, ...] = ()
    energy: EnergyView = NO_ENERGY
    batches: tuple[OpenBatches, ...] = ()
    """By tenant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellLine:
    """Something that happened in the cell, in words. `kind` is deployment, instance, request, node
    or cell, and `subject` is its id.
    """

    kind: str
    subject: str
    text: str
    fault: bool = False
    """Whether something went wrong: reports list such lines."""
    deployment: str = ""
    """Which deployment it is about; empty where it is about none, or names another tenant's."""
    tenant: str = ""
    """Whose that deployment is: this tenant may read the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellEvent:
    """A line as a watcher receives it: how long ago it was, when it was sent."""

    number: int
    """Counts the lines with the same `tenant`, or with none, from the controller's start; 0 of a
    note to this watcher alone.
    """
    age_s: float
    line: CellLine
