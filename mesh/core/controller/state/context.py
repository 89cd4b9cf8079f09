"""The context of one event in the controller core: the cell, the time, what is decided so far."""

from dataclasses import dataclass, field

from mesh.core.controller.state.cell import Cell, InstanceEntry, NodeEntry
from mesh.domain.actions import ControllerAction
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.ids import DeploymentName, InstanceId, NodeId
from mesh.domain.limits import CellLimits
from mesh.policy.interface import Policy
from mesh.request.shadow import Verdict


@dataclass(slots=True, kw_only=True, eq=False)
class EventContext:
    cell: Cell
    epoch: int
    """Start counter of the controller; part of every id it gives, so that none comes twice."""
    limits: CellLimits
    policy: Policy
    now_s: float
    validations_left: int
    """Shadow validations that it may still make."""
    actions: list[ControllerAction] = field(default_factory=list)
    room_appeared: bool = False
    """Memory or a node came free for anyone: every queue is looked at before the event is over."""
    to_fill: dict[DeploymentName, None] = field(default_factory=dict)
    """Deployments whose own queue may find a place now, in the order in which that came up."""
    refusals: dict[InstanceId, tuple[Verdict, int]] = field(default_factory=dict)
    """Instances that refused a request in this event, why, and its tokens: requests that are no
    shorter are refused without a validation.
    """
    decodes_shares: dict[NodeId, float] = field(default_factory=dict)
    """Of nodes, as `instances.node_schedule.decodes_share` has it; without those whose requests
    have changed since.
    """
    released: dict[InstanceId, InstanceEntry] = field(default_factory=dict)
    """Instances that lost a request in this event, and are idle if the queues do not refill them.
    """

    def takes(self, node: NodeEntry, spec: DeploymentSpec) -> bool:
        """Whether the node takes new instances of a deployment, and the policy uses such nodes."""
        return node.device in self.policy.devices and node.takes(spec)

    def act(self, action: ControllerAction) -> None:
        self.actions.append(action)
