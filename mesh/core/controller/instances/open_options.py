"""The cell as a policy sees it (`mesh.policy.views.CellView`), over the live entries.

Who asks a policy offers it what may be decided now: instances that may take a request, nodes for a
new one, neighbours that may be moved. Nothing of the cell is copied; what has to be worked out is,
when it is asked for. Before: `search`, `upkeep` and who else asks a policy. After: the policy.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mesh.compute.times import Times
from mesh.core.controller.instances.node_schedule import (
    batch_decode_s,
    decodes_share,
    loads_end_s,
    node_prompts_s,
    plan_load,
    times_of,
)
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.deployment import Deployment
from mesh.domain.ids import DeploymentName, InstanceId
from mesh.domain.reasons import PolicyFaultKind
from mesh.policy.plans import How, Release
from mesh.policy.views import InstanceView, NodeView, Place, RequestView, T


@dataclass(slots=True, kw_only=True, eq=False)
class OpenOptions:
    """`entry`: the deployment for which a place is sought."""

    ctx: EventContext
    entry: DeploymentEntry | None = None
    looks_max: int = 0
    may_move: Callable[[InstanceEntry], bool] | None = None
    """Whether a neighbour may be moved; `None` when nobody is moved."""

    @property
    def now_s(self) -> float:
        return self.ctx.now_s

    def needed_bytes(self, node: NodeEntry) -> int:
        """What the instance that would start on the node needs."""
        return 0

    def size(self) -> int:
        return len(self.ctx.cell.nodes) + len(self.ctx.cell.instances)

    def candidates(self) -> Iterable[InstanceEntry]:
        return ()

    def starts(self) -> Sequence[NodeEntry]:
        return ()

    def lacks_bytes(self, node: NodeView) -> int:
        return self.needed_bytes(self._node(node)) - node.free_bytes - self.shares_bytes(node)

    def shares_bytes(self, node: NodeView) -> int:
        deployment = self.entry.deployment if self.entry is not None else None
        return 0 if deployment is None else self._node(node).spared_bytes(deployment)

    def idle(self, place: Place) -> Sequence[InstanceEntry]:
        if isinstance(place, InstanceEntry):
            return [i for i in place.node.idle_instances(self.ctx.now_s) if i is not place]
        sparing = self.entry.deployment if self.entry is not None else None
        return self._node_of(place).idle_instances(self.ctx.now_s, sparing)

    def neighbours(self, place: Place) -> Sequence[InstanceEntry]:
        if self.may_move is None:
            return ()
        others = (other for other in self._node_of(place).instances.values() if other is not place)
        return [other for other in others if self.may_move(other)]

    def nodes(self) -> Iterable[NodeEntry]:
        return self.ctx.cell.nodes.values()

    def instances(self, node: NodeView | None = None) -> Iterable[InstanceEntry]:
        return (self.ctx.cell if node is None else self._node(node)).instances.values()

    def requests(self, instance: InstanceView) -> Iterable[RequestEntry]:
        return self.ctx.cell.instances[instance.instance_id].requests.values()

    def of_requests(
        self, instance: InstanceView, work_out: Callable[[Iterable[RequestView]], T]
    ) -> T:
        return self.ctx.cell.instances[instance.instance_id].of_requests(work_out)

    def deployment(self, name: DeploymentName) -> DeploymentEntry | None:
        return self.ctx.cell.deployments.get(name)

    def deployments(self) -> Iterable[DeploymentEntry]:
        return self.ctx.cell.deployments.values()

    def waiting(self, name: DeploymentName) -> Sequence[RequestEntry]:
        entry = self.ctx.cell.deployments.get(name)
        return () if entry is None else entry.queue

    def calls_per_s(self, name: DeploymentName) -> float:
        entry = self.ctx.cell.deployments.get(name)
        return 0.0 if entry is None else entry.calls_per_s(self.ctx.now_s)

    def cached_tokens(self, instance: InstanceView, request: RequestView) -> int:
        cell = self.ctx.cell
        return cell.instances[instance.instance_id].cached_tokens(cell.requests[request.request_id])

    def decode_s(self, instance: InstanceView) -> float:
        return batch_decode_s(self.ctx.cell.instances[instance.instance_id], self.ctx.now_s)

    def times(self, instance: InstanceView) -> Times:
        return times_of(self.ctx.cell.instances[instance.instance_id], self.ctx.now_s)

    def times_on(self, node: NodeView) -> Times:
        known = self._node(node)
        profile = self.ctx.cell.profile_on(known, self._deployment())
        return Times(profile, known.rule.overestimate)

    def carry_s(self, instance: InstanceView, tokens: int) -> float:
        known, node = self.ctx.cell.instances[instance.instance_id], self._node(instance.node)
        bytes_per_token = known.footprint.kv_block_bytes / known.footprint.block_tokens
        return tokens * bytes_per_token / node.kv_bytes_per_s(self.ctx.now_s)

    def ready_s(self, instance: InstanceView) -> float:
        ends_s = loads_end_s(self._node(instance.node), self.ctx.now_s)
        return ends_s.get(instance.instance_id, self.ctx.now_s)

    def utilisation(self, node: NodeView) -> float:
        return self.ctx.share_of(self._node(node), decodes_share)

    def prompts_s(self, node: NodeView) -> float:
        return node_prompts_s(self._node(node), self.ctx.now_s)

    def load_s(self, node: NodeView) -> float:
        return plan_load(self.ctx, self._deployment(), self._node(node)).load_s

    def _node(self, node: NodeView) -> NodeEntry:
        return self.ctx.cell.nodes[node.node_id]

    def _node_of(self, place: Place) -> NodeEntry:
        assert isinstance(place, InstanceEntry | NodeEntry), "views are the entries themselves"
        return place.node if isinstance(place, InstanceEntry) else place

    def _deployment(self) -> Deployment:
        if self.entry is None or self.entry.deployment is None:
            raise ValueError("this is asked for no deployment")
        return self.entry.deployment


def idle_to_unload(
    ctx: EventContext,
    entry: DeploymentEntry | None,
    place: InstanceEntry | NodeEntry,
    missing_bytes: int,
) -> tuple[InstanceId, ...]:
    """Idle instances that give way where so much memory is missing; none if all do not do."""
    node, share = place.node if isinstance(place, InstanceEntry) else place, None
    if isinstance(place, NodeEntry) and entry is not None and entry.deployment is not None:
        share = place.shared_weights_of(entry.deployment)
    for releases in ctx.policy.relieve(place, missing_bytes, OpenOptions(ctx=ctx, entry=entry)):
        taken = [instance.instance_id for instance in checked_releases(ctx, place, releases)]
        if taken and node.station.freed_bytes(taken, share) >= missing_bytes:
            return tuple(taken)
    return ()


def checked_releases(
    ctx: EventContext,
    place: InstanceEntry | NodeEntry,
    releases: Sequence[Release],
    may_move: Callable[[InstanceEntry], bool] | None = None,
) -> list[InstanceEntry]:
    """Those that are to be unloaded, all of which the books allow; else none."""
    node = place.node if isinstance(place, InstanceEntry) else place
    taken = []
    for release in releases:
        instance = node.instances.get(release.instance.instance_id)
        known = instance is not None and instance is release.instance
        if instance is None or not known or instance is place or instance in taken:
            gone = f"{release.instance.instance_id} is not another instance of {node.node_id}"
            ctx.policy.fault(PolicyFaultKind.NOT_IN_BOOKS, "Release", gone)
            return []
        if not (node.may_go(instance) or (may_move is not None and may_move(instance))):
            stays = f"{instance.instance_id} may not go now"
            ctx.policy.fault(PolicyFaultKind.NOT_IN_BOOKS, "Release", stays)
            return []
        if release.how is not How.UNLOAD:
            kept = f"{instance.instance_id} cannot give all of its memory by {release.how.value}"
            ctx.policy.fault(PolicyFaultKind.NO_CAPABILITY, "Release", kept)
            return []
        taken.append(instance)
    return taken
