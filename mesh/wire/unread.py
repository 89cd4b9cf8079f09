"""What stands for a message of a link that one end cannot read or write, so that the link goes on.

One end may run a later version of mesh, with words that the other does not know: another precision,
say. Or a value does not fit the field that carries it: a number that a model's file says, a text
that UTF-8 cannot hold. What is asked or told with it has failed, and who waits for it learns why.
Before: `codec`, which raises. After: the node's answer, or the controller's
event.
"""

import logging
from dataclasses import fields, replace

from mesh.domain.errors import InvalidInput, MeshError, ModelError
from mesh.domain.ids import InstanceId, OperationId, RequestId
from mesh.domain.messages import (
    ImportDone,
    ImportFailed,
    ImportModel,
    InstanceLoaded,
    LoadFailed,
    LoadInstance,
    NodeCommand,
    NodeReport,
    ProfileDone,
    ProfileFailed,
    ProfileInstance,
    RequestReturned,
    SubmitRequest,
    TokensReport,
)
from mesh.v1 import node_link_pb2 as pb
from mesh.wire.channel import MESSAGE_BYTES_MAX
from mesh.wire.codec import command_to_wire, report_from_wire, report_to_wire
from mesh.wire.malformed import M

logger = logging.getLogger(__name__)

SHOWN_CHARS_MAX = 200
"""At most so many characters are shown of what a library says of a value that does not fit."""
_UNSENDABLE = (TypeError, ValueError, OverflowError)
"""What protobuf raises for a number beyond its field, a lone surrogate, or another type."""


def refused(command: pb.NodeCommand, error: InvalidInput) -> NodeReport | None:
    """The node's answer to a command that it cannot read; None where no report would be one."""
    told = InvalidInput(f"the node cannot read its command: {error.message}", hint=error.hint)
    match command.WhichOneof("command"):
        case "load_instance":
            return _load_failed(InstanceId(command.load_instance.instance_id), told)
        case "import_model":
            return _import_failed(OperationId(command.import_model.operation_id), told)
        case "submit_request":
            submit = command.submit_request
            return _returned(RequestId(submit.request_id), submit.attempt, told)
        case _:
            return None


def report_read(message: pb.NodeReport) -> NodeReport | None:
    """The report, or the failure of an import whose result cannot be read; None for a report of a
    kind that this version does not know. Raises InvalidInput for any other malformed one.
    """
    what = message.WhichOneof("report")
    if what is None:
        return None
    try:
        return report_from_wire(message)
    except InvalidInput as error:
        if what != "import_done":
            raise
        told = f"the controller cannot read what was imported: {error.message}"
        operation_id = OperationId(message.import_done.operation_id)
        return _import_failed(operation_id, InvalidInput(told, hint=error.hint))


def reports_written(report: NodeReport) -> list[pb.NodeReport]:
    """The report as the link carries it. In the place of one that does not fit its message come the
    failures of what it tells of; nothing where nobody waits for it.
    """
    try:
        return [_bounded(report_to_wire(report))]
    except _UNSENDABLE as error:
        logger.error("%s cannot be sent: %s", type(report).__name__, _shown(error))
        failures = _failures(report, _beyond("the node cannot tell what came of it", error))
    written = []
    for failure in failures:
        try:
            written.append(_bounded(report_to_wire(failure)))
        except _UNSENDABLE as error:
            logger.error("%s cannot be sent either: %s", type(failure).__name__, _shown(error))
    return written


def command_written(command: NodeCommand) -> pb.NodeCommand | NodeReport:
    """The command as the link carries it; for one that does not fit its message, what the node
    would answer if it could not read it. Raises InvalidInput where no report would be an answer.
    """
    try:
        return _bounded(command_to_wire(command))
    except _UNSENDABLE as error:
        beyond = _beyond("the controller cannot ask a node for it", error)
    match command:
        case LoadInstance():
            return _load_failed(command.instance_id, beyond)
        case ImportModel():
            return _import_failed(command.operation_id, beyond)
        case ProfileInstance():
            return _profile_failed(command.operation_id, beyond)
        case SubmitRequest():
            order = command.order
            return _returned(order.request.request_id, order.attempt, beyond)
        case _:
            raise InvalidInput(f"{type(command).__name__}: {beyond.message}")


def _failures(report: NodeReport, error: MeshError) -> list[NodeReport]:
    match report:
        case ImportDone():
            return [_import_failed(report.operation_id, error)]
        case InstanceLoaded():
            return [_load_failed(report.instance_id, error)]
        case ProfileDone():
            return [_profile_failed(report.operation_id, error)]
        case TokensReport():
            return [_returned(one.request_id, one.attempt, error) for one in report.outputs]
        case _:
            readable = {
                field.name: value.encode("utf-8", "replace").decode("utf-8")
                for field in fields(report)
                if isinstance(value := getattr(report, field.name), str)
            }
            if "message" not in readable:
                return []
            return [replace(report, **readable)]  # type: ignore[arg-type]


def _import_failed(operation_id: OperationId, error: MeshError) -> ImportFailed:
    kind = type(error).__name__
    return ImportFailed(
        operation_id=operation_id, error=kind, message=error.message, hint=error.hint
    )


def _load_failed(instance_id: InstanceId, error: MeshError) -> LoadFailed:
    kind = type(error).__name__
    return LoadFailed(instance_id=instance_id, error=kind, message=error.message, hint=error.hint)


def _profile_failed(operation_id: OperationId, error: MeshError) -> ProfileFailed:
    kind = type(error).__name__
    return ProfileFailed(
        operation_id=operation_id, error=kind, message=error.message, hint=error.hint
    )


def _returned(request_id: RequestId, attempt: int, error: MeshError) -> RequestReturned:
    kind = type(error).__name__
    return RequestReturned(
        request_id=request_id, attempt=attempt, error=kind, message=error.message
    )


def _beyond(what: str, error: Exception) -> ModelError:
    return ModelError(
        f"{what}: a value does not fit the message that carries it ({_shown(error)})",
        hint="look for a number or a text in the model's configuration that cannot be meant",
    )


def _shown(error: Exception) -> str:
    text = str(error).encode("ascii", "backslashreplace").decode("ascii")
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}…"


def _bounded(message: M) -> M:
    """The message. Raises ValueError where the other end would not take so many bytes."""
    size_bytes = message.ByteSize()
    if size_bytes > MESSAGE_BYTES_MAX:
        raise ValueError(f"it takes {size_bytes} bytes, the limit is {MESSAGE_BYTES_MAX}")
    return message
