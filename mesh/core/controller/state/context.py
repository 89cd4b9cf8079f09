"""The context of one event in the controller core: the cell, the time, what is decided so far.

Whoever frees something says so here (`wake`, `wake_all`, `note_released`), and the end of the event
has `requests.queueing` look at what may find a place now.
"""

from collections.abc import Callable, Sequence
from dataclasses import field

from mesh.core.controller.state.cell import Cell
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.core.controller.state.wanted import WantedEntry
from mesh.domain.actions import ControllerAction, SendCommand, SetTimer
from mesh.domain.deployment import Deployment, DeploymentSpec
from mesh.domain.events import ControllerTimer
from mesh.domain.ids import DeploymentName, InstanceId, NodeId, RequestId
from mesh.domain.lifecycle import NodeState
from mesh.domain.limits import CellLimits
from mesh.domain.messages import NodeCommand
from mesh.domain.revision import public_name
from mesh.domain.units import format_bytes
from mesh.domain.values import dataclass
from mesh.policy.guarded import Guarded
from mesh.policy.plans import Release

RELEASES_MAX = 4
VALIDATIONS_OF_MANY = 4
REQUESTS_OF_ONE = 128
"""A validation rolls so many requests of a node forward within half a millisecond or so."""

EVICTIONS_MAX = 64
"""An event has no more best effort leave for requests that wait, once so many have left."""


@dataclass(slots=True, kw_only=True, eq=False)
class EventContext:
    cell: Cell
    epoch: int
    """Start counter of the controller; part of every id it gives, so that none comes twice."""
    limits: CellLimits
    policy: Guarded
    now_s: float
    validations_left: int
    """Shadow validations that it may still make."""
    looks_left: int = 0
    """As many again, to find out what those who are refused are to be told."""
    actions: list[ControllerAction] = field(default_factory=list)
    all_woken: bool = False
    """Memory or a node came free for anyone: every queue is looked at before the event is over."""
    released: dict[InstanceId, InstanceEntry] = field(default_factory=dict)
    """Instances that lost a request in this event, and are idle if the queues do not refill them.
    """
    evicted: set[RequestId] = field(default_factory=set)
    """Requests of best effort that it has taken off their instances: they get no place in it."""
    releases: list[Release] = field(default_factory=list)
    """Releases that the policy's `places` asked for, to be carried out before the event is over."""
    retries: bool = False
    """It tries anew all who wait: what was refused a moment before is asked again."""
    deferred: set[RequestId] = field(default_factory=set)
    """Requests for which the policy would rather start an instance than have them join one."""
    begun: list[RequestEntry] = field(default_factory=list)
    """Requests that have got their first token, and that the policy is asked about."""
    _released_once: set[InstanceId] = field(default_factory=set)
    _woken: dict[DeploymentName, None] = field(default_factory=dict)
    """Deployments whose own queue may find a place now, in the order in which that came up."""
    _shares: dict[NodeId, tuple[int, float]] = field(default_factory=dict)
    _mixed_nodes: list[NodeEntry] | None = None
    _obtainable: dict[tuple[NodeId, DeploymentName | None], tuple[int, int]] = field(
        default_factory=dict
    )

    def takes(self, node: NodeEntry, spec: DeploymentSpec) -> bool:
        """Whether the node takes new instances of a deployment, and the policy uses such nodes."""
        return node.device in self.policy.devices and node.takes(spec)

    def has_node(self, spec: DeploymentSpec) -> bool:
        """Whether any node takes new instances of a deployment."""
        nodes, devices = self.cell.nodes.values(), self.policy.devices
        return any(node.device in devices and node.takes(spec) for node in nodes)

    def why_no_node(self, spec: DeploymentSpec, purpose: str = "") -> tuple[str, str]:
        """Where no node takes instances of a deployment: what is missing, and what to do then."""
        usable = [d for d in spec.devices if d in self.policy.devices]
        nodes = [n for n in self.cell.nodes.values() if n.device in usable]
        if spec.task is not None and nodes and not any(n.hello.embeds for n in nodes):
            engines = ", ".join(sorted({n.hello.engine for n in nodes}))
            message = (
                f"{spec.name!r} has task {spec.task}; no node that is up computes it ({engines})"
            )
            return message, "start a node whose engine does: openvino's does, and vllm's"
        spans = [n.hello.tensor_parallel_max for n in nodes if n.state is NodeState.READY]
        widest = max(spans, default=0)
        if not 0 < widest < spec.tensor_parallel:
            devices, joined = " or ".join(spec.devices), self.cell.fleet_changes > 0
            return _why_none_is_ready(nodes, devices, purpose, has_had_nodes=joined)
        message = (
            f"instances of {spec.name!r} are to span {spec.tensor_parallel} devices "
            f"(tensor_parallel); those of the nodes that are up can span {widest}"
        )
        return (
            message,
            f"deploy it with tensor_parallel: {widest}, or start a node whose engine can",
        )

    def why_too_large(self, entry: DeploymentEntry) -> str:
        """Where none of the nodes that take instances of a deployment could hold one, were it
        empty: what it takes and what they have. Else, or where there is no node, it is empty.
        """
        nodes = [node for node in self.cell.nodes.values() if self.takes(node, entry.spec)]
        if entry.deployment is None or not nodes or any(node.could_hold(entry) for node in nodes):
            return ""
        needed = min(node.footprint_of(entry.deployment).instance_bytes(1) for node in nodes)
        most = max(node.capacity_bytes for node in nodes)
        return (
            f"an instance of {public_name(entry.name)!r} takes {format_bytes(needed)}; the largest "
            f"of {len(nodes)} nodes has {format_bytes(most)}"
        )

    def amiss(self, entry: DeploymentEntry) -> str:
        """What keeps it from being served though it is deployed; empty where nothing does."""
        too_large = self.why_too_large(entry)
        return too_large and f"{too_large}: calls are refused until a larger one joins"

    def may_start(self, entry: DeploymentEntry) -> bool:
        """Whether the deployment may have one instance more, now."""
        full = entry.replicas() >= entry.spec.scaling.replicas_max
        return not full and self.now_s >= entry.paused_until_s

    def ranked(self, nodes: Sequence[NodeEntry], deployment: Deployment) -> Sequence[NodeEntry]:
        """Nodes that may load a deployment, in the order of the policy; of equal ones the one that
        has the model nearer comes first.
        """
        if not nodes:
            return ()
        rank, tiers = self.policy.node_rank, [node.tier_of(deployment) for node in nodes]
        if all(tier is tiers[0] for tier in tiers):
            return sorted(nodes, key=lambda node: (rank(node), node.node_id))
        found = zip(nodes, tiers, strict=True)
        keyed = [((rank(node), -tier.nearness, node.node_id), node) for node, tier in found]
        return [node for _, node in sorted(keyed, key=lambda of: of[0])]

    def rests(self, node: NodeEntry) -> bool:
        """Whether the node has nothing to do, and no import or measurement either."""
        return node.rests() and all(o.node is not node for o in self.cell.operations.values())

    def wanted_for(
        self, entry: DeploymentEntry, *, for_minimum: bool = False
    ) -> WantedEntry | None:
        """The kind of which a node more would give a deployment room or time; None where none
        would: it has all of its instances, or a node of the kind has nothing to do and room for it,
        or, for `replicas_min`, holds nothing; or its nodes could not hold an instance, were they
        empty. Of several kinds it is the first that may have more, and whose machines come.
        """
        if entry.replicas() >= entry.spec.scaling.replicas_max:
            return None
        nodes = [node for node in self.cell.nodes.values() if self.takes(node, entry.spec)]
        kinds = [self.cell.wanted[kind] for kind in entry.spec.devices if kind in self.cell.wanted]
        helped = [
            kind
            for kind in kinds
            if kind.range.device in self.policy.devices
            and (not kind.known or any(node.could_hold(entry) for node in kind.known))
            and not any(
                not node.instances if for_minimum else self._may_serve(node, entry)
                for node in nodes
                if node.device is kind.range.device and self.rests(node)
            )
        ]
        below = [kind for kind in helped if (kind.wanted or 0) < kind.range.most]
        return min(below or helped, key=lambda kind: kind.reported, default=None)

    def _may_serve(self, node: NodeEntry, entry: DeploymentEntry) -> bool:
        """Whether a node that rests has an instance of the deployment, or room for one beside what
        is to stay there.
        """
        if entry.deployment is None or any(i.node is node for i in entry.instances.values()):
            return True
        least_bytes = node.footprint_of(entry.deployment).instance_bytes(1)
        return least_bytes <= self.obtainable_bytes(node, entry)

    def note_lack(self, entry: DeploymentEntry, *, too_long: bool) -> None:
        """A call of the deployment is refused for want of room or time. One that is `too_long`
        would have been late anywhere.
        """
        found = self.wanted_for(entry) if self.cell.wanted and not too_long else None
        if found is not None:
            found.note_refused(alone=not self.has_node(entry.spec))

    def note_placed(self, node: NodeEntry) -> None:
        """A call has found a place there."""
        kind = self.cell.wanted.get(node.device)
        if kind is not None:
            kind.note_placed()

    def takes_another(self, node: NodeEntry, entry: DeploymentEntry) -> bool:
        """Whether the node takes one more instance of this deployment."""
        there = sum(instance.node is node for instance in entry.instances.values())
        return there < self.policy.instances_per_node and self.takes(node, entry.spec)

    def act(self, action: ControllerAction, *, at: int | None = None) -> None:
        """To be done after what was decided so far, or after the first `at` of it."""
        self.actions.insert(len(self.actions) if at is None else at, action)

    def send(self, node: NodeEntry, command: NodeCommand) -> None:
        """Have a node carry out a command."""
        self.act(SendCommand(link_id=node.link_id, command=command))

    def set_timer(self, at_s: float, timer: ControllerTimer) -> None:
        """Have the timer's event come at a time."""
        self.act(SetTimer(at_s=at_s, timer=timer))

    def note_validation(self, node: NodeEntry | None = None) -> None:
        """One validation less is left to the event. One that rolls a `node` of many requests
        forward is as much as several.
        """
        requests = 0 if node is None else sum(len(i.requests) for i in node.instances.values())
        self.note_validations(1 + requests // REQUESTS_OF_ONE)

    def note_validations(self, as_many: int) -> None:
        """Uses up so many validations, or what costs as much, as far as they are left."""
        self.validations_left = max(self.validations_left - as_many, 0)

    @property
    def may_validate(self) -> bool:
        """Whether a request may be looked at: validations are left, or the policy makes none."""
        return self.validations_left > 0 or not self.policy.promises

    def expect_more(self) -> None:
        """Events like this one come many at once, and the last is to be handled soon: those who
        wait have the next retry for what this one leaves undone.
        """
        self.validations_left = min(self.validations_left, VALIDATIONS_OF_MANY)

    @property
    def may_evict(self) -> bool:
        """Whether best effort may leave instances for a request that waits."""
        return len(self.evicted) < EVICTIONS_MAX

    def note_evicted(self, request: RequestEntry) -> None:
        """A request of best effort has left its instance."""
        self.evicted.add(request.original.request_id)

    @property
    def mixed_nodes(self) -> list[NodeEntry]:
        """Nodes with instances whose requests may have several SLOs, when the event first asks."""
        if self._mixed_nodes is None:
            nodes = self.cell.nodes.values()
            mixed = [n for n in nodes if any(i.mixed_slos for i in n.instances.values())]
            self._mixed_nodes = mixed
        return self._mixed_nodes

    def note_retries(self) -> None:
        """All who wait are tried anew."""
        self.retries = True

    def note_begun(self, request: RequestEntry) -> None:
        """A request has got its first token, of a policy that wants to be asked then."""
        self.begun.append(request)

    def take_begun(self) -> list[RequestEntry]:
        """They are asked about no more then."""
        begun, self.begun = self.begun, []
        return begun

    def note_look(self) -> None:
        """One look less is left to the event."""
        self.looks_left = max(self.looks_left - 1, 0)

    def enqueue(self, entry: DeploymentEntry, request: RequestEntry) -> None:
        """Queue a request; see `DeploymentEntry.enqueue`."""
        entry.enqueue(request, self.now_s)
        self.cell.note_queue(entry)
        self._woken[entry.spec.name] = None

    def dequeue(self, entry: DeploymentEntry, request: RequestEntry) -> None:
        """A request waits no more. It may have been the head, and those behind it may need less;
        the instance that it was promised may be idle without it.
        """
        if request.waits_for is not None:
            self.note_released(request.waits_for)
        entry.dequeue(request)
        self.wake(entry.spec.name)

    def defer(self, request: RequestEntry) -> None:
        """See `deferred`."""
        self.deferred.add(request.original.request_id)

    def wake(self, name: DeploymentName) -> None:
        """The queue of one deployment may find a place."""
        self._woken[name] = None

    def wake_all(self) -> None:
        """Memory or a node came free."""
        self.all_woken = True

    def note_released(self, instance: InstanceEntry) -> None:
        """An instance may have become idle, or may go by now."""
        self.released[instance.instance_id] = instance

    def unsettled(self) -> bool:
        """Whether something is to be looked at before the event is over."""
        return bool(self.all_woken or self._woken or self.released or self.releases)

    def defer_release(self, plan: Release) -> None:
        """An instance is to go for who waits: not amid the look for a place. Asked for twice, or
        beyond RELEASES_MAX of an event, it is passed over.
        """
        instance_id = plan.instance.instance_id
        if instance_id not in self._released_once and len(self._released_once) < RELEASES_MAX:
            self._released_once.add(instance_id)
            self.releases.append(plan)

    def take_releases(self) -> list[Release]:
        """They are deferred no more then."""
        releases, self.releases = self.releases, []
        return releases

    def take_woken(self) -> list[DeploymentEntry]:
        """Deployments to look at, which have a queue. They are no longer woken then."""
        if self.all_woken:
            waiting = self.cell.with_queues()
        else:
            found = [self.cell.deployments.get(name) for name in self._woken]
            waiting = [entry for entry in found if entry is not None and entry.queue]
        self.all_woken = False
        self._woken.clear()
        return waiting

    def take_released(self) -> list[InstanceEntry]:
        """Instances that were released. They no longer are then."""
        released, self.released = self.released, {}
        return list(released.values())

    def obtainable_bytes(self, node: NodeEntry, entry: DeploymentEntry) -> int:
        """The most that the node may have for a new instance of a deployment, for any alike where
        nothing is shared: it cannot have become more in the same version of the node.
        """
        of = node.node_id, entry.spec.name if node.swaps or node.hello.shares_weights else None
        version, most = self._obtainable.get(of, (-1, 0))
        if version != node.version:
            most = node.obtainable_bytes(entry.made)
            self._obtainable[of] = (node.version, most)
        return most

    def latest_start_s(self, request: RequestEntry) -> float | None:
        """When its first token would be late if it had not begun, if an outlook has worked that out
        for these nodes, and for what is known of their speed.
        """
        known = request.latest_start
        return known[1] if known is not None and known[0] == self.cell.fleet_changes else None

    def is_too_long(self, request: RequestEntry) -> bool:
        """Whether it would have been late even if it had computed at once, and alone."""
        known_s = self.latest_start_s(request)
        return known_s is not None and known_s < request.arrival_s

    def share_of(self, node: NodeEntry, work_out: Callable[[NodeEntry, float], float]) -> float:
        """`work_out` of the node now, which is done once until its requests change."""
        changes, share = self._shares.get(node.node_id, (-1, 0.0))
        if changes != node.request_changes:
            share = work_out(node, self.now_s)
            self._shares[node.node_id] = (node.request_changes, share)
        return share


def _why_none_is_ready(
    nodes: list[NodeEntry], devices: str, purpose: str, *, has_had_nodes: bool
) -> tuple[str, str]:
    """Nodes are counted and not named: tenants are told this, too. The cell forgets a lost node at
    once, so what it has beside those that are ready is draining. A controller that has just been
    started anew does not know of the nodes that are on their way back to it.
    """
    if nodes:
        return (
            f"no {devices} node takes new work{purpose}: {len(nodes)} draining",
            "`mesh drain NODE --undo` has a node take work again; `mesh nodes` names them",
        )
    why = "" if has_had_nodes else ": none has joined since the controller started"
    hint = (
        "one that runs, or that `mesh up` starts, joins within seconds: try again; else start one "
        "with `mesh node --join …`"
    )
    return f"no {devices} node is up{purpose}{why}", hint
