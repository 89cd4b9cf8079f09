"""What a node reports of loads and resizes: progress, done, failed, gone; to and from the wire."""

from typing import assert_never

from mesh.domain.ids import InstanceId
from mesh.domain.messages import (
    InstanceGone,
    InstanceLoaded,
    KvResized,
    LoadFailed,
    LoadProgress,
)
from mesh.domain.steps import LoadTier
from mesh.v1 import node_link_pb2 as pb
from mesh.wire.codec_model import footprint_from_wire, footprint_to_wire
from mesh.wire.malformed import duration_s, identifier, known, require

LoadReport = InstanceLoaded | InstanceGone | KvResized | LoadProgress | LoadFailed


def load_report_to_wire(report: LoadReport) -> pb.NodeReport:
    instance_id = report.instance_id
    match report:
        case InstanceLoaded():
            loaded = pb.InstanceLoaded(
                instance_id=instance_id,
                footprint=footprint_to_wire(report.footprint),
                kv_blocks=report.kv_blocks,
                elapsed_s=report.elapsed_s,
                tier=report.tier,
                computed_s=report.computed_s,
            )
            return pb.NodeReport(instance_loaded=loaded)
        case InstanceGone():
            gone = pb.InstanceGone(
                instance_id=instance_id, error=report.error, message=report.message
            )
            return pb.NodeReport(instance_gone=gone)
        case KvResized():
            resized = pb.KvResized(
                instance_id=instance_id,
                kv_blocks=report.kv_blocks,
                elapsed_s=report.elapsed_s,
                error=report.error,
                message=report.message,
            )
            return pb.NodeReport(kv_resized=resized)
        case LoadProgress():
            progress = pb.LoadProgress(
                instance_id=instance_id, phase=report.phase, share=report.share
            )
            return pb.NodeReport(load_progress=progress)
        case LoadFailed():
            failed = pb.LoadFailed(
                instance_id=instance_id,
                error=report.error,
                message=report.message,
                hint=report.hint,
            )
            return pb.NodeReport(load_failed=failed)
        case _:
            assert_never(report)


def load_report_from_wire(message: pb.NodeReport) -> LoadReport:
    match message.WhichOneof("report"):
        case "instance_loaded":
            loaded = message.instance_loaded
            require(loaded, "footprint")
            return InstanceLoaded(
                instance_id=_instance_id(loaded),
                footprint=footprint_from_wire(loaded.footprint),
                kv_blocks=loaded.kv_blocks,
                elapsed_s=loaded.elapsed_s,
                tier=known(LoadTier, loaded.tier) or LoadTier.DISK,
                computed_s=duration_s(loaded.computed_s, loaded, "computed_s"),
            )
        case "instance_gone":
            gone = message.instance_gone
            return InstanceGone(
                instance_id=_instance_id(gone), error=gone.error, message=gone.message
            )
        case "kv_resized":
            resized = message.kv_resized
            return KvResized(
                instance_id=_instance_id(resized),
                kv_blocks=resized.kv_blocks,
                elapsed_s=duration_s(resized.elapsed_s, resized, "elapsed_s"),
                error=resized.error,
                message=resized.message,
            )
        case "load_progress":
            progress = message.load_progress
            return LoadProgress(
                instance_id=_instance_id(progress), phase=progress.phase, share=progress.share
            )
        case _:
            failed = message.load_failed
            return LoadFailed(
                instance_id=_instance_id(failed),
                error=failed.error,
                message=failed.message,
                hint=failed.hint,
            )


def _instance_id(
    message: (pb.InstanceLoaded | pb.InstanceGone | pb.KvResized | pb.LoadProgress | pb.LoadFailed),
) -> InstanceId:
    return InstanceId(identifier(message.instance_id, message, "instance_id"))
