"""What stands for a message of a link that this end cannot make sense of, so that the link goes on.

One end may run a later version of mesh, with words that the other does not know: another precision,
say. What is asked or told with such a word has failed, and who waits for it learns why. Before:
`codec`, which raises. After: the node's answer, or the controller's event.
"""

from mesh.domain.errors import InvalidInput
from mesh.domain.ids import InstanceId, OperationId, RequestId
from mesh.domain.messages import ImportFailed, LoadFailed, NodeReport, RequestReturned
from mesh.v1 import node_link_pb2 as pb
from mesh.wire.codec import report_from_wire


def refused(command: pb.NodeCommand, error: InvalidInput) -> NodeReport | None:
    """The node's answer to a command that it cannot read; None where no report would be one."""
    kind, message = type(error).__name__, f"the node cannot read its command: {error.message}"
    match command.WhichOneof("command"):
        case "load_instance":
            return LoadFailed(
                instance_id=InstanceId(command.load_instance.instance_id),
                error=kind,
                message=message,
                hint=error.hint,
            )
        case "import_model":
            return ImportFailed(
                operation_id=OperationId(command.import_model.operation_id),
                error=kind,
                message=message,
                hint=error.hint,
            )
        case "submit_request":
            return RequestReturned(
                request_id=RequestId(command.submit_request.request_id),
                attempt=command.submit_request.attempt,
                error=kind,
                message=message,
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
        return ImportFailed(
            operation_id=OperationId(message.import_done.operation_id),
            error=type(error).__name__,
            message=f"the controller cannot read what was imported: {error.message}",
            hint=error.hint,
        )
