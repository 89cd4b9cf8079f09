"""What the controller core knows of its cell: nodes, deployments, instances, requests, operations.

These entries are mutable and owned by the controller core alone. They conform to the views that
policies and placement take, so that a decision reads the live state and copies nothing.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mesh.compute.correction import Correction
from mesh.domain.deployment import Deployment, DeploymentSpec
from mesh.domain.history import OutputHistory
from mesh.domain.ids import (
    DeploymentName,
    InstanceId,
    ModelId,
    NodeId,
    OperationId,
    RequestId,
)
from mesh.domain.lifecycle import DeploymentState, InstanceState, NodeState, RequestState
from mesh.domain.messages import LoadInstance, NodeHello
from mesh.domain.model import Footprint
from mesh.domain.profile import Profile
from mesh.domain.reasons import DeviceKind, OperationKind
from mesh.domain.request import Request
from mesh.domain.slo import Slo
from mesh.memory.demand import estimate_footprint
from mesh.memory.station import ReservationStation
from mesh.request.candidates import Candidates
from mesh.request.shadow import Verdict


@dataclass(slots=True, kw_only=True, eq=False)
class RequestEntry:
    request: Request
    slo: Slo
    arrival_s: float
    state: RequestState = RequestState.QUEUED
    queued_at_s: float = 0.0
    attempt: int = 0
    """Submissions to nodes so far."""
    output_tokens: list[int] = field(default_factory=list)
    instance: "InstanceEntry | None" = None
    required_blocks: int = 0
    """KV blocks that it is expected to need where it runs (LLM-Mesh eq. 2)."""
    evictions: int = 0
    grace_s: float = 0.0
    due_s: float = 0.0
    """When its next token is due, while it runs."""
    submitted_s: float = 0.0
    prefill_left: int = 0
    """Tokens that its node has still to compute before its next one."""
    refused: Verdict | None = None
    """Why the last node that was asked could not compute it in time, on an instance or on one to be
    loaded for it. None: none was asked.
    """
    held_up: Verdict | None = None
    """Why it waits: the first verdict that was not about its own first token, if there was one.
    Waiting makes every first token late in the end."""
    latest_start_s: float | None = None
    """Waiting for longer than this would make its first token late. None: not worked out yet."""
    short_of_memory: bool = False
    """An instance that it was last tried on had no room for its KV cache."""
    overtaken: int = 0
    """Later requests that got a place on a node that could not take this one in time."""
    tokens: int = field(init=False)
    """Of prompt and output."""

    def __post_init__(self) -> None:
        self.tokens = len(self.request.prompt_tokens) + len(self.output_tokens)

    def turn_down(self, verdict: Verdict) -> None:
        """A node cannot compute it in time."""
        self.refused = verdict
        if self.held_up in (None, Verdict.FIRST_TOKEN_LATE):
            self.held_up = verdict


@dataclass(slots=True, kw_only=True, eq=False)
class InstanceEntry:
    instance_id: InstanceId
    deployment: DeploymentName
    model_id: ModelId
    node: "NodeEntry"
    state: InstanceState
    footprint: Footprint
    profile: Profile | None
    """None for one that nothing wants."""
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
    """`NodeEntry.eased` when a further request was TPOT_EXCEEDED, and its tokens."""
    grow_again_s: float = 0.0
    """Its KV cache is not to grow before: its node could not do it."""
    to_load: LoadInstance | None = None
    """What its load was decided with; None for one that a node brought along."""
    load_s: float = 0.0
    """Expected of its load."""
    load_started_s: float = 0.0
    loaded_at_s: float = 0.0
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
        """Now, or once it is loaded."""
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
    eased: int = 0
    """Times that it may have got less to do, heartbeats included; refusals are kept till then."""
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

    def takes(self, devices: Sequence[DeviceKind]) -> bool:
        """Whether it takes new instances of a deployment for these devices."""
        return self.state is NodeState.READY and self.device in devices

    def footprint_of(self, deployment: Deployment) -> Footprint:
        stated = dict(deployment.footprints)
        return stated.get(self.hello.engine) or estimate_footprint(deployment.model)

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
    """How long its answers turn out."""
    deployment: Deployment | None = None
    """None until its model is imported."""
    queue: deque[RequestEntry] = field(default_factory=deque)
    instances: dict[InstanceId, InstanceEntry] = field(default_factory=dict)
    history_stored_s: float = 0.0
    served: int = 0
    refused: int = 0
    load_failures: int = 0
    """In a row; a completed load resets it."""
    load_error: str = ""
    paused_until_s: float = 0.0
    resume_at: int = 0
    """The candidate at which the last turn had to stop, for it had validated often enough."""
    head: tuple[RequestId, int, int] | None = None
    """Who waits for an instance, and `served` and `fleet_changes` when that was tried."""
    in_vain: dict[NodeId, tuple[int, Verdict | None]] = field(default_factory=dict)
    """`NodeEntry.eased` of nodes that had no room (None) or no time for it."""
    avoided: dict[NodeId, str] = field(default_factory=dict)
    """Nodes whose last load of it failed, and why; tried only when no other has room."""

    def replicas(self) -> int:
        """Instances that take new requests or will."""
        return sum(i.takes_requests for i in self.instances.values())

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
    """The node has been asked to."""
    pending_profile: Profile | None = None
