"""The operator's port: what is done with deployments and nodes, each as a stream of replies.

A controller does it itself, a front has its cells do it. Before: `mesh.controller.control`, by
gRPC, and `mesh.http.operating`, for the page.
"""

from collections.abc import AsyncGenerator
from typing import Protocol

from mesh.domain.actions import ReplyDone, ReplyProgress
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.ids import DeploymentName, NodeId
from mesh.domain.views import Arrivals, InstancePlan, Prospect

Replies = AsyncGenerator[ReplyProgress | ReplyDone, None]


class Operator(Protocol):
    """Each raises errors of the tree. What gives replies may raise them at its first step, and
    `deploy` after it has waited for a node that is starting.
    """

    def deploy(self, given: DeploymentSpec) -> Replies: ...

    def prospect(self, spec: DeploymentSpec) -> Prospect: ...

    def plan(self, name: DeploymentName, calls: Arrivals | None) -> InstancePlan: ...

    def replay(self, name: DeploymentName, of: DeploymentName | None) -> Replies: ...

    def load(self, name: DeploymentName) -> Replies: ...

    def unload(self, name: DeploymentName) -> Replies: ...

    def delete(self, name: DeploymentName) -> Replies: ...

    def undo(self, name: DeploymentName, to: int | None) -> Replies: ...

    def profile(
        self,
        name: DeploymentName,
        node_id: NodeId | None,
        *,
        operators: bool = False,
        cores: tuple[int, ...] = (),
    ) -> Replies: ...

    def scale(
        self,
        name: DeploymentName,
        *,
        replicas_min: int | None,
        replicas_max: int | None,
        keep_alive_s: float | None,
        revision: int | None = None,
    ) -> Replies: ...

    def drain(self, node_id: NodeId, *, undo: bool) -> Replies: ...
