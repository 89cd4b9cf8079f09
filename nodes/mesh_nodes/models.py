"""The node's models, live: imports through child processes, the engine's preparation, load orders.

Decides when an import's result is the model that was asked for. Owns the imports under way. An
import goes: child process (mesh_loader) → `engine.prepare` on the loading lane → ImportFinished.
Before: `NodePerformer`. After: the host, by events, and the engine's load.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from mesh.domain.actions import StartLoad
from mesh.domain.errors import Cancelled, MeshError, ModelError, StorageError, Unavailable
from mesh.domain.ids import ModelId, OperationId
from mesh.domain.model import Footprint, ModelInfo
from mesh.domain.node_events import ImportBroke, ImportFinished, ImportProgressed, NodeEvent
from mesh.domain.steps import LoadOrder
from mesh.domain.text import TextAssets
from mesh.runtime.engine import Progress
from mesh.runtime.node_actions import Lane, Lanes
from mesh_nodes.imports import Imports, ImportSource, Stored, Ticket
from mesh_nodes.messenger import call_on

LOAD_IMPORT_S_MAX = 600.0
"""An import that a load waits for; the controller gives a load up after as long."""

log = logging.getLogger(__name__)


class Preparer(Protocol):
    """What an engine does with a model before it is loaded; see `mesh.runtime.engine.Engine`."""

    def footprint(self, model: ModelInfo) -> Footprint: ...

    def prepare(self, model: ModelInfo, model_path: Path, progress: Progress) -> None: ...


@dataclass(eq=False, slots=True)
class _Operation:
    """An import that the controller asked for."""

    operation_id: OperationId
    source: str
    ticket: Ticket | None = None
    stopped: threading.Event = field(default_factory=threading.Event)


class NodeModels:
    """See `mesh.runtime.node_actions.Models`. `start_import` and `stop_import` are for the loop's
    thread, `order` is for the loading lane's.
    """

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

    def start_import(self, operation_id: OperationId, source: str) -> None:
        operation = _Operation(operation_id, source)
        self._operations[operation_id] = operation
        try:
            ticket = operation.ticket = self._imports.join(source, partial(self._tell, operation))
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
            self._imports.leave(operation.ticket)
        self._break(operation, Cancelled(f"the import of {operation.source} was stopped"))

    def order(self, action: StartLoad, progress: Progress) -> LoadOrder:
        model = action.model
        start_s = time.perf_counter()
        stored = self._find(model.model_id)
        imports = stored is None
        if stored is None:
            stored = self._import(model.source, progress)
            if stored.info.model_id != model.model_id:
                raise ModelError(
                    f"{model.source} has changed since it was deployed: its content was "
                    f"{model.model_id} and is {stored.info.model_id} now",
                    hint=f"deploy {action.deployment} again to serve the new content",
                )
        self._prepare(model, stored.path, progress)
        return LoadOrder(
            instance_id=action.instance_id,
            deployment=action.deployment,
            model=model,
            model_path=stored.path,
            kv_blocks=action.kv_blocks,
            context_tokens_max=action.context_tokens_max,
            batch_max=action.batch_max,
            import_s=time.perf_counter() - start_s if imports else 0.0,
        )

    async def close(self, timeout_s: float) -> bool:
        """Stop all imports; False when one has not ended within `timeout_s`."""
        for operation in self._operations.values():
            operation.stopped.set()
        self._operations.clear()
        return await asyncio.to_thread(self._imports.close, timeout_s)

    def _import(self, source: str, progress: Progress) -> Stored:
        """Import for a load, sharing what is under way. Other loads wait behind this one."""
        ticket = self._imports.join(source, progress)
        try:
            return ticket.outcome.result(LOAD_IMPORT_S_MAX)
        except FutureTimeout:
            raise Unavailable(
                f"{source} was not imported within {LOAD_IMPORT_S_MAX:.0f} s, "
                "as long as a load may wait for it",
                hint="bring it into this node's store beforehand with `mesh pull`",
            ) from None
        finally:
            self._imports.leave(ticket)

    def _prepare(self, model: ModelInfo, path: Path, progress: Progress) -> None:
        """What `mesh pull` or another kind of engine brought here is not prepared yet. A store that
        cannot be written any more makes loads slower, not impossible.
        """
        try:
            self._engine.prepare(model, path, progress)
        except StorageError as error:
            log.warning("%s is loaded unprepared: %s", model.model_id, error.message)

    def _tell(self, operation: _Operation, phase: str, share: float) -> None:
        """From any thread."""
        self._lanes.post_soon(
            ImportProgressed(operation_id=operation.operation_id, phase=phase, share=share)
        )

    def _imported_soon(self, operation: _Operation, outcome: "Future[Stored]") -> None:
        """From the import's thread: prepare on the loading lane, which the loop's thread feeds."""
        call_on(self._loop, self._imported, operation, outcome)

    def _imported(self, operation: _Operation, outcome: "Future[Stored]") -> None:
        if operation.stopped.is_set():
            return
        error = outcome.exception()
        if error is not None:
            assert isinstance(error, MeshError), error
            self._break(operation, error)
            return
        stored = outcome.result()

        def progress(phase: str, share: float) -> None:
            if operation.stopped.is_set():
                raise Cancelled(f"the import of {operation.source} was stopped")
            self._tell(operation, phase, share)

        def call() -> ImportFinished:
            self._engine.prepare(stored.info, stored.path, progress)
            return ImportFinished(
                operation_id=operation.operation_id,
                model=stored.info,
                footprint=self._engine.footprint(stored.info),
                text=self._read_assets(stored.path),
            )

        def done(result: ImportFinished | MeshError) -> NodeEvent | None:
            if operation.stopped.is_set():
                return None
            if isinstance(result, MeshError):
                self._break(operation, result)
                return None
            del self._operations[operation.operation_id]
            return result

        self._lanes.run(Lane.LOADING, call, done)

    def _break(self, operation: _Operation, error: MeshError) -> None:
        """Every import that was started ends with exactly one event; this is the bad one."""
        del self._operations[operation.operation_id]
        self._lanes.post_soon(
            ImportBroke(
                operation_id=operation.operation_id,
                error=type(error).__name__,
                message=error.message,
                hint=error.hint,
            )
        )
