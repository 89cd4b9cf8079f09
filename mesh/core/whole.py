"""The whole of what the controller core knows: all entries of its cell, by id.

Owned by the controller core alone, as the entries are (`mesh.core.cell`). A turn carries it from
one decision to the next.
"""

from dataclasses import dataclass, field

from mesh.core.cell import (
    DeploymentEntry,
    InstanceEntry,
    NodeEntry,
    OperationEntry,
    RequestEntry,
)
from mesh.core.expectations import Expectations
from mesh.domain.ids import DeploymentName, InstanceId, NodeId, OperationId, RequestId
from mesh.domain.reasons import RefusalReason


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
    """Deployments that have had a queue since `with_queues` was asked last, and perhaps have it."""
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
    """The last deployment whose turn that was."""

    def with_queues(self) -> list[DeploymentEntry]:
        """Deployments for which requests wait. A look at all would be one at thousands that have
        none, whenever something ends.
        """
        found = [self.deployments[name] for name in self.waiting if name in self.deployments]
        waiting = [entry for entry in found if entry.queue]
        self.waiting = {entry.spec.name: None for entry in waiting}
        return waiting

    def queued(self) -> int:
        return sum(len(d.queue) for d in self.deployments.values())

    def running(self) -> int:
        return sum(len(i.requests) for i in self.instances.values())
