"""The node's models, live: imports through child processes, the engine's preparation, load orders.

Decides when an import's result is the model that was asked for. Owns the imports under way. An
import goes: child process (mesh_loader) → `engine.prepare` on the preparing lane → ImportDone.
A load that lacks its model goes the same way, and holds up no other load meanwhile.
Before: `NodePerformer`. After: the host, by events, and the engine's load.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Protocol

from mesh.domain.errors import Cancelled, MeshError, ModelError, StorageError, Unavailable
from mesh.domain.ids import InstanceId, ModelId, OperationId
from mesh.domain.messages import (
    ImportDone,
    ImportFailed,
    ImportProgress,
    InstanceGone,
    LoadFailed,
    LoadInstance,
    failure,
)
from mesh.domain.model import Footprint, ModelInfo, WeightPrecision, stored_id
from mesh.domain.node_events import NodeEvent
from mesh.domain.steps import LoadOrder
from mesh.domain.text import TextAssets
from mesh.domain.values import dataclass, replace
from mesh.runtime.engine import Progress
from mesh.runtime.node_actions import Brought, Lane, Lanes
from mesh_loader import locks
from mesh_loader.sources import check_weights
from mesh_nodes.imports import Imports, ImportSource, Stored, Ticket
from mesh_nodes.lanes import call_on

LOAD_IMPORT_S_MAX = 600.0
"""An import that a load waits for; the controller gives a load up after as long."""

log = logging.getLogger(__name__)


class Preparer(Protocol):
    """What an engine does with a model before it is loaded; see `mesh.runtime.engine.Engine`."""

    def footprint(self, model: ModelInfo) -> Footprint: ...

    def prepare(self, model: ModelInfo, model_path: Path, progress: Progress) -> None: ...

    def is_prepared(self, model: ModelInfo, model_path: Path) -> bool: ...


@dataclass(eq=False, slots=True)
class _Operation:
    """An import that the controller asked for."""

    operation_id: OperationId
    source: str
    weights: WeightPrecision | None
    ticket: Ticket | None = None
    stopped: threading.Event = field(default_factory=threading.Event)


class NodeModels:
    """See `mesh.runtime.node_actions.Models`. All but `at_hand` is for the loop's thread."""

    def __init__(
        self,
        *,
        engine: Preparer,
        lanes: Lanes,
        loop: asyncio.AbstractEventLoop,
        find: Callable[[ModelId], Stored | None],
        import_source: ImportSource,
        read_assets: Callable[[Path], TextAssets],
    ) -> None:
        """`find` looks a model up in the store; `import_source` puts one there."""
        self._engine = engine
        self._lanes = lanes
        self._loop = loop
        self._find = find
        self._imports = Imports(import_source)
        self._read_assets = read_assets
        self._operations: dict[OperationId, _Operation] = {}
        self._closed = threading.Event()

    def start_import(
        self, operation_id: OperationId, source: str, weights: WeightPrecision | None
    ) -> None:
        operation = _Operation(operation_id, source, weights)
        self._operations[operation_id] = operation
        try:
            check_weights(source, weights)
            ticket = self._imports.join(source, partial(self._tell, operation), weights)
            operation.ticket = ticket
        except MeshError as error:
            self._break(operation, error)
            return
        ticket.outcome.add_done_callback(lambda outcome: self._imported_soon(operation, outcome))

    def stop_import(self, operation_id: OperationId) -> None:
        operation = self._operations.get(operation_id)
        if operation is None:
            return
        operation.stopped.set()
        if operation.ticket is not None:
            self._imports.cancel(operation.ticket)
        self._break(operation, Cancelled(f"the import of {operation.source} was stopped"))

    def at_hand(self, action: LoadInstance) -> LoadOrder | None:
        model = action.model
        stored = self._find(stored_id(model.model_id))
        if stored is None or not self._engine.is_prepared(model, stored.path):
            return None
        return action.order(stored.path)

    def bring(self, action: LoadInstance, progress: Progress, then: Brought) -> None:
        source, start_s = action.model.source, time.perf_counter()
        try:
            stored = self._find(stored_id(action.model.model_id))
            if stored is not None:
                self._prepare_for(action, stored, progress, then)
                return
            ticket = self._imports.join(source, progress, action.model.weights)
        except MeshError as error:
            then(error)
            return
        waits = True

        def end(result: Stored | MeshError) -> None:
            nonlocal waits
            if not waits:
                return
            waits = False
            expiry.cancel()
            self._imports.cancel(ticket)
            if isinstance(result, MeshError):
                then(result)
            elif result.info.model_id != stored_id(action.model.model_id):
                then(_changed(action, result))
            else:
                self._prepare_for(action, result, progress, then, start_s)

        expiry = self._loop.call_later(LOAD_IMPORT_S_MAX, lambda: end(_too_late(source)))
        ticket.outcome.add_done_callback(
            lambda outcome: call_on(self._loop, end, _result_of(outcome))
        )

    async def close(self, timeout_s: float) -> bool:
        """Stop all imports; False when one has not ended within `timeout_s`."""
        self._closed.set()
        for operation in self._operations.values():
            operation.stopped.set()
        self._operations.clear()
        return await asyncio.to_thread(self._imports.close, timeout_s)

    def _prepare_for(
        self,
        action: LoadInstance,
        stored: Stored,
        progress: Progress,
        then: Brought,
        import_start_s: float | None = None,
    ) -> None:
        """What `mesh pull` or another kind of engine brought here is not prepared yet. A store that
        cannot be written any more makes loads slower, not impossible.
        """

        def unless_closed(phase: str, share: float) -> None:
            if self._closed.is_set():
                raise Cancelled(f"the load of {action.instance_id} was stopped: the node stops")
            progress(phase, share)

        def call() -> LoadOrder:
            try:
                self._engine.prepare(action.model, stored.path, unless_closed)
            except StorageError as error:
                log.warning("%s is loaded unprepared: %s", action.model.model_id, error.message)
            order = action.order(stored.path)
            if import_start_s is None:
                return order
            return replace(order, import_s=time.perf_counter() - import_start_s)

        self._lanes.run(Lane.PREPARING, call, then)

    def _tell(self, operation: _Operation, phase: str, share: float) -> None:
        """From any thread."""
        self._lanes.post_soon(
            ImportProgress(operation_id=operation.operation_id, phase=phase, share=share)
        )

    def _imported_soon(self, operation: _Operation, outcome: "Future[Stored]") -> None:
        """From the import's thread: prepare on a lane, which the loop's thread feeds."""
        call_on(self._loop, self._imported, operation, outcome)

    def _imported(self, operation: _Operation, outcome: "Future[Stored]") -> None:
        if operation.stopped.is_set():
            return
        stored = _result_of(outcome)
        if isinstance(stored, MeshError):
            self._break(operation, stored)
            return

        def progress(phase: str, share: float) -> None:
            if operation.stopped.is_set():
                raise Cancelled(f"the import of {operation.source} was stopped")
            self._tell(operation, phase, share)

        def call() -> ImportDone:
            model = stored.info.held_as(operation.weights)
            self._engine.prepare(model, stored.path, progress)
            return ImportDone(
                operation_id=operation.operation_id,
                model=model,
                footprint=self._engine.footprint(model),
                text=self._read_assets(stored.path),
            )

        def done(result: ImportDone | MeshError) -> NodeEvent | None:
            if operation.stopped.is_set():
                return None
            if isinstance(result, MeshError):
                self._break(operation, result)
                return None
            del self._operations[operation.operation_id]
            return result

        self._lanes.run(Lane.PREPARING, call, done)

    def _break(self, operation: _Operation, error: MeshError) -> None:
        """Every import that was started ends with exactly one event; this is the bad one."""
        del self._operations[operation.operation_id]
        self._lanes.post_soon(failure(ImportFailed, error, operation_id=operation.operation_id))


def _result_of(outcome: "Future[Stored]") -> Stored | MeshError:
    error = outcome.exception()
    assert error is None or isinstance(error, MeshError), error
    return error or outcome.result()


def _changed(action: LoadInstance, stored: Stored) -> ModelError:
    model = action.model
    return ModelError(
        f"{model.source} has changed since it was deployed: its content was "
        f"{stored_id(model.model_id)} and is {stored.info.model_id} now",
        hint=f"deploy {action.deployment} again to serve the new content",
    )


def _too_late(source: str) -> Unavailable:
    return Unavailable(
        f"{source} was not imported within {LOAD_IMPORT_S_MAX:.0f} s, "
        "as long as a load may wait for it",
        hint="bring it into this node's store beforehand with `mesh pull`",
    )


class ModelsInUse:
    """Tells others of the machine which stored models this node loads or has loaded.

    A recorder of the node's host: a load is seen as it is decided, before anything of it runs, and
    a model is free again with the end of its last instance. Owns a shared lock per instance, which
    ends with the process however it ends; `mesh store rm` and `gc` look at these locks. One call at
    a time.
    """

    def __init__(self, store_path: Path) -> None:
        self._store_path = store_path
        self._held: dict[InstanceId, int] = {}

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        if isinstance(event, LoadFailed) or (isinstance(event, InstanceGone) and not event.error):
            self._release(event.instance_id)
        for action in actions:
            if isinstance(action, LoadInstance):
                self._hold(action)

    def close(self) -> None:
        for instance_id in list(self._held):
            self._release(instance_id)

    def _hold(self, action: LoadInstance) -> None:
        self._release(action.instance_id)
        path = locks.model_lock(self._store_path, stored_id(action.model.model_id))
        try:
            self._held[action.instance_id] = locks.share(path)
        except OSError as error:
            log.warning("%s is in use without a lock: %s", action.model.model_id, error)

    def _release(self, instance_id: InstanceId) -> None:
        descriptor = self._held.pop(instance_id, None)
        if descriptor is not None:
            os.close(descriptor)
