"""Imports of models on a node: begun and stopped as the controller says, and told of as they go.

An import runs beside everything else and touches no instance; what it brings is the controller's
to store. Before: the deploy call of an operator. After: the model store of the node.
"""

from mesh.core.node.context import NodeEventContext
from mesh.core.node.state import LocalNode
from mesh.domain.actions import StartImport, StopImport
from mesh.domain.messages import CancelImport, ImportDone, ImportFailed, ImportModel, ImportProgress
from mesh.domain.node_events import ImportBroke, ImportFinished, ImportProgressed


def start_import(ctx: NodeEventContext, node: LocalNode, command: ImportModel) -> None:
    node.begin_import(command.operation_id, command.source)
    ctx.engine(
        StartImport(
            operation_id=command.operation_id, source=command.source, weights=command.weights
        )
    )


def cancel_import(ctx: NodeEventContext, node: LocalNode, command: CancelImport) -> None:
    if node.end_import(command.operation_id):
        ctx.engine(StopImport(operation_id=command.operation_id))


def importing(
    ctx: NodeEventContext, node: LocalNode, event: ImportProgressed | ImportFinished | ImportBroke
) -> None:
    operation_id = event.operation_id
    if operation_id not in node.imports:
        return
    match event:
        case ImportProgressed():
            ctx.report(
                ImportProgress(operation_id=operation_id, phase=event.phase, share=event.share)
            )
        case ImportFinished():
            node.end_import(operation_id)
            ctx.report(
                ImportDone(
                    operation_id=operation_id,
                    model=event.model,
                    footprint=event.footprint,
                    text=event.text,
                )
            )
        case ImportBroke():
            node.end_import(operation_id)
            ctx.report(
                ImportFailed(
                    operation_id=operation_id,
                    error=event.error,
                    message=event.message,
                    hint=event.hint,
                )
            )
