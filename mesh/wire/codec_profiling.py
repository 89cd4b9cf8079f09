"""What a node reports of a profile: measuring, measured, failed, refined; to and from the wire."""

from typing import assert_never

from mesh.domain.ids import InstanceId, OperationId
from mesh.domain.messages import ProfileDone, ProfileFailed, ProfileProgress, ProfileRefined
from mesh.v1 import node_link_pb2 as pb
from mesh.wire.codec_profile import factor_from_wire, profile_from_wire, profile_to_wire
from mesh.wire.malformed import identifier, require

ProfileReport = ProfileProgress | ProfileDone | ProfileRefined | ProfileFailed


def profile_report_to_wire(report: ProfileReport) -> pb.NodeReport:
    match report:
        case ProfileProgress():
            progress = pb.ProfileProgress(
                operation_id=report.operation_id, phase=report.phase, share=report.share
            )
            return pb.NodeReport(profile_progress=progress)
        case ProfileDone():
            done = pb.ProfileDone(
                operation_id=report.operation_id, profile=profile_to_wire(report.profile)
            )
            return pb.NodeReport(profile_done=done)
        case ProfileRefined():
            refined = pb.ProfileRefined(
                instance_id=report.instance_id,
                profile=profile_to_wire(report.profile),
                correction=report.correction or 0.0,
                correction_planned=report.correction_planned or 0.0,
            )
            return pb.NodeReport(profile_refined=refined)
        case ProfileFailed():
            failed = pb.ProfileFailed(
                operation_id=report.operation_id,
                error=report.error,
                message=report.message,
                hint=report.hint,
            )
            return pb.NodeReport(profile_failed=failed)
        case _:
            assert_never(report)


def profile_report_from_wire(message: pb.NodeReport) -> ProfileReport:
    match message.WhichOneof("report"):
        case "profile_progress":
            progress = message.profile_progress
            return ProfileProgress(
                operation_id=_operation_id(progress), phase=progress.phase, share=progress.share
            )
        case "profile_done":
            done = message.profile_done
            require(done, "profile")
            return ProfileDone(
                operation_id=_operation_id(done), profile=profile_from_wire(done.profile)
            )
        case "profile_refined":
            refined = message.profile_refined
            require(refined, "profile")
            return ProfileRefined(
                instance_id=InstanceId(identifier(refined.instance_id, refined, "instance_id")),
                profile=profile_from_wire(refined.profile),
                correction=_factor(refined, "correction"),
                correction_planned=_factor(refined, "correction_planned"),
            )
        case _:
            failed = message.profile_failed
            return ProfileFailed(
                operation_id=_operation_id(failed),
                error=failed.error,
                message=failed.message,
                hint=failed.hint,
            )


def _factor(refined: pb.ProfileRefined, field: str) -> float | None:
    """None for the 0 of a node whose version tells none."""
    value: float = getattr(refined, field)
    return factor_from_wire(value, refined, field) if value else None


def _operation_id(
    message: pb.ProfileProgress | pb.ProfileDone | pb.ProfileFailed,
) -> OperationId:
    return OperationId(identifier(message.operation_id, message, "operation_id"))
