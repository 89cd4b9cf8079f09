"""What a controller tells a node: NodeCommand to and from the wire."""

from typing import assert_never

from mesh.domain.ids import DeploymentName, InstanceId, OperationId, RequestId
from mesh.domain.messages import (
    AbortRequest,
    CancelImport,
    CancelProfile,
    ContinueRequest,
    ImportModel,
    LoadInstance,
    NodeCommand,
    ProfileInstance,
    ResizeKv,
    SubmitRequest,
    UnloadInstance,
    UseProfile,
)
from mesh.domain.node_rule import CELL_RULE, NodeRule
from mesh.domain.reasons import TurnRule
from mesh.v1 import node_link_pb2 as pb
from mesh.wire.codec_model import model_from_wire, model_to_wire, weights_from_wire
from mesh.wire.codec_profile import profile_from_wire, profile_to_wire
from mesh.wire.codec_request import submit_from_wire, submit_to_wire
from mesh.wire.malformed import at_least_one, identifier, member, nothing_known, require


def welcome(heartbeat_s: float, rule: NodeRule) -> pb.NodeCommand:
    """The first message of an accepted link."""
    greeting = pb.Welcome(
        heartbeat_s=heartbeat_s,
        turns=rule.turn,
        turn_s_max=rule.turn_s_max,
        overestimate=rule.overestimate,
        chunk_tokens_max=rule.chunk_tokens_max,
    )
    return pb.NodeCommand(welcome=greeting)


def rule_of(message: pb.Welcome) -> NodeRule:
    """The rule of a welcome; what a controller's version does not know is as by default."""
    return NodeRule(
        turn=member(TurnRule, message.turns or TurnRule.HEADROOM, message, "turns"),
        turn_s_max=message.turn_s_max,
        overestimate=message.overestimate or CELL_RULE.overestimate,
        chunk_tokens_max=message.chunk_tokens_max or CELL_RULE.chunk_tokens_max,
    )


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
        case ContinueRequest():
            return pb.NodeCommand(
                continue_request=pb.ContinueRequest(
                    instance_id=command.instance_id,
                    request_id=command.request_id,
                    attempt=command.attempt,
                    token_ids=command.token_ids,
                    held=command.held,
                    due_in_s=command.due_in_s,
                )
            )
        case ResizeKv():
            return pb.NodeCommand(
                resize_kv=pb.ResizeKv(instance_id=command.instance_id, kv_blocks=command.kv_blocks)
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
                    operation_id=command.operation_id,
                    source=command.source,
                    weights=command.weights or "",
                )
            )
        case CancelImport():
            return pb.NodeCommand(cancel_import=pb.CancelImport(operation_id=command.operation_id))
        case ProfileInstance():
            return pb.NodeCommand(
                profile_instance=pb.ProfileInstance(
                    operation_id=command.operation_id, instance_id=command.instance_id
                )
            )
        case CancelProfile():
            return pb.NodeCommand(
                cancel_profile=pb.CancelProfile(operation_id=command.operation_id)
            )
        case UseProfile():
            return pb.NodeCommand(
                use_profile=pb.UseProfile(
                    instance_id=command.instance_id, profile=profile_to_wire(command.profile)
                )
            )
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
        case "continue_request":
            more = message.continue_request
            return ContinueRequest(
                instance_id=_instance_id(more),
                request_id=RequestId(identifier(more.request_id, more, "request_id")),
                attempt=more.attempt,
                token_ids=tuple(more.token_ids),
                held=more.held,
                due_in_s=more.due_in_s,
            )
        case "resize_kv":
            resize = message.resize_kv
            return ResizeKv(
                instance_id=_instance_id(resize),
                kv_blocks=at_least_one(resize.kv_blocks, resize, "kv_blocks"),
            )
        case "load_instance":
            return _load_from_wire(message.load_instance)
        case "unload_instance":
            return UnloadInstance(instance_id=_instance_id(message.unload_instance))
        case "import_model":
            return ImportModel(
                operation_id=_operation_id(message.import_model),
                source=message.import_model.source,
                weights=weights_from_wire(message.import_model.weights, message.import_model),
            )
        case "cancel_import":
            return CancelImport(operation_id=_operation_id(message.cancel_import))
        case "profile_instance":
            measure = message.profile_instance
            return ProfileInstance(
                operation_id=_operation_id(measure), instance_id=_instance_id(measure)
            )
        case "cancel_profile":
            return CancelProfile(operation_id=_operation_id(message.cancel_profile))
        case "use_profile":
            use = message.use_profile
            require(use, "profile")
            return UseProfile(instance_id=_instance_id(use), profile=profile_from_wire(use.profile))
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
        profile=profile_to_wire(load.profile),
    )


def _load_from_wire(message: pb.LoadInstance) -> LoadInstance:
    require(message, "model", "profile")
    return LoadInstance(
        instance_id=_instance_id(message),
        deployment=DeploymentName(message.deployment),
        model=model_from_wire(message.model),
        kv_blocks=message.kv_blocks,
        context_tokens_max=message.context_tokens_max,
        batch_max=message.batch_max,
        profile=profile_from_wire(message.profile),
    )


def _instance_id(
    message: (
        pb.LoadInstance
        | pb.UnloadInstance
        | pb.ResizeKv
        | pb.ProfileInstance
        | pb.UseProfile
        | pb.ContinueRequest
    ),
) -> InstanceId:
    return InstanceId(identifier(message.instance_id, message, "instance_id"))


def _operation_id(
    message: pb.ImportModel | pb.CancelImport | pb.ProfileInstance | pb.CancelProfile,
) -> OperationId:
    return OperationId(identifier(message.operation_id, message, "operation_id"))
