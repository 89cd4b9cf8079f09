"""What an operator does with a deployment: checked, put into the core, and its replies.

Before: `control`, by gRPC, and `mesh.http.operating`, for the page. After: `operations`. Each
method raises before anything begins: NotFound for a name that its caller may not see, InvalidInput.
"""

from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from mesh.controller.lookup import find_deployment
from mesh.controller.operations import Operations
from mesh.domain.actions import ReplyDone, ReplyProgress
from mesh.domain.checks import check_scaling
from mesh.domain.errors import InvalidInput
from mesh.domain.events import (
    DeleteRequested,
    LoadRequested,
    ProfileRequested,
    ScaleRequested,
    UndoRequested,
    UnloadRequested,
)
from mesh.domain.ids import DeploymentName, NodeId
from mesh.domain.views import CellSnapshot

Replies = AsyncGenerator[ReplyProgress | ReplyDone, None]


class Operating:
    """`snapshot` is the cell as the caller may see it."""

    def __init__(self, operations: Operations, snapshot: Callable[[], CellSnapshot]) -> None:
        self._operations = operations
        self._snapshot = snapshot

    def undo(self, name: DeploymentName, to: int | None) -> Replies:
        """Back to revision `to`, or to the one that served before."""
        find_deployment(name, self._snapshot())
        return self._operations.run(lambda o: UndoRequested(operation_id=o, name=name, to=to))

    def delete(self, name: DeploymentName) -> Replies:
        find_deployment(name, self._snapshot())
        return self._operations.run(lambda o: DeleteRequested(operation_id=o, name=name))

    def scale(
        self,
        name: DeploymentName,
        *,
        replicas_min: int | None,
        replicas_max: int | None,
        keep_alive_s: float | None,
    ) -> Replies:
        """`None` leaves a limit as it is."""
        if replicas_min is None and replicas_max is None and keep_alive_s is None:
            raise InvalidInput(
                "nothing to change", hint="give replicas_min, replicas_max or keep_alive_s"
            )
        scaling = find_deployment(name, self._snapshot()).spec.scaling
        check_scaling(
            replace(
                scaling,
                replicas_min=scaling.replicas_min if replicas_min is None else replicas_min,
                replicas_max=scaling.replicas_max if replicas_max is None else replicas_max,
                keep_alive_s=scaling.keep_alive_s if keep_alive_s is None else keep_alive_s,
            )
        )
        return self._operations.run(
            lambda o: ScaleRequested(
                operation_id=o,
                name=name,
                replicas_min=replicas_min,
                replicas_max=replicas_max,
                keep_alive_s=keep_alive_s,
            )
        )

    def load(self, name: DeploymentName) -> Replies:
        find_deployment(name, self._snapshot())
        return self._operations.run(lambda o: LoadRequested(operation_id=o, name=name))

    def unload(self, name: DeploymentName) -> Replies:
        find_deployment(name, self._snapshot())
        return self._operations.run(lambda o: UnloadRequested(operation_id=o, name=name))

    def profile(self, name: DeploymentName, node_id: NodeId | None) -> Replies:
        """Measure its model on a node, or on any that has room."""
        find_deployment(name, self._snapshot())
        return self._operations.run(
            lambda o: ProfileRequested(operation_id=o, name=name, node_id=node_id)
        )
