"""A deployment is changed: its next revision starts beside it, takes over, and the old one ends.

A revision is a deployment of its own within the cell: it has its own queue, instances and model,
and requests stay with the one whose tokenizer read them. It takes over when its instances are
ready, as many as serve, or as many as there is room for. One that fails to load, or finds no room
in time, is given up, and the other serves on. Before: `deployments`. After: the registry.
"""

from mesh.core.controller.instances.lifecycle import drain
from mesh.core.controller.operations import begin, being_written, fail_operation, reply_error
from mesh.core.controller.requests.migration import move_soon
from mesh.core.controller.requests.replicas import keep_minimum, trim_to_maximum
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.operation import OperationEntry
from mesh.core.controller.state.rollout import RolloutEntry
from mesh.domain.actions import ReplyDone, StoreDeployment, StoreRevisions
from mesh.domain.deployment import Deployment, DeploymentSpec
from mesh.domain.events import DeployRequested, UndoRequested
from mesh.domain.ids import OperationId
from mesh.domain.lifecycle import DeploymentState, InstanceState
from mesh.domain.reasons import OperationKind
from mesh.domain.revision import (
    Revisions,
    RevisionState,
    given_up,
    name_in_cell,
    named,
    needs_no_instance,
    next_number,
    public,
    starting,
    to_go_back_to,
    with_revision,
)
from mesh.domain.values import replace
from mesh.policy.guarded import Guarded
from mesh.request.candidates import Candidates


def change(ctx: EventContext, rollout: RolloutEntry, asked: DeployRequested) -> bool:
    """A manifest for what is deployed: apply what needs no import; False where it needs one."""
    serves = rollout.current.made
    operation_id, target = asked.operation_id, rollout.target
    if serves.spec.tenant != asked.spec.tenant:
        message = f"the name {rollout.name!r} is taken"
        reply_error(ctx, operation_id, "AlreadyExists", message, "choose another one")
    elif _is_importing(rollout):
        message = f"a revision of {rollout.name!r} is being imported"
        reply_error(ctx, operation_id, "AlreadyExists", message, "wait for that to end")
    elif target is not None and public(target.spec) == asked.spec:
        message = f"revision {target.revision} starts"
        amiss = ctx.amiss(rollout.coming or rollout.current)
        ctx.act(ReplyDone(operation_id=operation_id, message=message, amiss=amiss))
    elif public(serves.spec) == asked.spec and target is None:
        amiss = ctx.amiss(rollout.current)
        ctx.act(ReplyDone(operation_id=operation_id, message="unchanged", amiss=amiss))
    elif needs_no_instance(serves.spec, asked.spec):
        _change_in_place(ctx, rollout, operation_id, serves, asked.spec)
    else:
        if rollout.coming is not None:
            _give_up(ctx, rollout, rollout.coming, "another revision was deployed")
        return False
    return True


def undo(ctx: EventContext, rollout: RolloutEntry | None, asked: UndoRequested) -> None:
    """Give up the revision that comes, or begin to go back to one that there was."""
    operation_id = asked.operation_id
    back = to_go_back_to(rollout.revisions, asked.to) if rollout is not None else None
    if rollout is not None and rollout.coming is not None and asked.to is None:
        _give_up_asked(ctx, rollout, operation_id)
        return
    if rollout is None or back is None or _is_importing(rollout):
        which = "earlier revision" if asked.to is None else f"revision {asked.to}"
        known = ", ".join(str(r.number) for r in rollout.revisions) if rollout else ""
        message = f"{asked.name!r} has no {which} to go back to"
        reply_error(ctx, operation_id, "NotFound", message, f"there is {known or 'none'}")
        return
    serves = rollout.current.made
    if serves.model == back.deployment.model and needs_no_instance(
        serves.spec, public(back.deployment.spec)
    ):
        _change_in_place(ctx, rollout, operation_id, serves, public(back.deployment.spec))
        return
    revisions = given_up(rollout.revisions, "another one was asked for")
    number = next_number(serves, revisions)
    spec = named(back.deployment.spec, name_in_cell(rollout.name, number))
    deployment = replace(back.deployment, spec=spec, revision=number)
    revisions = with_revision(revisions, deployment, RevisionState.STARTING)
    _store(ctx, rollout, operation_id, serves, revisions)


def _is_importing(rollout: RolloutEntry) -> bool:
    coming = rollout.coming
    return coming is not None and coming.state is not DeploymentState.STARTING


def _change_in_place(
    ctx: EventContext,
    rollout: RolloutEntry,
    operation_id: OperationId,
    serves: Deployment,
    spec: DeploymentSpec,
) -> None:
    """A revision that the instances which there are serve as well, or none where only the one that
    starts is to go.
    """
    revisions = given_up(rollout.revisions, "what served was deployed again")
    spec = named(spec, rollout.current.name)
    if spec != serves.spec:
        number = next_number(serves, revisions)
        revisions = with_revision(revisions, serves, RevisionState.PAST)
        serves = replace(serves, spec=spec, revision=number)
    _store(ctx, rollout, operation_id, serves, revisions)


def _give_up_asked(ctx: EventContext, rollout: RolloutEntry, operation_id: OperationId) -> None:
    if _is_importing(rollout):
        _stop_import(ctx, rollout, "undone")
        ctx.act(ReplyDone(operation_id=operation_id, message="the import was stopped"))
        return
    revisions = given_up(rollout.revisions, "undone")
    _store(ctx, rollout, operation_id, rollout.current.made, revisions)


def _stop_import(ctx: EventContext, rollout: RolloutEntry, why: str) -> None:
    """Whoever asked for the revision is told."""
    for operation in list(ctx.cell.operations.values()):
        if rollout.coming is not None and operation.name == rollout.coming.name:
            fail_operation(ctx, operation, "Cancelled", f"{rollout.name!r} was {why} meanwhile")


def _store(
    ctx: EventContext,
    rollout: RolloutEntry,
    operation_id: OperationId,
    serves: Deployment,
    revisions: Revisions,
) -> None:
    operation = OperationEntry(
        operation_id=operation_id, kind=OperationKind.ROLLOUT, name=rollout.current.name
    )
    if begin(ctx, operation):
        operation.store(serves, revisions)
        ctx.act(StoreDeployment(operation_id=operation_id, deployment=serves, revisions=revisions))


def imported(
    ctx: EventContext, rollout: RolloutEntry, deployment: Deployment
) -> tuple[Deployment, Revisions]:
    """What is stored of a revision whose model has been imported: the one that serves till then,
    and the others.
    """
    others = with_revision(rollout.revisions, deployment, RevisionState.STARTING)
    return rollout.current.made, others


def stored(ctx: EventContext, rollout: RolloutEntry, operation: OperationEntry) -> str:
    """The registry has the revisions: have the entries follow. What came of it, in words."""
    serves, target = operation.pending, starting(operation.revisions or ())
    assert serves is not None
    assert operation.revisions is not None
    rollout.use(operation.revisions)
    for entry in ctx.cell.earlier_comings(rollout, target):
        drop(ctx, entry)
    changed = rollout.current.deployment != serves
    if changed:
        use(ctx, rollout.current, serves)
    if target is None:
        return f"revision {serves.revision} serves" if changed else "given up"
    if rollout.coming is None:
        ctx.cell.begin_rollout(rollout, entry_of(ctx.policy, target.deployment))
    else:
        rollout.coming.advance(DeploymentState.STARTING)
    start(ctx, rollout)
    return f"revision {target.number} starts"


def entry_of(policy: Guarded, deployment: Deployment) -> DeploymentEntry:
    return DeploymentEntry(
        spec=deployment.spec,
        state=DeploymentState.STARTING,
        candidates=Candidates(policy.instance_rank),
        deployment=deployment,
    )


def start(ctx: EventContext, rollout: RolloutEntry) -> None:
    """As many instances as serve now are to be ready, and one at least."""
    coming, target = rollout.coming, rollout.target
    assert coming is not None
    assert target is not None
    scaling = target.spec.scaling
    wanted = min(max(scaling.replicas_min, rollout.current.replicas(), 1), scaling.replicas_max)
    spec = replace(target.spec, scaling=replace(scaling, replicas_min=wanted))
    coming.use(replace(target, spec=spec))
    rollout.note_until(ctx.now_s + ctx.limits.rollout_s_max)
    keep_minimum(ctx, coming)


def use(ctx: EventContext, entry: DeploymentEntry, deployment: Deployment) -> None:
    """It is deployed so from now on: its instances follow."""
    entry.use(deployment)
    trim_to_maximum(ctx, entry)
    move_soon(ctx)
    ctx.wake(entry.name)
    # What the old minimum or keep-alive kept is judged by the new ones.
    for instance in entry.instances.values():
        ctx.note_released(instance)
    keep_minimum(ctx, entry)


def drop(ctx: EventContext, entry: DeploymentEntry) -> None:
    """A revision goes; nobody waits for it."""
    for instance in list(entry.instances.values()):
        drain(ctx, instance)
    ctx.cell.remove_deployment(entry)


def forget(ctx: EventContext, rollout: RolloutEntry) -> list[DeploymentEntry]:
    """The deployment is deleted: stop what is imported of it. All that there is of it."""
    if _is_importing(rollout):
        _stop_import(ctx, rollout, "deleted")
    return ctx.cell.remove_rollout(rollout)


def advance(ctx: EventContext) -> None:
    """Rollouts that are under way: a revision may take over, or must be given up; one that has
    answered everybody goes.
    """
    for rollout in list(ctx.cell.rolling.values()):
        if rollout.current.state is not DeploymentState.READY or being_written(ctx, rollout.name):
            continue
        if rollout.coming is not None and rollout.coming.state is DeploymentState.STARTING:
            _advance_start(ctx, rollout, rollout.coming)
        for entry in list(rollout.retiring.values()):
            _advance_end(ctx, entry)
        if rollout.rests:
            ctx.cell.note_rests(rollout)


def _advance_start(ctx: EventContext, rollout: RolloutEntry, coming: DeploymentEntry) -> None:
    if rollout.until_s is None:
        start(ctx, rollout)
    instances = coming.instances.values()
    ready = sum(instance.takes_now for instance in instances)
    loading = any(instance.state is InstanceState.LOADING for instance in instances)
    if ready >= coming.spec.scaling.replicas_min or (ready and not loading):
        _switch(ctx, rollout)
    elif coming.load_failures >= ctx.limits.load_attempts_max and not coming.replicas():
        _give_up(ctx, rollout, coming, f"{coming.load_failures} loads failed: {coming.load_error}")
    elif any(_just_begun(ctx, instance) for instance in instances):
        return
    elif rollout.until_s is not None and ctx.now_s >= rollout.until_s:
        limit = f"not ready within {ctx.limits.rollout_s_max:.0f} s"
        _give_up(ctx, rollout, coming, f"{limit}: {_why_not_ready(ctx, coming)}")


def _why_not_ready(ctx: EventContext, coming: DeploymentEntry) -> str:
    if coming.load_error:
        return coming.load_error
    if coming.instances:
        return "it is still being loaded"
    if not any(ctx.takes(node, coming.spec) for node in ctx.cell.nodes.values()):
        return ctx.why_no_node(coming.spec)[0]
    return f"none of {len(ctx.cell.nodes)} nodes has room for it beside what serves"


def _give_up(
    ctx: EventContext, rollout: RolloutEntry, coming: DeploymentEntry, message: str
) -> None:
    rollout.use(given_up(rollout.revisions, message))
    drop(ctx, coming)
    ctx.act(StoreRevisions(deployment=rollout.current.made, revisions=rollout.revisions))


def _switch(ctx: EventContext, rollout: RolloutEntry) -> None:
    """New requests go to the new revision from now on."""
    target = rollout.target
    assert target is not None
    old, new = rollout.switch()
    was = old.made
    others = tuple(r for r in rollout.revisions if r.state is not RevisionState.STARTING)
    rollout.use(with_revision(others, was, RevisionState.PAST))
    new.advance(DeploymentState.READY)
    new.succeed(old)
    old.advance(DeploymentState.RETIRING)
    ctx.cell.note_minimum(old.name, lacking=False)
    scaling = replace(was.spec.scaling, replicas_min=0, keep_alive_s=0.0, plan=None)
    old.use(replace(was, spec=replace(was.spec, scaling=scaling)))
    ctx.act(StoreRevisions(deployment=target, revisions=rollout.revisions))
    use(ctx, new, replace(target, footprints=new.footprints))


def _advance_end(ctx: EventContext, entry: DeploymentEntry) -> None:
    """Who waits for it still may use its instances; nobody else comes."""
    if entry.queue:
        return
    for instance in list(entry.instances.values()):
        if instance.state is not InstanceState.DRAINING and not _just_begun(ctx, instance):
            drain(ctx, instance)
    if not entry.instances:
        ctx.cell.remove_deployment(entry)


def _just_begun(ctx: EventContext, instance: InstanceEntry) -> bool:
    """Whether this event has sent its load: the next one may give it up."""
    return instance.state is InstanceState.LOADING and instance.load_started_s == ctx.now_s
