"""Imports of models on a node: begun and stopped as the controller says, and told of as they go.

An import runs beside everything else and touches no instance; what it brings is the controller's
to store. Before: the deploy call of an operator. After: the model store of the node.
"""

from mesh.core.node.context import NodeEventContext
from mesh.core.node.state import LocalNode
from mesh.domain.messages import CancelImport, ImportDone, ImportFailed, ImportModel, ImportProgress


def start_import(ctx: NodeEventContext, node: LocalNode, command: ImportModel) -> None:
    node.begin_import(command.operation_id, command.source)
    ctx.engine(command)


def cancel_import(ctx: NodeEventContext, node: LocalNode, command: CancelImport) -> None:
    if node.end_import(command.operation_id):
        ctx.engine(command)


def importing(
    ctx: NodeEventContext, node: LocalNode, event: ImportProgress | ImportDone | ImportFailed
) -> None:
    if event.operation_id not in node.imports:
        return
    if not isinstance(event, ImportProgress):
        node.end_import(event.operation_id)
    ctx.report(event)
