"""What was fetched before anybody called for it: an import under way on a node, and how it went.

`NodePrefetches` is one node's, `PrefetchCounts` the cell's. `instances.prefetching` decides what is
fetched; loads for callers say whether they found it. Owned by the controller core, like all
entries.
"""

from dataclasses import field

from mesh.domain.ids import ModelId, OperationId
from mesh.domain.limits import forget_oldest
from mesh.domain.values import dataclass, replace
from mesh.domain.views import PrefetchView

ATTEMPTS_MAX = 2
"""Failed prefetches of a model on a node, since it joined, after which it waits for its caller."""
MODELS_MAX = 1024
"""The models of which a node's imports, or failures, are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportAhead:
    """An import that nobody waits for."""

    operation_id: OperationId
    model_id: ModelId
    begun_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class NodePrefetches:
    importing: ImportAhead | None = None
    _imported: dict[ModelId, None] = field(default_factory=dict)
    """The models that were imported ahead of any call, and that no load has taken yet."""
    _failures: dict[ModelId, int] = field(default_factory=dict)

    def may_try(self, model_id: ModelId) -> bool:
        return self._failures.get(model_id, 0) < ATTEMPTS_MAX

    def begin(self, importing: ImportAhead) -> None:
        self.importing = importing

    def end(self, *, stored: bool) -> None:
        """The import has come to its end, well or not."""
        importing, self.importing = self.importing, None
        if importing is None:
            return
        if stored:
            self._imported[importing.model_id] = None
            forget_oldest(self._imported, MODELS_MAX)
        else:
            self.note_failed(importing.model_id)

    def cancel(self) -> None:
        """The import is stopped for the sake of a load; it may be begun again."""
        self.importing = None

    def note_failed(self, model_id: ModelId) -> None:
        self._failures[model_id] = self._failures.get(model_id, 0) + 1
        forget_oldest(self._failures, MODELS_MAX)

    def take(self, model_id: ModelId) -> bool:
        """A load takes the model: whether it would have had to be imported first. An import of it
        that is under way is the load's from now on: no other load and no time limit stops it.
        """
        if self.importing is not None and self.importing.model_id == model_id:
            self.importing = None
            return True
        found = model_id in self._imported
        self._imported.pop(model_id, None)
        return found

    def unused(self) -> int:
        """Imports, under way or over, that no load has taken."""
        return len(self._imported) + int(self.importing is not None)


@dataclass(slots=True, kw_only=True, eq=False)
class PrefetchCounts:
    view: PrefetchView = field(default_factory=PrefetchView)

    def note_begun(self) -> None:
        self.view = replace(self.view, begun=self.view.begun + 1)

    def note_wasted(self, count: int = 1) -> None:
        self.view = replace(self.view, wasted=self.view.wasted + count)

    def note_load(self, *, nearer: bool, felt: bool, needed: bool = True) -> None:
        """A load that a caller needs, or would without the prefetch, unless it is not `needed` by
        any; `felt`: the caller waits for it. `nearer`: it finds a prefetch.
        """
        view = self.view
        self.view = replace(
            view, loads=view.loads + needed, used=view.used + nearer, felt=view.felt + felt
        )
