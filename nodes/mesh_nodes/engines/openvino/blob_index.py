"""Which stored models need no compile: those whose shape has a blob in the node's store.

They are looked through every second or so, and a folder of prepared weights never changes: so keys
are kept. Before: the node, which tells its cell what its loads come from. After: `compilation`, to
which the blob comes when the model is loaded.
"""

from collections.abc import Sequence
from pathlib import Path

from mesh.domain.errors import MeshError
from mesh.domain.ids import ModelId
from mesh.domain.model import WeightPrecision, held_id
from mesh.domain.steps import HeldModel, LoadTier
from mesh_nodes.engines.openvino.architecture import read_architecture
from mesh_nodes.engines.openvino.blob_folder import BlobFolder
from mesh_nodes.engines.openvino.compilation import Compiler
from mesh_nodes.engines.openvino.shape_blob import context_of


class BlobIndex:
    """For one thread at a time."""

    def __init__(self, compiler: Compiler, blobs: BlobFolder) -> None:
        self._compiler = compiler
        self._blobs = blobs
        self._keys: dict[tuple[Path, WeightPrecision | None], dict[int, str]] = {}
        """By the model's folder, how its weights are held, and the context limit, as long as the
        folder is there."""
        self.prepared: dict[Path, None] = {}
        """Folders of prepared weights of what was held when last looked at, in that order."""

    def held(
        self,
        folders: Sequence[Path],
        awaited: frozenset[str] = frozenset(),
        kept: frozenset[Path] = frozenset(),
    ) -> tuple[HeldModel, ...]:
        """The models in these folders, which are named by their ids, in that order. `awaited`: keys
        of blobs that will be there before any load that is begun from now on. `kept`: folders of
        prepared weights in the page cache.
        """
        keys = self._blobs.keys() | awaited
        contexts = sorted({c for c in map(context_of, keys) if c is not None})
        kinds = [(folder, weights) for folder in folders for weights in (None, *WeightPrecision)]
        self._keys = {kind: self._of(*kind, contexts) for kind in kinds}
        found: list[HeldModel] = []
        self.prepared = {}
        for folder, weights in kinds:
            prepared = self._compiler.prepared_folder(folder, weights)
            for context in contexts:
                if self._keys[folder, weights].get(context) in keys:
                    self.prepared[prepared] = None
                    found.append(
                        HeldModel(
                            model_id=held_id(ModelId(folder.name), weights),
                            tier=LoadTier.CACHED if prepared in kept else LoadTier.PREPARED,
                            context_tokens_max=context,
                        )
                    )
        return tuple(found)

    def _of(
        self, folder: Path, weights: WeightPrecision | None, contexts: Sequence[int]
    ) -> dict[int, str]:
        """By context limit; none for a model that is not prepared (yet), or that has no blobs at
        all.
        """
        if not self._compiler.prepared_folder(folder, weights).is_dir():
            return {}
        known = self._keys.get((folder, weights), {})
        missing = [context for context in contexts if context not in known]
        layout = self._compiler.layout(folder, weights) if missing else None
        if layout is None:
            return known
        try:
            architecture = read_architecture(folder)
        except (MeshError, OSError):
            return known
        new = {c: self._compiler.blob_key(architecture, c, layout, weights) for c in missing}
        return {**known, **new}
