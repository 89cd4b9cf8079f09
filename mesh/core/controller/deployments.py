"""Administrative calls on deployments: deploy, delete, scale, load, unload. Each is answered once.

A deployment is acknowledged only after a node has imported its model, which proves that the source
is whole and supported, and after the registry has written it. A call that fails leaves no trace.
"""

from mesh.core.controller import rollouts
from mesh.core.controller.instances.lifecycle import drain
from mesh.core.controller.operations import (
    begin,
    being_written,
    fail_operation,
    free_to_change,
    reply_error,
)
from mesh.core.controller.requests.ending import refuse, refuse_all_queued
from mesh.core.controller.requests.replicas import keep_minimum, start_instance
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.operation import OperationEntry
from mesh.domain.actions import RemoveDeployment, ReplyDone, StoreDeployment
from mesh.domain.deployment import Deployment, DeploymentSpec
from mesh.domain.events import (
    DeleteRequested,
    DeployRequested,
    LoadRequested,
    ScaleRequested,
    UndoRequested,
    UnloadRequested,
)
from mesh.domain.ids import OperationId
from mesh.domain.lifecycle import DeploymentState
from mesh.domain.messages import ImportDone, ImportModel
from mesh.domain.reasons import OperationKind, RefusalReason
from mesh.domain.revision import name_in_cell, named, next_number, number_of, public_name
from mesh.domain.values import replace
from mesh.request.candidates import Candidates


def deploy(ctx: EventContext, asked: DeployRequested) -> None:
    spec, operation_id = asked.spec, asked.operation_id
    known = ctx.cell.current(spec.name)
    if known is not None:
        if known.state is not DeploymentState.READY or known.deployment is None:
            message = f"{spec.name!r} is under way: it is {known.state}"
            reply_error(ctx, operation_id, "AlreadyExists", message, "wait for that to end")
            return
        if not free_to_change(ctx, operation_id, spec.name):
            return
        rollout = ctx.cell.rollout_of(known)
        if rollouts.change(ctx, rollout, asked):
            return
        number = next_number(known.deployment, rollout.revisions)
        spec = named(spec, name_in_cell(spec.name, number))
    nodes = [n for n in ctx.cell.nodes.values() if n.takes(spec)]
    if not nodes:
        message, hint = ctx.why_no_node(spec, f" to import {spec.source}")
        reply_error(ctx, operation_id, "Unavailable", message, hint)
        return
    given = [f"{name}: {p}" for name, p in _precisions(spec) if p is not None]
    if given and all(n.hello.as_published for n in nodes):
        engines = ", ".join(sorted({f"{n.node_id} ({n.hello.engine})" for n in nodes}))
        message = f"no node that would take {spec.name!r} serves it in {' and '.join(given)}: "
        message += f"{engines} computes with weights as they were published"
        hint = "leave it out of the spec, or start a CPU node"
        reply_error(ctx, operation_id, "InvalidInput", message, hint)
        return
    node = min(nodes, key=lambda n: (ctx.policy.node_rank(n), n.node_id))
    operation = OperationEntry(
        operation_id=operation_id, kind=OperationKind.DEPLOY, name=spec.name, node=node
    )
    if not begin(ctx, operation):
        return
    entry = DeploymentEntry(
        spec=spec, state=DeploymentState.IMPORTING, candidates=Candidates(ctx.policy.instance_rank)
    )
    if known is None:
        ctx.cell.add_deployment(entry)
    else:
        ctx.cell.begin_rollout(ctx.cell.rollout_of(known), entry)
    command = ImportModel(operation_id=operation_id, source=spec.source, weights=spec.weights)
    ctx.send(node, command)


def _precisions(spec: DeploymentSpec) -> tuple[tuple[str, str | None], ...]:
    return ("weights", spec.weights), ("precision", spec.precision)


def import_done(ctx: EventContext, report: ImportDone) -> None:
    """The model is in a node's store: make it durable."""
    operation = ctx.cell.operations.get(report.operation_id)
    if operation is None or operation.pending is not None or operation.node is None:
        return
    operation.node.note_stored(report.model.model_id)
    entry = ctx.cell.deployments[operation.name]
    allowed = report.model.context_tokens_max
    wanted = entry.spec.context_tokens_max or allowed
    if wanted > allowed:
        message = f"context_tokens_max is {wanted}; {report.model.architecture} model has {allowed}"
        fail_operation(ctx, operation, "InvalidInput", message, "lower spec.context_tokens_max")
        return
    if unfit := report.model.unfit_for(entry.spec.task):
        message = f"{report.model.source}: {unfit}"
        hint = "spec.task says what is computed: embed, rerank, or text where it is left out"
        fail_operation(ctx, operation, "UnsupportedModel", message, hint)
        return
    engine = operation.node.hello.engine
    deployment = Deployment(
        spec=entry.spec,
        model=report.model.computed_in(entry.spec.precision).serving(entry.spec.task),
        context_tokens_max=wanted,
        footprints=((engine, report.footprint.at_context(wanted)),),
    )
    entry.advance(DeploymentState.SAVING)
    rollout, revisions = ctx.cell.rollouts.get(public_name(entry.name)), None
    if being_written(ctx, entry.name):
        message = f"another change of {public_name(entry.name)!r} is being written"
        fail_operation(ctx, operation, "Unavailable", message, "deploy it again")
        return
    if rollout is not None:
        number = number_of(entry.name)
        deployment, revisions = rollouts.imported(
            ctx, rollout, replace(deployment, revision=number)
        )
    _store(
        ctx,
        operation,
        StoreDeployment(
            operation_id=operation.operation_id,
            deployment=deployment,
            text=report.text,
            revisions=revisions,
        ),
    )


def _store(ctx: EventContext, operation: OperationEntry, store: StoreDeployment) -> None:
    operation.store(store.deployment, store.revisions)
    ctx.act(store)


def stored(ctx: EventContext, operation_id: OperationId) -> None:
    """The registry has it: what was asked for holds from now on."""
    operation = ctx.cell.remove_operation(operation_id)
    if operation is None:
        return
    if operation.pending_profile is not None:
        ctx.act(ReplyDone(operation_id=operation_id, message="profiled"))
        return
    entry = ctx.cell.deployments.get(operation.name)
    if entry is None:
        reply_error(ctx, operation_id, "NotFound", f"{operation.name!r} was deleted meanwhile")
        return
    rollout = ctx.cell.rollouts.get(public_name(entry.name))
    message, amiss = "deleted", ""
    if operation.kind is OperationKind.DELETE:
        for revision in rollouts.forget(ctx, rollout) if rollout is not None else [entry]:
            _remove(ctx, revision)
    elif operation.revisions is not None and rollout is not None:
        message = rollouts.stored(ctx, rollout, operation)
        amiss = ctx.amiss(rollout.coming or rollout.current)
    elif operation.kind is OperationKind.DEPLOY and operation.pending is not None:
        entry.use(operation.pending)
        entry.advance(DeploymentState.READY)
        message, amiss = "deployed", ctx.amiss(entry)
        keep_minimum(ctx, entry)
    elif operation.pending is not None:
        rollouts.use(ctx, entry, operation.pending)
        message = "scaled"
    ctx.act(ReplyDone(operation_id=operation_id, message=message, amiss=amiss))


def _remove(ctx: EventContext, entry: DeploymentEntry) -> None:
    message = f"{public_name(entry.name)!r} was deleted"
    refuse_all_queued(ctx, entry, RefusalReason.DEPLOYMENT_DELETED, message)
    for instance in list(entry.instances.values()):
        for request in [r for r in instance.requests.values() if not r.is_copy]:
            refuse(ctx, request, RefusalReason.DEPLOYMENT_DELETED, message)
        drain(ctx, instance)
    ctx.cell.remove_deployment(entry)


def delete(ctx: EventContext, asked: DeleteRequested) -> None:
    entry = ctx.cell.current(asked.name)
    if entry is None or entry.state is not DeploymentState.READY:
        reply_error(ctx, asked.operation_id, "NotFound", f"there is no deployment {asked.name!r}")
        return
    if not free_to_change(ctx, asked.operation_id, asked.name):
        return
    operation = OperationEntry(
        operation_id=asked.operation_id, kind=OperationKind.DELETE, name=entry.name
    )
    if begin(ctx, operation):
        entry.advance(DeploymentState.DELETING)
        ctx.act(RemoveDeployment(operation_id=asked.operation_id, name=asked.name))


def load(ctx: EventContext, asked: LoadRequested) -> None:
    entry = _ready(ctx, asked)
    if entry is None:
        return
    if entry.replicas():
        ctx.act(ReplyDone(operation_id=asked.operation_id, message="unchanged"))
        return
    start_instance(ctx, entry)
    if entry.replicas():
        ctx.act(ReplyDone(operation_id=asked.operation_id, message="loading"))
        return
    hint, message = "start a larger node", ctx.why_too_large(entry)
    if not message:
        nodes = len(ctx.cell.nodes)
        message = f"none of {nodes} nodes has room for an instance of {asked.name!r} now"
        hint = "`mesh top` shows who holds the memory; `mesh unload` frees it"
    reply_error(ctx, asked.operation_id, "Unavailable", message, hint)


def unload(ctx: EventContext, asked: UnloadRequested) -> None:
    entry = _ready(ctx, asked)
    if entry is None:
        return
    if least := entry.spec.scaling.replicas_min:
        message = f"{asked.name!r} keeps {least} instances: its replicas_min"
        hint = f"`mesh scale {asked.name} --min 0` lets them go"
        reply_error(ctx, asked.operation_id, "InvalidInput", message, hint)
        return
    entry.note_unloaded()
    for instance in list(entry.instances.values()):
        drain(ctx, instance)
    ctx.act(ReplyDone(operation_id=asked.operation_id, message="unloading"))


def _ready(
    ctx: EventContext, asked: ScaleRequested | LoadRequested | UnloadRequested | UndoRequested
) -> DeploymentEntry | None:
    """The deployment, or `None` when the caller was told that there is none."""
    entry = ctx.cell.current(asked.name)
    if entry is None or entry.state is not DeploymentState.READY or entry.deployment is None:
        reply_error(ctx, asked.operation_id, "NotFound", f"there is no deployment {asked.name!r}")
        return None
    return entry


def undo(ctx: EventContext, asked: UndoRequested) -> None:
    entry = _ready(ctx, asked)
    if entry is not None and free_to_change(ctx, asked.operation_id, asked.name):
        rollouts.undo(ctx, ctx.cell.rollouts.get(asked.name), asked)


def scale(ctx: EventContext, asked: ScaleRequested) -> None:
    entry = _ready(ctx, asked)
    if entry is None or entry.deployment is None:
        return
    if not free_to_change(ctx, asked.operation_id, asked.name):
        return
    rollout = ctx.cell.rollouts.get(asked.name)
    newest = ((rollout.target if rollout is not None else None) or entry.deployment).revision
    if asked.revision is not None and asked.revision != newest:
        message = f"{asked.name!r} changed meanwhile: its newest revision is {newest}, "
        message += f"the plan was made for {asked.revision}"
        hint = f"`mesh plan {asked.name}` again, once that serves"
        reply_error(ctx, asked.operation_id, "InvalidInput", message, hint)
        return
    spec = _scaled(entry.spec, asked)
    if spec.scaling.replicas_min > spec.scaling.replicas_max:
        low, high = spec.scaling.replicas_min, spec.scaling.replicas_max
        message = f"replicas_min would be {low} and replicas_max {high}"
        reply_error(
            ctx, asked.operation_id, "InvalidInput", message, "give both with --min and --max"
        )
        return
    operation = OperationEntry(
        operation_id=asked.operation_id, kind=OperationKind.SCALE, name=entry.name
    )
    if begin(ctx, operation):
        changed = replace(entry.deployment, spec=spec)
        _store(ctx, operation, StoreDeployment(operation_id=asked.operation_id, deployment=changed))


def _scaled(spec: DeploymentSpec, asked: ScaleRequested) -> DeploymentSpec:
    limits = {
        "replicas_min": asked.replicas_min,
        "replicas_max": asked.replicas_max,
        "keep_alive_s": asked.keep_alive_s,
    }
    given = {name: value for name, value in limits.items() if value is not None}
    return replace(spec, scaling=replace(spec.scaling, **given))  # type: ignore[arg-type]
