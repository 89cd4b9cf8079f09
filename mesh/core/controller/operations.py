"""Administrative calls under way: begun, answered once, and undone when they fail."""

from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.operation import OperationEntry
from mesh.domain.actions import ReplyError, ReplyProgress
from mesh.domain.events import OperationExpired
from mesh.domain.ids import DeploymentName, OperationId
from mesh.domain.lifecycle import DeploymentState, NodeState
from mesh.domain.messages import (
    CancelImport,
    CancelProfile,
    ImportFailed,
    ImportProgress,
    ProfileFailed,
    ProfileProgress,
)
from mesh.domain.reasons import OperationKind
from mesh.domain.revision import public_name


def begin(ctx: EventContext, operation: OperationEntry) -> bool:
    """Enter an operation, or answer that there are too many and return False."""
    under_way = len(ctx.cell.operations)
    if under_way >= ctx.limits.operations_max:
        message = f"{under_way} operations are under way, which is the limit"
        reply_error(ctx, operation.operation_id, "Unavailable", message, "try again in a while")
        return False
    ctx.cell.add_operation(operation)
    expired = OperationExpired(operation_id=operation.operation_id)
    ctx.set_timer(ctx.now_s + ctx.limits.import_s_max, expired)
    return True


def being_written(ctx: EventContext, name: DeploymentName) -> bool:
    """Whether the registry is writing a change of this deployment: what is decided meanwhile would
    be decided from what it is no more.
    """
    return any(
        operation.writes and public_name(operation.name) == public_name(name)
        for operation in ctx.cell.operations.values()
    )


def free_to_change(ctx: EventContext, operation_id: OperationId, name: DeploymentName) -> bool:
    """Whether nothing of a deployment is being written; else the caller is told."""
    if not being_written(ctx, name):
        return True
    message = f"another change of {public_name(name)!r} is being written"
    reply_error(ctx, operation_id, "Unavailable", message, "try again in a moment")
    return False


def progress(ctx: EventContext, report: ImportProgress | ProfileProgress) -> None:
    """How far a node is with it."""
    operation = ctx.cell.operations.get(report.operation_id)
    if operation is not None:
        entry = ctx.cell.deployments.get(operation.name)
        if entry is not None and operation.kind is OperationKind.DEPLOY:
            entry.note_progress(report.phase, report.share)
        ctx.act(
            ReplyProgress(operation_id=report.operation_id, phase=report.phase, share=report.share)
        )


def failed_on_node(ctx: EventContext, report: ImportFailed | ProfileFailed) -> None:
    """A node gives it up; of what is being stored it has no say any more."""
    operation = ctx.cell.operations.get(report.operation_id)
    if operation is not None and operation.pending is None and operation.pending_profile is None:
        fail_operation(ctx, operation, report.error, report.message, report.hint)


def fail_operation(
    ctx: EventContext, operation: OperationEntry, error: str, message: str, hint: str = ""
) -> None:
    """Answer with an error, and undo what the operation had begun."""
    ctx.cell.remove_operation(operation.operation_id)
    entry = ctx.cell.deployments.get(operation.name)
    match operation.kind:
        case OperationKind.DEPLOY:
            _tell_node(ctx, operation, CancelImport(operation_id=operation.operation_id))
            if entry is not None:
                ctx.cell.remove_deployment(entry)
        case OperationKind.DELETE if entry is not None:
            entry.advance(DeploymentState.READY)
        case OperationKind.PROFILE:
            _tell_node(ctx, operation, CancelProfile(operation_id=operation.operation_id))
            release_instance(ctx, operation)
        case _:
            pass
    reply_error(ctx, operation.operation_id, error, message, hint)


def release_instance(ctx: EventContext, operation: OperationEntry) -> None:
    """The instance that a profile was measured on may idle and go again, unless another operation
    measures on it.
    """
    instance = operation.release()
    if instance is not None:
        ctx.note_released(instance)


def reply_error(
    ctx: EventContext, operation_id: OperationId, error: str, message: str, hint: str = ""
) -> None:
    ctx.act(ReplyError(operation_id=operation_id, error=error, message=message, hint=hint))


def _tell_node(
    ctx: EventContext, operation: OperationEntry, command: CancelImport | CancelProfile
) -> None:
    node = operation.node
    if node is not None and node.state is not NodeState.LOST:
        ctx.send(node, command)
