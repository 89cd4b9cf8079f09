"""What the controller core knows of its cell: all entries, by id, and what they have in common.

The entries are mutable and owned by the controller core alone; a field is written by the class
that holds it. They conform to the views that policies and placement take, so that a decision reads
the live state and copies nothing.
"""

from dataclasses import field

from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.expectations import Expectations
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.migration import Migration
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.operation import OperationEntry
from mesh.core.controller.state.prefetches import PrefetchCounts
from mesh.core.controller.state.request import Orphan, RequestEntry
from mesh.core.controller.state.rollout import RolloutEntry
from mesh.core.controller.state.wanted import WantedEntry
from mesh.domain.actions import RefuseRequest
from mesh.domain.deployment import Deployment
from mesh.domain.energy import NO_ENERGY, EnergyView, together
from mesh.domain.ids import DeploymentName, InstanceId, NodeId, OperationId, RequestId
from mesh.domain.lifecycle import DeploymentState, InstanceState, NodeState, RequestState
from mesh.domain.limits import forget_oldest
from mesh.domain.profile import Profile
from mesh.domain.reasons import DeviceKind, RefusalReason
from mesh.domain.request import ATTEMPTS_EACH
from mesh.domain.revision import Revision, Revisions, public_name
from mesh.domain.values import dataclass

EPOCHS_MAX = 1 << 21
"""Epochs are counted modulo this, so that attempts are numbers of 32 bits. They are seconds: within
24 days no two leaders have the same remainder, and no request that is taken over is so old.
"""
ENDED_MAX = 1 << 13
"""The most requests with keys of which a cell knows that they have ended."""
REFUSED_CALLS_MAX = 64
"""Refused calls whose other answers may still be asked for."""


@dataclass(slots=True, kw_only=True, eq=False)
class Cell:
    """All entries, by id. Dicts keep insertion order, so iteration is deterministic."""

    nodes: dict[NodeId, NodeEntry] = field(default_factory=dict)
    links: dict[int, NodeEntry] = field(default_factory=dict)
    deployments: dict[DeploymentName, DeploymentEntry] = field(default_factory=dict)
    rollouts: dict[DeploymentName, RolloutEntry] = field(default_factory=dict)
    """The rollouts of deployments that have had another revision, by the name that callers know."""
    rolling: dict[DeploymentName, RolloutEntry] = field(default_factory=dict)
    """Those of them of which one comes, or still answers; see `note_rests`."""
    instances: dict[InstanceId, InstanceEntry] = field(default_factory=dict)
    requests: dict[RequestId, RequestEntry] = field(default_factory=dict)
    orphans: dict[RequestId, Orphan] = field(default_factory=dict)
    """Requests that their clients have not come for yet; those that have ended are here alone."""
    ended: dict[RequestId, int] = field(default_factory=dict)
    """The last attempts of requests with keys that have ended here, the latest end last."""
    operations: dict[OperationId, OperationEntry] = field(default_factory=dict)
    expectations: Expectations = field(default_factory=Expectations)
    fleet_changes: int = 0
    """Times that nodes came or went, or something new was learned of their speed."""
    waiting: dict[DeploymentName, None] = field(default_factory=dict)
    """Deployments that may have a queue: each enters when a request queues; see `with_queues`."""
    below_minimum: dict[DeploymentName, None] = field(default_factory=dict)
    """Deployments that had no room for all of their `replicas_min` when that was last tried."""
    refused: dict[RefusalReason, int] = field(default_factory=dict)
    refused_calls: dict[RequestId, RefuseRequest] = field(default_factory=dict)
    """The last refusals of calls for several answers, by their first requests."""
    prefetches: PrefetchCounts = field(default_factory=PrefetchCounts)
    wanted: dict[DeviceKind, WantedEntry] = field(default_factory=dict)
    """The kinds of nodes of which somebody starts and stops as many as are wanted."""
    served: int = 0
    energy: EnergyView = NO_ENERGY
    """What all nodes took, those included that are gone."""
    instances_started: int = 0
    migrations: dict[RequestId, Migration] = field(default_factory=dict)
    """Under way, by the request."""
    migrations_at_s: float | None = None
    """When they are looked at, and requests that are to move; None when no such timer is set."""
    retry_at_s: float | None = None
    """When those that wait are tried again; None when no such timer is set."""
    retried: str = ""
    """The deployment that was tried last for that timer; the next try goes on after it."""

    def note_energy(self, taken: EnergyView) -> None:
        self.energy = together((self.energy, taken))

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
        return sum(len(i.requests) for i in self.instances.values()) - len(self.migrations)

    def add_node(self, node: NodeEntry) -> None:
        self.nodes[node.node_id] = self.links[node.link_id] = node
        self.fleet_changes += 1

    def remove_node(self, node: NodeEntry) -> None:
        """The node is lost. Its instances are removed one by one."""
        node.advance(NodeState.LOST)
        del self.nodes[node.node_id], self.links[node.link_id]
        self.fleet_changes += 1

    def turn_node(self, node: NodeEntry, to: NodeState) -> None:
        """The node takes new work from now on, or no more."""
        node.touch()
        if node.state is not to:
            node.advance(to)
            self.fleet_changes += 1
            for instance in node.instances.values():
                if owner := self.deployments.get(instance.deployment):
                    owner.ease_nodes()  # it counts again, perhaps in the place of another

    def profile_on(self, node: NodeEntry, deployment: Deployment) -> Profile:
        """What iterations of the deployment's model take on the node, as well as that is known."""
        footprint = node.footprint_of(deployment)
        return self.expectations.profile(deployment.model, footprint, node.hello)

    def learn_profile(self, profile: Profile) -> None:
        """A profile has been measured: what nodes refused by earlier ones does not hold."""
        self.expectations.learn_profile(profile)
        self.note_speed()

    def note_speed(self) -> None:
        """Something new is known of the speed of nodes: who waits is looked at anew."""
        self.fleet_changes += 1
        for node in self.nodes.values():
            node.touch()

    def refine_profile(self, before: Profile, told: Profile) -> Profile:
        """The same of one that iterations have refined; see `Expectations.refine_profile`."""
        self.note_speed()
        return self.expectations.refine_profile(before, told)

    def add_deployment(self, entry: DeploymentEntry) -> None:
        self.deployments[entry.spec.name] = entry

    def current(self, name: DeploymentName) -> DeploymentEntry | None:
        """The revision that serves under a name that callers know."""
        rollout = self.rollouts.get(name)
        if rollout is not None:
            return rollout.current
        return self.deployments.get(name) if name == public_name(name) else None

    def rollout_of(self, current: DeploymentEntry, revisions: Revisions = ()) -> RolloutEntry:
        """The rollout of a deployment; it is made where the deployment has had none."""
        name = public_name(current.name)
        if name not in self.rollouts:
            self.rollouts[name] = RolloutEntry(current=current, revisions=revisions)
        return self.rollouts[name]

    def begin_rollout(self, rollout: RolloutEntry, coming: DeploymentEntry) -> None:
        """A revision is to take over."""
        rollout.begin(coming)
        self.add_deployment(coming)
        self.rolling[rollout.name] = rollout

    def note_rests(self, rollout: RolloutEntry) -> None:
        """One revision alone is left of it."""
        del self.rolling[rollout.name]

    def earlier_comings(
        self, rollout: RolloutEntry, target: Revision | None
    ) -> list[DeploymentEntry]:
        """Those that were to take over before `target` was."""
        wanted = target.deployment.spec.name if target is not None else None
        coming = rollout.coming
        starts = coming is not None and coming.state is DeploymentState.STARTING
        return [coming] if coming is not None and starts and coming.name != wanted else []

    def remove_rollout(self, rollout: RolloutEntry) -> list[DeploymentEntry]:
        """Its deployment is deleted: what there is of it."""
        del self.rollouts[rollout.name]
        self.rolling.pop(rollout.name, None)
        coming = [rollout.coming] if rollout.coming is not None else []
        return [rollout.current, *coming, *rollout.retiring.values()]

    def remove_deployment(self, entry: DeploymentEntry) -> None:
        rollout = self.rollouts.get(public_name(entry.name))
        if rollout is not None:
            rollout.forget(entry)
            if entry.state is DeploymentState.RETIRING:
                rollout.current.note_retired(entry)
        entry.advance(DeploymentState.GONE)
        del self.deployments[entry.spec.name]
        self.below_minimum.pop(entry.spec.name, None)

    def add_instance(self, instance: InstanceEntry) -> None:
        self.instances[instance.instance_id] = instance
        instance.node.add(instance)
        owner = self.deployments.get(instance.deployment)
        if owner is not None:
            owner.add(instance)

    def remove_instance(self, instance: InstanceEntry) -> None:
        """The instance is gone, and its memory free."""
        if instance.prefetched:
            self.prefetches.note_wasted()
        instance.expect_nobody()
        instance.advance(InstanceState.GONE)
        del self.instances[instance.instance_id]
        instance.node.remove(instance)
        owner = self.deployments.get(instance.deployment)
        if owner is not None:
            owner.remove(instance)

    def number_instance(self) -> int:
        """The number of the next instance that is started."""
        self.instances_started += 1
        return self.instances_started

    def add_request(self, request: RequestEntry) -> None:
        self.requests[request.original.request_id] = request

    def remove_request(self, request: RequestEntry) -> None:
        """The request is over."""
        request.advance(RequestState.ENDED)
        del self.requests[request.original.request_id]
        self._note_ended(request)

    def _note_ended(self, request: RequestEntry) -> None:
        if request.original.keyed:
            self.ended.pop(request.request_id, None)
            self.ended[request.request_id] = request.submissions
            forget_oldest(self.ended, ENDED_MAX)

    def attempts_before(self, request_id: RequestId, epoch: int) -> int:
        """After this number the attempts of a request with a key and this id begin. Earlier leaders
        gave it other numbers, which may be higher: epochs are counted modulo `EPOCHS_MAX`.
        """
        return self.ended.get(request_id, epoch % EPOCHS_MAX * ATTEMPTS_EACH)

    def add_orphan(self, orphan: Orphan, *, ended: bool) -> None:
        """A node has brought it along, whole or still running."""
        self.orphans[orphan.request.request_id] = orphan
        if ended:
            orphan.request.advance(RequestState.ENDED)
            self._note_ended(orphan.request)
        else:
            self.add_request(orphan.request)

    def take_orphan(self, request_id: RequestId) -> Orphan | None:
        """Its client has come, or it is given up."""
        return self.orphans.pop(request_id, None)

    def add_migration(self, migration: Migration) -> None:
        """A request begins to move."""
        self.migrations[migration.request.original.request_id] = migration
        migration.request.note_migration(migration)
        migration.copy.note_migration(migration)

    def remove_migration(self, migration: Migration) -> None:
        """It is handed over, or given up."""
        del self.migrations[migration.request.original.request_id]
        migration.request.note_migration(None)

    def set_migrations(self, at_s: float | None) -> None:
        """A timer is set for them; None: it has gone off."""
        self.migrations_at_s = at_s

    def note_queue(self, entry: DeploymentEntry) -> None:
        """A request has entered its queue."""
        self.waiting[entry.spec.name] = None

    def note_served(
        self,
        owner: DeploymentEntry | None,
        output_tokens: int,
        slo_class: str = "",
        *,
        met: bool = False,
        loads: bool = False,
    ) -> None:
        """A request has ended well; its deployment may have been deleted."""
        self.served += 1
        if owner is not None:
            owner.note_served(output_tokens, slo_class, met=met, loads=loads)

    def note_refused(
        self, owner: DeploymentEntry | None, reason: RefusalReason, slo_class: str = ""
    ) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1
        if owner is not None:
            owner.note_refused(slo_class)

    def note_refused_call(self, told: RefuseRequest) -> None:
        """The first request of a call for several answers is refused; the others come yet."""
        self.refused_calls[told.request_id] = told
        forget_oldest(self.refused_calls, REFUSED_CALLS_MAX)

    def add_operation(self, operation: OperationEntry) -> None:
        self.operations[operation.operation_id] = operation

    def remove_operation(self, operation_id: OperationId) -> OperationEntry | None:
        """It is over; None if it has been before."""
        return self.operations.pop(operation_id, None)

    def note_minimum(self, name: DeploymentName, *, lacking: bool) -> None:
        """Whether a deployment lacks room for some of its `replicas_min`."""
        if lacking:
            self.below_minimum[name] = None
        else:
            self.below_minimum.pop(name, None)

    def set_retry(self, at_s: float | None) -> None:
        """A timer is set for those that wait; None: it has gone off."""
        self.retry_at_s = at_s

    def note_retried(self, entry: DeploymentEntry) -> None:
        self.retried = entry.spec.name
