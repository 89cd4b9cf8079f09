"""What the controller core knows of its cell: nodes, deployments, instances, requests, operations.

These entries are mutable and owned by the controller core alone. They conform to the views that
policies and placement take, so that a decision reads the live state and copies nothing.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mesh.compute.correction import Correction
from mesh.core.controller.state.expectations import Expectations
from mesh.core.controller.state.request import RequestEntry as RequestEntry
from mesh.domain.deployment import Deployment, DeploymentSpec
from mesh.domain.history import OutputHistory
from mesh.domain.ids import DeploymentName, InstanceId, ModelId, NodeId, OperationId, RequestId
from mesh.domain.lifecycle import DeploymentState, InstanceState, NodeState
from mesh.domain.messages import LoadInstance, NodeHello
from mesh.domain.model import Footprint
from mesh.domain.profile import Profile
from mesh.domain.reasons import DeviceKind, OperationKind, RefusalReason
from mesh.domain.steps import LoadTier, SleepingModel
from mesh.memory.demand import estimate_footprint
from mesh.memory.station import ReservationStation
from mesh.request.candidates import Candidates
from mesh.request.shadow import Verdict


@dataclass(slots=True, kw_only=True, eq=False)
class InstanceEntry:
    instance_id: InstanceId
    deployment: DeploymentName
    model_id: ModelId
    node: "NodeEntry"
    state: InstanceState
    footprint: Footprint
    profile: Profile | None
    """What predicts its iterations. None only for an instance that a node brought along and that is
    unloaded at once, since no deployment wants it.
    """
    kv_blocks: int
    """In force, as its node reports it; of one that loads, those that it will have."""
    context_tokens_max: int
    batch_max: int
    requests: dict[RequestId, RequestEntry] = field(default_factory=dict)
    tokens: int = 0
    required_blocks: int = 0
    """Both summed over its requests."""
    kv_blocks_used: int = 0
    correction: Correction = field(default_factory=Correction)
    """As its node reports it."""
    profiling: bool = False
    """Its model is being measured on it: it stays."""
    exceeded: tuple[int, int] = (-1, 0)
    """The last TPOT_EXCEEDED: its node's `eased` then, and the tokens of the request. It holds for
    requests that are no shorter, until the node is eased.
    """
    grow_again_s: float = 0.0
    """When a grow may be tried again after one that its node could not do."""
    to_load: LoadInstance | None = None
    """The command that loads it, sent once its memory is free; None for one that a node brought
    along.
    """
    load_s: float = 0.0
    """Seconds that its load is expected to take."""
    tier: LoadTier | None = None
    """From where it was loaded; None until then, and for one that a node brought along."""
    load_started_s: float = 0.0
    loaded_at_s: float = 0.0
    has_served: bool = False
    """A token has come from it."""
    idle_since_s: float = 0.0
    phase: str = ""
    share: float = 0.0

    @property
    def device(self) -> DeviceKind:
        return self.node.device

    @property
    def batch(self) -> int:
        return len(self.requests)

    @property
    def takes_requests(self) -> bool:
        """Whether requests may wait for it: loaded or loading, on a node that takes new work."""
        coming = self.is_loaded or self.state is InstanceState.LOADING
        return coming and self.node.state is NodeState.READY

    @property
    def takes_now(self) -> bool:
        """Whether a request may be submitted to it, if there is room and time."""
        return self.is_loaded and self.node.state is NodeState.READY

    @property
    def is_loaded(self) -> bool:
        """Loaded, and not about to go."""
        return self.state in (InstanceState.READY, InstanceState.PARKED)

    @property
    def is_full(self) -> bool:
        return self.batch >= self.batch_max

    @property
    def promised_bytes(self) -> int:
        """What it holds, weights included, once all that was issued for it is done."""
        return self.node.station.size_bytes(self.instance_id)

    @property
    def promised_blocks(self) -> int:
        """KV blocks that it will have when all that was issued for it is done."""
        held_bytes = self.promised_bytes - self.footprint.weights_bytes
        return max(held_bytes // self.footprint.kv_block_bytes, 0)


@dataclass(slots=True, kw_only=True, eq=False)
class NodeEntry:
    hello: NodeHello
    link_id: int
    station: ReservationStation
    last_seen_s: float
    state: NodeState = NodeState.READY
    rss_bytes: int = 0
    engine_bytes: int = 0
    iteration_started_s: float | None = None
    """When the iteration under way began, as far as reports tell; None when it has no work."""
    load_slowdown: float = 1.0
    asleep: tuple[SleepingModel, ...] = ()
    """Models whose weights the host keeps, as of its last heartbeat, without those woken since."""
    eased: int = 0
    """Counts the times that it may have got less to compute or more memory, heartbeats included.
    What it refuses is remembered with this count, and holds until the count changes.
    """
    instances: dict[InstanceId, InstanceEntry] = field(default_factory=dict)
    protected: "dict[DeploymentName, DeploymentEntry]" = field(default_factory=dict)
    """The cell's deployments: their `replicas_min` keeps instances from being reclaimed."""

    @property
    def node_id(self) -> NodeId:
        return self.hello.node_id

    @property
    def device(self) -> DeviceKind:
        return self.hello.device

    @property
    def free_bytes(self) -> int:
        return self.station.free_bytes

    @property
    def capacity_bytes(self) -> int:
        return self.station.capacity_bytes

    def is_idle(self) -> bool:
        """Whether no request is on it."""
        return not any(instance.requests for instance in self.instances.values())

    def is_loading(self) -> bool:
        """Whether a load runs on it, which slows its iterations down."""
        loading = [i for i in self.instances.values() if i.state is InstanceState.LOADING]
        return any(self.station.running(i.instance_id) for i in loading)

    def takes(self, spec: DeploymentSpec) -> bool:
        """Whether it takes new instances of a deployment now."""
        return self.state is NodeState.READY and self.suits(spec)

    def suits(self, spec: DeploymentSpec) -> bool:
        """Whether it has the kind of device for a deployment, and enough for an instance."""
        enough = spec.tensor_parallel <= self.hello.tensor_parallel_max
        return enough and self.device in spec.devices

    def footprint_of(self, deployment: Deployment) -> Footprint:
        stated = dict(deployment.footprints)
        return stated.get(self.hello.engine) or estimate_footprint(deployment.model)

    def tier_of(self, deployment: Deployment) -> LoadTier:
        """From where it would load the deployment's model."""
        if not self.asleep:
            return LoadTier.DISK
        wanted = SleepingModel(
            model_id=deployment.model.model_id, context_tokens_max=deployment.context_tokens_max
        )
        return LoadTier.HOST if wanted in self.asleep else LoadTier.DISK

    def reclaimable(self) -> Sequence[tuple[InstanceId, int]]:
        idle = [i for i in self.instances.values() if self.may_go(i)]
        idle.sort(key=lambda i: (i.idle_since_s, i.instance_id))
        return [(i.instance_id, self.station.size_bytes(i.instance_id)) for i in idle]

    def may_go(self, instance: InstanceEntry) -> bool:
        """Whether an instance is idle, and neither a minimum nor a measurement wants it to stay."""
        if instance.requests or instance.profiling or not instance.is_loaded:
            return False
        owner = self.protected.get(instance.deployment)
        return owner is None or owner.replicas() > owner.spec.scaling.replicas_min


@dataclass(slots=True, kw_only=True, eq=False)
class DeploymentEntry:
    spec: DeploymentSpec
    state: DeploymentState
    candidates: Candidates[InstanceEntry]
    """Its instances, in the policy's order."""
    history: OutputHistory = field(default_factory=OutputHistory)
    """Lengths of its answers so far."""
    deployment: Deployment | None = None
    """None until its model is imported."""
    queue: deque[RequestEntry] = field(default_factory=deque)
    instances: dict[InstanceId, InstanceEntry] = field(default_factory=dict)
    history_stored_s: float = 0.0
    served: int = 0
    refused: int = 0
    load_failures: int = 0
    """In a row. An instance that ended by itself before its first token counts as one, too."""
    load_error: str = ""
    paused_until_s: float = 0.0
    resume_at: int = 0
    """The candidate at which the last event ran out of validations; the next goes on there."""
    head: tuple[RequestId, int, int] | None = None
    """The request at the head of the queue when an instance was last tried for it, with `served`
    and `Cell.fleet_changes` then. Once one of the three differs, `in_vain` counts no more.
    """
    in_vain: dict[NodeId, tuple[int, Verdict | None]] = field(default_factory=dict)
    """Nodes that refused an instance for that request: their `eased` then, and the verdict where
    time was lacking; None where it was memory.
    """
    avoided: dict[NodeId, str] = field(default_factory=dict)
    """Nodes whose last load of it failed, and why; tried only when no other has room."""

    def replicas(self) -> int:
        """Instances that take new requests or will."""
        return sum(i.takes_requests for i in self.instances.values())

    def forgive_loads(self) -> None:
        """An instance has served, or lived until it was let go."""
        self.load_failures, self.load_error = 0, ""

    def may_park(self) -> bool:
        """Whether more than its minimum keep their KV caches: then one need not."""
        taking = [i for i in self.instances.values() if i.takes_requests]
        ready = sum(i.state is not InstanceState.PARKED for i in taking)
        return ready > self.spec.scaling.replicas_min


@dataclass(slots=True, kw_only=True, eq=False)
class OperationEntry:
    """An administrative call under way. Deploy: `node` imports; then `pending` is being stored.
    Profile: `instance` on `node` is kept for it, and measured; then `pending_profile` is being
    stored.
    """

    operation_id: OperationId
    kind: OperationKind
    name: DeploymentName
    node: NodeEntry | None = None
    pending: Deployment | None = None
    instance: InstanceEntry | None = None
    measuring: bool = False
    """The node has been asked to measure."""
    pending_profile: Profile | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Cell:
    """All entries, by id. Dicts keep insertion order, so iteration is deterministic."""

    nodes: dict[NodeId, NodeEntry] = field(default_factory=dict)
    links: dict[int, NodeEntry] = field(default_factory=dict)
    deployments: dict[DeploymentName, DeploymentEntry] = field(default_factory=dict)
    instances: dict[InstanceId, InstanceEntry] = field(default_factory=dict)
    requests: dict[RequestId, RequestEntry] = field(default_factory=dict)
    operations: dict[OperationId, OperationEntry] = field(default_factory=dict)
    expectations: Expectations = field(default_factory=Expectations)
    waiting: dict[DeploymentName, None] = field(default_factory=dict)
    """Deployments that may have a queue: each enters when a request queues; see `with_queues`."""
    fleet_changes: int = 0
    """Times that nodes came, went or were drained, or that something new was learned of them."""
    below_minimum: dict[DeploymentName, None] = field(default_factory=dict)
    """Deployments that had no room for all of their `replicas_min` when that was last tried."""
    refused: dict[RefusalReason, int] = field(default_factory=dict)
    served: int = 0
    instances_started: int = 0
    retry_at_s: float | None = None
    """When those that wait are tried again; None when no such timer is set."""
    retried: str = ""
    """The deployment that was tried last for that timer; the next try goes on after it."""

    def with_queues(self) -> list[DeploymentEntry]:
        """Deployments for which requests wait. Going through all of them whenever something ends
        would mean thousands that have no queue.
        """
        found = [self.deployments[name] for name in self.waiting if name in self.deployments]
        waiting = [entry for entry in found if entry.queue]
        self.waiting = {entry.spec.name: None for entry in waiting}
        return waiting

    def queued(self) -> int:
        return sum(len(d.queue) for d in self.deployments.values())

    def running(self) -> int:
        return sum(len(i.requests) for i in self.instances.values())
