"""What a controller tells a node: NodeCommand to and from the wire."""

from typing import assert_never

from mesh.domain.ids import DeploymentName, InstanceId, OperationId, RequestId
from mesh.domain.messages import (
    AbortRequest,
    CancelImport,
    ImportModel,
    LoadInstance,
    NodeCommand,
    SubmitRequest,
    UnloadInstance,
)
from mesh.v1 import node_link_pb2 as pb
from mesh.wire.codec_model import model_from_wire, model_to_wire
from mesh.wire.codec_request import submit_from_wire, submit_to_wire
from mesh.wire.malformed import identifier, nothing_known, require


def welcome(heartbeat_s: float) -> pb.NodeCommand:
    """The first message of an accepted link."""
    return pb.NodeCommand(welcome=pb.Welcome(heartbeat_s=heartbeat_s))


def command_to_wire(command: NodeCommand) -> pb.NodeCommand:
    match command:
        case SubmitRequest():
            return pb.NodeCommand(submit_request=submit_to_wire(command))
        case AbortRequest():
            return pb.NodeCommand(
                abort_request=pb.AbortRequest(
                    request_id=command.request_id, attempt=command.attempt
                )
            )
        case LoadInstance():
            return pb.NodeCommand(load_instance=_load_to_wire(command))
        case UnloadInstance():
            return pb.NodeCommand(
                unload_instance=pb.UnloadInstance(instance_id=command.instance_id)
            )
        case ImportModel():
            return pb.NodeCommand(
                import_model=pb.ImportModel(
                    operation_id=command.operation_id, source=command.source
                )
            )
        case CancelImport():
            return pb.NodeCommand(cancel_import=pb.CancelImport(operation_id=command.operation_id))
        case _:
            assert_never(command)


def command_from_wire(message: pb.NodeCommand) -> NodeCommand:
    """The command. Raises InvalidInput for a malformed one; `welcome` is none, the link's own."""
    match message.WhichOneof("command"):
        case "submit_request":
            return submit_from_wire(message.submit_request)
        case "abort_request":
            abort = message.abort_request
            return AbortRequest(
                request_id=RequestId(identifier(abort.request_id, abort, "request_id")),
                attempt=abort.attempt,
            )
        case "load_instance":
            return _load_from_wire(message.load_instance)
        case "unload_instance":
            return UnloadInstance(instance_id=_instance_id(message.unload_instance))
        case "import_model":
            return ImportModel(
                operation_id=_operation_id(message.import_model),
                source=message.import_model.source,
            )
        case "cancel_import":
            return CancelImport(operation_id=_operation_id(message.cancel_import))
        case _:
            raise nothing_known(message)


def _load_to_wire(load: LoadInstance) -> pb.LoadInstance:
    return pb.LoadInstance(
        instance_id=load.instance_id,
        deployment=load.deployment,
        model=model_to_wire(load.model),
        kv_blocks=load.kv_blocks,
        context_tokens_max=load.context_tokens_max,
        batch_max=load.batch_max,
    )


def _load_from_wire(message: pb.LoadInstance) -> LoadInstance:
    require(message, "model")
    return LoadInstance(
        instance_id=_instance_id(message),
        deployment=DeploymentName(message.deployment),
        model=model_from_wire(message.model),
        kv_blocks=message.kv_blocks,
        context_tokens_max=message.context_tokens_max,
        batch_max=message.batch_max,
    )


def _instance_id(message: pb.LoadInstance | pb.UnloadInstance) -> InstanceId:
    return InstanceId(identifier(message.instance_id, message, "instance_id"))


def _operation_id(message: pb.ImportModel | pb.CancelImport) -> OperationId:
    return OperationId(identifier(message.operation_id, message, "operation_id"))
