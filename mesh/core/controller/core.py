"""The controller core: one writer of all budgets of its cell.

`handle` takes what happened and returns what to do: commands to nodes, tokens and refusals to
clients, writes to the registry, answers to operators, timers. It owns the cell's state and nothing
else; `mesh.runtime.host` calls it, live and simulated.
"""

from collections.abc import Mapping, Sequence
from typing import assert_never

from mesh.core.controller import (
    deployments,
    nodes,
    planning,
    profiling,
    reports,
    rollouts,
    wanted_nodes,
)
from mesh.core.controller.instances.open_options import OpenOptions
from mesh.core.controller.instances.prefetching import prefetch
from mesh.core.controller.operations import fail_operation, reply_error
from mesh.core.controller.requests import migration, queueing, replicas, resuming, serving
from mesh.core.controller.requests.ending import refuse
from mesh.core.controller.requests.prospect import prospect
from mesh.core.controller.requests.upkeep import go_on, keep_up, release
from mesh.core.controller.snapshot import (
    Looking,
    cell_snapshot,
    deployed,
    look,
    nodes_wanted,
    profile_views,
)
from mesh.core.controller.state.cell import Cell
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.expectations import Expectations
from mesh.core.controller.state.rollout import RolloutEntry
from mesh.core.controller.state.wanted import WantedEntry
from mesh.domain.actions import ControllerAction
from mesh.domain.deployment import Deployment, DeploymentSpec
from mesh.domain.errors import Unavailable
from mesh.domain.events import (
    CancelRequested,
    ControllerEvent,
    DecisionTookLong,
    DeleteRequested,
    DeploymentStored,
    DeployRequested,
    DrainRequested,
    InvokeRequested,
    KeepAliveExpired,
    LeaseCheckDue,
    LoadExpired,
    LoadRequested,
    MigrationDue,
    NodeConnected,
    NodeDisconnected,
    NodeReported,
    OperationCancelled,
    OperationExpired,
    PlaceRetryDue,
    ProfileRequested,
    RetryLoadDue,
    ScaleRequested,
    ShutdownRequested,
    StoreFailed,
    UndoRequested,
    UnloadRequested,
)
from mesh.domain.history import OutputHistory
from mesh.domain.ids import DeploymentName, ModelId, OperationId, RequestId
from mesh.domain.lifecycle import DeploymentState
from mesh.domain.limits import CellLimits
from mesh.domain.profile import Profile
from mesh.domain.reasons import PolicyFaultKind, RefusalReason
from mesh.domain.request import Request
from mesh.domain.revision import Revisions, public_name
from mesh.domain.values import replace
from mesh.domain.views import (
    Arrivals,
    CellSnapshot,
    Deployed,
    InstancePlan,
    NodesWanted,
    ProfileView,
    Prospect,
)
from mesh.policy.guarded import Guarded
from mesh.policy.interface import Policy, checked
from mesh.policy.plans import How
from mesh.request.candidates import Candidates


class ControllerCore:
    """`epoch` is higher than that of the controller before it: with a lease about the second in
    which it began to lead, without one the count of starts. `deployments`, `profiles`, `histories`
    and `revisions` are those in its registry.
    """

    def __init__(
        self,
        *,
        epoch: int,
        deployments: Sequence[Deployment],
        limits: CellLimits,
        policy: Policy,
        profiles: Sequence[Profile] = (),
        histories: Mapping[DeploymentName, OutputHistory] | None = None,
        revisions: Mapping[DeploymentName, Revisions] | None = None,
    ) -> None:
        self.cell = Cell(
            expectations=Expectations(profiles),
            wanted={one.device: WantedEntry(range=one) for one in limits.node_ranges},
        )
        self._epoch = epoch
        self._limits = limits
        self.policy = Guarded(checked(policy), limits)
        for deployment in deployments:
            entry = DeploymentEntry(
                spec=deployment.spec,
                state=DeploymentState.READY,
                candidates=Candidates(self.policy.instance_rank),
                deployment=deployment,
                history=(histories or {}).get(deployment.spec.name, OutputHistory()),
            )
            self.cell.add_deployment(entry)
            others = (revisions or {}).get(public_name(entry.name), ())
            if others:
                self._begin_rollout(self.cell.rollout_of(entry, others))

    def _begin_rollout(self, rollout: RolloutEntry) -> None:
        """A revision that had not taken over when the controller ended starts anew."""
        if rollout.target is not None:
            coming = rollouts.entry_of(self.policy, rollout.target)
            self.cell.begin_rollout(rollout, coming)

    def deployment(self, name: DeploymentName) -> Deployment | None:
        """The acknowledged deployment of this name."""
        entry = self.cell.current(name)
        ready = entry is not None and entry.state is DeploymentState.READY
        return entry.deployment if entry is not None and ready else None

    def models(self, name: DeploymentName) -> tuple[ModelId, ...]:
        """The models of the revision that serves, and of the one that is to take over."""
        entry, rollout = self.cell.current(name), self.cell.rollouts.get(name)
        found = [entry.deployment if entry is not None else None]
        found.append(rollout.target if rollout is not None else None)
        return tuple(one.model.model_id for one in found if one is not None)

    def snapshot(self, now_s: float) -> CellSnapshot:
        """The cell as people and APIs see it."""
        return cell_snapshot(self.cell, now_s)

    def deployed(self, name: DeploymentName | None = None) -> tuple[Deployed, ...]:
        """The deployments, ordered by name, or the one of this name."""
        return deployed(self.cell, name)

    def look(self) -> Looking:
        """The same in parts."""
        return look(self.cell)

    def wanted(self, now_s: float) -> tuple[NodesWanted, ...]:
        """How many nodes of each kind are wanted, as far as that is known."""
        return nodes_wanted(self.cell, now_s)

    def asked_before(self, request_id: RequestId) -> tuple[Request, Sequence[int]] | None:
        """A request of this id that runs, or waits for its client, with the tokens that it has;
        None where there is none.
        """
        orphan = self.cell.orphans.get(request_id)
        found = self.cell.requests.get(request_id) if orphan is None else orphan.request
        return None if found is None else (found.original, found.output_tokens)

    def load(self) -> tuple[int, int]:
        """The requests that run, and those that are queued."""
        return self.cell.running(), self.cell.queued()

    def profiles(self, name: DeploymentName) -> tuple[ProfileView, ...] | None:
        """The profiles of a deployment's model that hold for a node or have been measured, by
        fingerprint; None when there is no such deployment.
        """
        deployment = self.deployment(name)
        return profile_views(self.cell, deployment) if deployment is not None else None

    def prospect(self, spec: DeploymentSpec, now_s: float) -> Prospect | None:
        """What would become of the deployment, were it deployed so: a question, which changes
        nothing. `None` where the size of its model is not known.
        """
        found = prospect(self._context(now_s), spec)
        # What the policy did wrong meanwhile belongs to no event.
        self.policy.take_faults()
        return found

    def plan(self, name: DeploymentName, calls: Arrivals | None, now_s: float) -> InstancePlan:
        """How many instances these calls need, or those that have come lately: a question, which
        changes nothing. Raises InvalidInput and Unavailable where nothing can be planned.
        """
        entry = self.cell.current(name)
        if entry is None or self.deployment(name) is None:
            raise Unavailable(f"{name!r} is not deployed yet", hint="`mesh wait` waits for that")
        try:
            return planning.planned(self._context(now_s), entry, calls)
        finally:
            self.policy.take_faults()

    def _context(self, now_s: float) -> EventContext:
        return EventContext(
            cell=self.cell,
            epoch=self._epoch,
            limits=self._limits,
            policy=self.policy,
            now_s=now_s,
            validations_left=self._limits.validations_max,
            looks_left=self._limits.validations_max,
        )

    def handle(self, event: ControllerEvent, now_s: float) -> list[ControllerAction]:
        ctx = self._context(now_s)
        self._dispatch(ctx, event)
        _settle(ctx)
        for fault in self.policy.take_faults():
            ctx.act(fault)
        return ctx.actions

    def _dispatch(self, ctx: EventContext, event: ControllerEvent) -> None:
        match event:
            case NodeReported():
                reports.take_in(ctx, event.link_id, event.report)
            case InvokeRequested():
                serving.invoke(ctx, event.request, event.slo, event.resumed)
            case CancelRequested():
                ctx.expect_more()
                for request_id in event.request_ids:
                    serving.cancel(ctx, request_id)
            case PlaceRetryDue():
                queueing.retry(ctx)
            case KeepAliveExpired():
                _keep_alive_expired(ctx, event)
            case MigrationDue():
                migration.look_again(ctx)
            case LeaseCheckDue():
                nodes.check_leases(ctx)
                resuming.drop_old(ctx)
                planning.look(ctx)
                wanted_nodes.look(ctx)
                _keep_up(ctx)
            case LoadExpired():
                reports.load_expired(ctx, event.instance_id)
            case RetryLoadDue():
                _retry_load(ctx, event.name)
            case NodeConnected():
                nodes.connect(ctx, event)
            case NodeDisconnected():
                node = ctx.cell.links.get(event.link_id)
                if node is not None:
                    nodes.lose(ctx, node, event.reason)
            case DeployRequested():
                deployments.deploy(ctx, event)
            case DeleteRequested():
                deployments.delete(ctx, event)
            case UndoRequested():
                deployments.undo(ctx, event)
            case ScaleRequested():
                deployments.scale(ctx, event)
            case LoadRequested():
                deployments.load(ctx, event)
            case UnloadRequested():
                deployments.unload(ctx, event)
            case DrainRequested():
                nodes.drain_node(ctx, event)
            case ProfileRequested():
                profiling.request_profile(ctx, event)
            case DeploymentStored():
                deployments.stored(ctx, event.operation_id)
            case StoreFailed():
                _fail(ctx, event.operation_id, "StorageError", event.message)
            case OperationCancelled():
                _give_up(ctx, event.operation_id, "Cancelled", "the caller went away")
            case OperationExpired():
                message = f"not done within {ctx.limits.import_s_max:.0f} s"
                _give_up(ctx, event.operation_id, "Unavailable", message)
            case DecisionTookLong():
                message = f"{event.seconds:.3f} s for an event, beyond {event.limit_s:.3f} s"
                self.policy.fault(PolicyFaultKind.TOOK_LONG, "handle", message)
            case ShutdownRequested():
                _shut_down(ctx)
            case _:
                assert_never(event)


def _settle(ctx: EventContext) -> None:
    """The end of every event: fill the room that appeared. What stays idle, others may want."""
    if ctx.cell.rolling:
        rollouts.advance(ctx)
    if ctx.begun:
        go_on(ctx)
    while ctx.unsettled():
        queueing.fill(ctx)
        queueing.fill_released(ctx)
        if ctx.cell.operations:
            profiling.advance_profiles(ctx)
        queueing.settle_released(ctx)
        for plan in ctx.take_releases():
            release(ctx, plan)


def _keep_up(ctx: EventContext) -> None:
    """Carry out what the policy has in mind for the cell as a whole, give nodes that rest what may
    be called next, and come back.
    """
    keep_up(ctx)
    prefetch(ctx)
    after_s = min(ctx.limits.lease_check_s, ctx.policy.upkeep_s)
    ctx.set_timer(ctx.now_s + after_s, LeaseCheckDue())


def _give_up(ctx: EventContext, operation_id: OperationId, error: str, message: str) -> None:
    """Unless the registry is writing it already, which nobody can stop."""
    operation = ctx.cell.operations.get(operation_id)
    if operation is not None and not operation.writes:
        fail_operation(ctx, operation, error, message)


def _fail(ctx: EventContext, operation_id: OperationId, error: str, message: str) -> None:
    operation = ctx.cell.operations.get(operation_id)
    if operation is not None:
        fail_operation(ctx, operation, error, message)


def _keep_alive_expired(ctx: EventContext, expired: KeepAliveExpired) -> None:
    """Have the policy decide what becomes of an instance that has been idle since, unless something
    wants it to stay.
    """
    instance = ctx.cell.instances.get(expired.instance_id)
    if instance is None or instance.idle_since_s != expired.idle_since_s:
        return
    queueing.offer(ctx, instance)
    if instance.is_parked and not expired.parked:
        return  # It was parked meanwhile, and has a timer of its own.
    owner = ctx.cell.deployments.get(instance.deployment)
    again_s = max(ctx.limits.parked_s_max, ctx.limits.lease_check_s)
    if not instance.node.may_go(instance):
        if not instance.requests:  # A minimum or a measurement keeps it now, but not for ever.
            _look_again(ctx, expired, again_s)
        return
    decided = ctx.policy.idle(instance, OpenOptions(ctx=ctx, entry=owner))
    if isinstance(decided, float):
        _look_again(ctx, expired, decided)
        return
    unloads = decided.how is How.UNLOAD or not ctx.limits.parked_s_max
    if unloads and owner is not None and owner.replicas() <= owner.warm:
        _look_again(ctx, expired, ctx.limits.lease_check_s)
        return
    stays = instance.is_parked or (owner is not None and not owner.may_park())
    if stays and not unloads:
        _look_again(ctx, expired, again_s)
        return
    release(ctx, decided)


def _look_again(ctx: EventContext, expired: KeepAliveExpired, after_s: float) -> None:
    """See what is to become of an idle instance, or of a parked one, then."""
    instance = ctx.cell.instances[expired.instance_id]
    ctx.set_timer(ctx.now_s + after_s, replace(expired, parked=instance.is_parked))


def _retry_load(ctx: EventContext, name: DeploymentName) -> None:
    entry = ctx.cell.deployments.get(name)
    if entry is not None and ctx.now_s >= entry.paused_until_s:
        replicas.keep_minimum(ctx, entry)
        ctx.wake(name)


def _shut_down(ctx: EventContext) -> None:
    for request in list(ctx.cell.requests.values()):
        message = "the controller is stopping"
        if request.original.keyed and request.instance is not None:
            resuming.let_go(ctx, request, message)
        else:
            refuse(ctx, request, RefusalReason.SHUTTING_DOWN, message)
    for operation_id in list(ctx.cell.operations):
        reply_error(ctx, operation_id, "Unavailable", "the controller is stopping")
        ctx.cell.remove_operation(operation_id)
