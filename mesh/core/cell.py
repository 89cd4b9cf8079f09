"""What the controller core knows of its cell: nodes, deployments, instances, requests, operations.

These entries are mutable and owned by the controller core alone. They conform to the views that
policies and placement take, so that a decision reads the live state and copies nothing.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from mesh.domain.deployment import Deployment, DeploymentSpec
from mesh.domain.ids import (
    DeploymentName,
    InstanceId,
    ModelId,
    NodeId,
    OperationId,
    RequestId,
)
from mesh.domain.lifecycle import DeploymentState, InstanceState, NodeState, RequestState
from mesh.domain.messages import NodeHello
from mesh.domain.model import Footprint
from mesh.domain.reasons import DeviceKind, RefusalReason
from mesh.domain.request import Request
from mesh.domain.text import TextAssets
from mesh.memory.book import MemoryBook
from mesh.memory.demand import estimate_footprint


@dataclass(slots=True, kw_only=True, eq=False)
class RequestEntry:
    request: Request
    arrival_s: float
    state: RequestState = RequestState.QUEUED
    queued_at_s: float = 0.0
    attempt: int = 0
    """Submissions to nodes so far."""
    output_tokens: list[int] = field(default_factory=list)
    instance: "InstanceEntry | None" = None
    reserved_blocks: int = 0
    grace_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class InstanceEntry:
    instance_id: InstanceId
    deployment: DeploymentName
    model_id: ModelId
    node: "NodeEntry"
    state: InstanceState
    footprint: Footprint
    kv_blocks: int
    context_tokens_max: int
    batch_max: int
    requests: dict[RequestId, RequestEntry] = field(default_factory=dict)
    reserved_blocks: int = 0
    """Of its requests: each holds blocks for all tokens that it may come to."""
    kv_blocks_used: int = 0
    was_loaded: bool = False
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
        coming = self.state in (InstanceState.LOADING, InstanceState.READY)
        return coming and self.node.state is NodeState.READY

    def has_room_for(self, tokens: int) -> bool:
        blocks = self.footprint.blocks_for(min(tokens, self.context_tokens_max))
        return self.batch < self.batch_max and self.reserved_blocks + blocks <= self.kv_blocks


@dataclass(slots=True, kw_only=True, eq=False)
class NodeEntry:
    hello: NodeHello
    link_id: int
    book: MemoryBook
    last_seen_s: float
    state: NodeState = NodeState.READY
    rss_bytes: int = 0
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
        return self.book.free_bytes

    @property
    def capacity_bytes(self) -> int:
        return self.book.capacity_bytes

    @property
    def leaving_bytes(self) -> int:
        """Of loaded instances that are being unloaded. One that was given up while it loaded does
        not count: nobody knows when its node lets go of it.
        """
        leaving = InstanceState.UNLOADING
        return sum(
            self.book.held_bytes(i.instance_id)
            for i in self.instances.values()
            if i.state is leaving and i.was_loaded
        )

    def footprint_of(self, deployment: Deployment) -> Footprint:
        stated = dict(deployment.footprints)
        return stated.get(self.hello.engine) or estimate_footprint(deployment.model)

    def reclaimable(self) -> Sequence[tuple[InstanceId, int]]:
        idle = [i for i in self.instances.values() if self._may_go(i)]
        idle.sort(key=lambda i: (i.idle_since_s, i.instance_id))
        return [(i.instance_id, self.book.held_bytes(i.instance_id)) for i in idle]

    def _may_go(self, instance: InstanceEntry) -> bool:
        owner = self.protected.get(instance.deployment)
        spare = owner is None or owner.replicas() > owner.spec.scaling.replicas_min
        return instance.state is InstanceState.READY and not instance.requests and spare


@dataclass(slots=True, kw_only=True, eq=False)
class DeploymentEntry:
    spec: DeploymentSpec
    state: DeploymentState
    deployment: Deployment | None = None
    """None until its model is imported."""
    queue: deque[RequestEntry] = field(default_factory=deque)
    instances: dict[InstanceId, InstanceEntry] = field(default_factory=dict)
    served: int = 0
    refused: int = 0
    load_failures: int = 0
    """In a row; a completed load resets it."""
    load_error: str = ""
    paused_until_s: float = 0.0
    avoided: dict[NodeId, str] = field(default_factory=dict)
    """Nodes whose last load of it failed, and why; tried only when no other has room."""

    def replicas(self) -> int:
        """Instances that take new requests or will."""
        return sum(i.takes_requests for i in self.instances.values())


class OperationKind(StrEnum):
    DEPLOY = "deploy"
    DELETE = "delete"
    SCALE = "scale"


@dataclass(slots=True, kw_only=True, eq=False)
class OperationEntry:
    """An administrative call under way. Deploy: `node` imports; then `pending` is being stored."""

    operation_id: OperationId
    kind: OperationKind
    name: DeploymentName
    node: NodeEntry | None = None
    pending: Deployment | None = None
    text: TextAssets | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Cell:
    """All entries, by id. Dicts keep insertion order, so iteration is deterministic."""

    nodes: dict[NodeId, NodeEntry] = field(default_factory=dict)
    links: dict[int, NodeEntry] = field(default_factory=dict)
    deployments: dict[DeploymentName, DeploymentEntry] = field(default_factory=dict)
    instances: dict[InstanceId, InstanceEntry] = field(default_factory=dict)
    requests: dict[RequestId, RequestEntry] = field(default_factory=dict)
    operations: dict[OperationId, OperationEntry] = field(default_factory=dict)
    below_minimum: dict[DeploymentName, None] = field(default_factory=dict)
    """Deployments that had no room for all of their `replicas_min` when that was last tried."""
    refused: dict[RefusalReason, int] = field(default_factory=dict)
    served: int = 0
    instances_started: int = 0

    def queued(self) -> int:
        return sum(len(d.queue) for d in self.deployments.values())

    def running(self) -> int:
        return sum(len(i.requests) for i in self.instances.values())
