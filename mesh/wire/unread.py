"""What stands for a message of a link that one end cannot read or write, so that the link goes on.

One end may run a later version of mesh, with words that the other does not know: another precision,
say. Or a value does not fit the field that carries it: a number that a model's file says, a text
that UTF-8 cannot hold. What is asked or told with it has failed, and who waits for it learns why.
Before: `codec`, which raises. After: the node's answer, or the controller's
event.
"""

import logging
from dataclasses import fields

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
    failure,
)
from mesh.domain.values import replace
from mesh.v1 import node_link_pb2 as pb
from mesh.wire.channel import MESSAGE_BYTES_MAX
from mesh.wire.codec import UNSENDABLE, command_to_wire, report_from_wire, report_to_wire
from mesh.wire.malformed import M

logger = logging.getLogger(__name__)

SHOWN_CHARS_MAX = 200
"""At most so many characters are shown of what a library says of a value that does not fit."""


def refused(command: pb.NodeCommand, error: InvalidInput) -> NodeReport | None:
    """The node's answer to a command that it cannot read; None where no report would be one."""
    told = InvalidInput(f"the node cannot read its command: {error.message}", hint=error.hint)
    match command.WhichOneof("command"):
        case "load_instance":
            return failure(
                LoadFailed, told, instance_id=InstanceId(command.load_instance.instance_id)
            )
        case "import_model":
            return failure(
                ImportFailed, told, operation_id=OperationId(command.import_model.operation_id)
            )
        case "submit_request":
            submit = command.submit_request
            return failure(
                RequestReturned,
                told,
                request_id=RequestId(submit.request_id),
                attempt=submit.attempt,
            )
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
        return failure(ImportFailed, InvalidInput(told, hint=error.hint), operation_id=operation_id)


def reports_written(report: NodeReport) -> list[pb.NodeReport]:
    """The report as the link carries it. In the place of one that does not fit its message come the
    failures of what it tells of; nothing where nobody waits for it.
    """
    try:
        return [bounded(report_to_wire(report))]
    except UNSENDABLE as error:
        logger.error("%s cannot be sent: %s", type(report).__name__, _shown(error))
        failures = _failures(report, _beyond("the node cannot tell what came of it", error))
    written = []
    for failed in failures:
        try:
            written.append(bounded(report_to_wire(failed)))
        except UNSENDABLE as error:
            logger.error("%s cannot be sent either: %s", type(failed).__name__, _shown(error))
    return written


def command_written(command: NodeCommand) -> pb.NodeCommand | NodeReport:
    """The command as the link carries it; for one that does not fit its message, what the node
    would answer if it could not read it. Raises InvalidInput where no report would be an answer.
    """
    try:
        return bounded(command_to_wire(command))
    except UNSENDABLE as error:
        beyond = _beyond("the controller cannot ask a node for it", error)
    match command:
        case LoadInstance():
            return failure(LoadFailed, beyond, instance_id=command.instance_id)
        case ImportModel():
            return failure(ImportFailed, beyond, operation_id=command.operation_id)
        case ProfileInstance():
            return failure(ProfileFailed, beyond, operation_id=command.operation_id)
        case SubmitRequest():
            order = command.order
            return failure(
                RequestReturned, beyond, request_id=order.request.request_id, attempt=order.attempt
            )
        case _:
            raise InvalidInput(f"{type(command).__name__}: {beyond.message}")


def _failures(report: NodeReport, error: MeshError) -> list[NodeReport]:
    match report:
        case ImportDone():
            return [failure(ImportFailed, error, operation_id=report.operation_id)]
        case InstanceLoaded():
            return [failure(LoadFailed, error, instance_id=report.instance_id)]
        case ProfileDone():
            return [failure(ProfileFailed, error, operation_id=report.operation_id)]
        case TokensReport():
            return [
                failure(RequestReturned, error, request_id=one.request_id, attempt=one.attempt)
                for one in report.outputs
            ]
        case _:
            readable = {
                field.name: value.encode("utf-8", "replace").decode("utf-8")
                for field in fields(report)
                if isinstance(value := getattr(report, field.name), str)
            }
            if "message" not in readable:
                return []
            return [replace(report, **readable)]  # type: ignore[arg-type]


def _beyond(what: str, error: Exception) -> ModelError:
    return ModelError(
        f"{what}: a value does not fit the message that carries it ({_shown(error)})",
        hint="look for a number or a text in the model's configuration that cannot be meant",
    )


def _shown(error: Exception) -> str:
    text = str(error).encode("ascii", "backslashreplace").decode("ascii")
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}…"


def bounded(message: M) -> M:
    """The message. Raises ValueError where the other end would not take so many bytes."""
    size_bytes = message.ByteSize()
    if size_bytes > MESSAGE_BYTES_MAX:
        raise ValueError(f"it takes {size_bytes} bytes, the limit is {MESSAGE_BYTES_MAX}")
    return message
