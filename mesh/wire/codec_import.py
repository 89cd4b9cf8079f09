"""What a node reports of an import: progress, done, failed; to and from the wire."""

from typing import assert_never

from mesh.domain.ids import OperationId
from mesh.domain.messages import ImportDone, ImportFailed, ImportProgress
from mesh.v1 import node_link_pb2 as pb
from mesh.wire.codec_model import (
    assets_from_wire,
    assets_to_wire,
    footprint_from_wire,
    footprint_to_wire,
    model_from_wire,
    model_to_wire,
)
from mesh.wire.malformed import identifier, require

ImportReport = ImportProgress | ImportDone | ImportFailed


def import_report_to_wire(report: ImportReport) -> pb.NodeReport:
    operation_id = report.operation_id
    match report:
        case ImportProgress():
            progress = pb.ImportProgress(
                operation_id=operation_id, phase=report.phase, share=report.share
            )
            return pb.NodeReport(import_progress=progress)
        case ImportDone():
            done = pb.ImportDone(
                operation_id=operation_id,
                model=model_to_wire(report.model),
                footprint=footprint_to_wire(report.footprint),
                text=assets_to_wire(report.text),
            )
            return pb.NodeReport(import_done=done)
        case ImportFailed():
            failed = pb.ImportFailed(
                operation_id=operation_id,
                error=report.error,
                message=report.message,
                hint=report.hint,
            )
            return pb.NodeReport(import_failed=failed)
        case _:
            assert_never(report)


def import_report_from_wire(message: pb.NodeReport) -> ImportReport:
    match message.WhichOneof("report"):
        case "import_progress":
            progress = message.import_progress
            return ImportProgress(
                operation_id=_operation_id(progress), phase=progress.phase, share=progress.share
            )
        case "import_done":
            done = message.import_done
            require(done, "model", "footprint", "text")
            return ImportDone(
                operation_id=_operation_id(done),
                model=model_from_wire(done.model),
                footprint=footprint_from_wire(done.footprint),
                text=assets_from_wire(done.text),
            )
        case _:
            failed = message.import_failed
            return ImportFailed(
                operation_id=_operation_id(failed),
                error=failed.error,
                message=failed.message,
                hint=failed.hint,
            )


def _operation_id(
    message: pb.ImportProgress | pb.ImportDone | pb.ImportFailed,
) -> OperationId:
    return OperationId(identifier(message.operation_id, message, "operation_id"))
