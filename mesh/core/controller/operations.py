"""Administrative calls under way: begun, answered once, and undone when they fail."""

from mesh.core.controller.state.cell import OperationEntry
from mesh.core.controller.state.context import Turn
from mesh.domain.actions import ReplyError, ReplyProgress, SendCommand, SetTimer
from mesh.domain.events import OperationExpired
from mesh.domain.ids import OperationId
from mesh.domain.lifecycle import DEPLOYMENT, DeploymentState, NodeState, advance
from mesh.domain.messages import (
    CancelImport,
    CancelProfile,
    ImportFailed,
    ImportProgress,
    ProfileFailed,
    ProfileProgress,
)
from mesh.domain.reasons import OperationKind


def begin(turn: Turn, operation: OperationEntry) -> bool:
    """Enter an operation, or answer that there are too many and return False."""
    operations = turn.cell.operations
    if len(operations) >= turn.limits.operations_max:
        message = f"{len(operations)} operations are under way, which is the limit"
        reply_error(turn, operation.operation_id, "Unavailable", message, "try again in a while")
        return False
    operations[operation.operation_id] = operation
    timer = OperationExpired(operation_id=operation.operation_id)
    turn.act(SetTimer(at_s=turn.now_s + turn.limits.import_s_max, timer=timer))
    return True


def progress(turn: Turn, said: ImportProgress | ProfileProgress) -> None:
    """How far a node is with it."""
    if said.operation_id in turn.cell.operations:
        turn.act(ReplyProgress(operation_id=said.operation_id, phase=said.phase, share=said.share))


def failed_on_node(turn: Turn, said: ImportFailed | ProfileFailed) -> None:
    """A node gives it up; of what is being stored it has no say any more."""
    operation = turn.cell.operations.get(said.operation_id)
    if operation is not None and operation.pending is None and operation.pending_profile is None:
        fail_operation(turn, operation, said.error, said.message, said.hint)


def fail_operation(
    turn: Turn, operation: OperationEntry, error: str, message: str, hint: str = ""
) -> None:
    """Answer with an error, and undo what the operation had begun."""
    del turn.cell.operations[operation.operation_id]
    entry = turn.cell.deployments.get(operation.name)
    match operation.kind:
        case OperationKind.DEPLOY:
            _tell_node(turn, operation, CancelImport(operation_id=operation.operation_id))
            if entry is not None:
                entry.state = advance(DEPLOYMENT, entry.state, DeploymentState.GONE)
                del turn.cell.deployments[operation.name]
        case OperationKind.DELETE if entry is not None:
            entry.state = advance(DEPLOYMENT, entry.state, DeploymentState.READY)
        case OperationKind.PROFILE:
            _tell_node(turn, operation, CancelProfile(operation_id=operation.operation_id))
            release_instance(turn, operation)
        case _:
            pass
    reply_error(turn, operation.operation_id, error, message, hint)


def release_instance(turn: Turn, operation: OperationEntry) -> None:
    """The instance that a profile was measured on may idle and go again, unless another operation
    measures on it.
    """
    instance, operation.instance = operation.instance, None
    if instance is not None:
        others = turn.cell.operations.values()
        instance.profiling = any(other.instance is instance for other in others)
        turn.released[instance.instance_id] = instance


def reply_error(
    turn: Turn, operation_id: OperationId, error: str, message: str, hint: str = ""
) -> None:
    turn.act(ReplyError(operation_id=operation_id, error=error, message=message, hint=hint))


def _tell_node(
    turn: Turn, operation: OperationEntry, command: CancelImport | CancelProfile
) -> None:
    node = operation.node
    if node is not None and node.state is not NodeState.LOST:
        turn.act(SendCommand(link_id=node.link_id, command=command))
