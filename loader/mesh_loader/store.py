"""The model store: a folder in which every model lies once, whole, under its content's hash.

An import is staged in `staging/` and published by one rename into `models/<model id>/`, so a model
is there completely or not at all, whatever kills the import. Owns the folder's layout, its locks
and the index from sources to models. Callers: `mesh pull`, and on nodes the import child process.
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mesh.domain.errors import NotFound, StorageError, TornModel, Unavailable, UnsupportedModel
from mesh.domain.ids import ModelId
from mesh.domain.model import ModelInfo, WeightPrecision
from mesh.domain.values import dataclass
from mesh.runtime.engine import Progress
from mesh_loader import locks
from mesh_loader.digests import write_index
from mesh_loader.disk import storage_error, writing
from mesh_loader.download_rate import DownloadRate
from mesh_loader.fetching import fetch
from mesh_loader.links import require_contained
from mesh_loader.model_files import content_id, files_of, stamps_of
from mesh_loader.model_info import check_quantised, from_json, info_of_folder, read_json, to_json
from mesh_loader.reach import NOWHERE_PRIVATE, Reach
from mesh_loader.safetensors_file import sync_folder, write_json
from mesh_loader.source_index import SourceIndex, source_key
from mesh_loader.sources import REMOTE, check_source

if TYPE_CHECKING:
    from mesh_loader.model_plan import Plan

IMPORT_WAIT_S = 3600.0
"""How long an import waits for another one of the same source."""
DOWNLOAD_KEPT_S = 7 * 86400.0
"""What has arrived of a download that nobody has gone on with since."""
PUBLISH_WAIT_S = 60.0
"""How long a rename or removal waits for another one; each takes milliseconds."""

_MODEL_ID = re.compile(r"sha256-[0-9a-f]{16}")
_REMOVED = "removed."


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A model in the store: its folder, and what it is."""

    path: Path
    info: ModelInfo


def silent(phase: str, share: float) -> None:
    """Progress that nobody watches."""


class ModelStore:
    """The store under one folder, which is created by the first import.

    Methods may be called from any thread, and any number of processes may use one folder.
    """

    def __init__(
        self,
        root: Path,
        *,
        download_bytes_per_s: float | None = None,
        as_is: Collection[str] = (),
        plain: bool = False,
        reach: Reach = NOWHERE_PRIVATE,
    ) -> None:
        """`download_bytes_per_s` bounds all downloads together of those that give it. `as_is`: what
        an import may take without mesh's knowing it; `plain`: it takes no quantised checkpoints;
        see `plan_hf`. `reach`: where downloads may go.
        """
        self._root = root
        self._reach = reach
        self._as_is = as_is
        self._plain = plain
        self._downloads = root / "downloads"
        self._rate = DownloadRate(root / "locks" / "download-rate", download_bytes_per_s)
        self._models = root / "models"
        self._staging = root / "staging"
        self._locks = root / "locks"
        self._index = SourceIndex(root / "sources")

    def import_model(
        self, source: str, progress: Progress = silent, *, weights: WeightPrecision | None = None
    ) -> StoredModel:
        """The model of a source, imported now unless it is in the store already. One that cannot
        be held in `weights` is not fetched, where that shows before.

        `progress` is told phases and the share of each that is done; what it raises stops the
        import. Raises UnknownSource, InvalidInput, NotFound, Unavailable, TornModel,
        UnsupportedModel or StorageError; the store then is as it was.
        """
        check_source(source)
        stored = self.find(source)
        if stored is not None:
            return stored
        with writing(self._root, source):
            self._create_folders()
            key = source_key(source)
            with self._locked(key, IMPORT_WAIT_S, lambda: progress("wait for another import", 0.0)):
                stored = self.find(source)  # the one that was waited for may have imported it
                if stored is not None:
                    return stored
                self._sweep()
                with self._staged(key) as folder:
                    return self._import(source, folder, progress, weights)

    def find(self, source: str) -> StoredModel | None:
        """The model that a source was imported as, None if it was not or its files changed."""
        model_id = self._index.lookup(source)
        return None if model_id is None else self.get(model_id)

    def get(self, model_id: str) -> StoredModel | None:
        """A model by its id, None where the store does not hold it.

        Raises StorageError where its folder was tampered with.
        """
        folder = self._models / model_id
        if not _MODEL_ID.fullmatch(model_id) or not folder.is_dir():
            return None
        try:
            return StoredModel(path=folder, info=from_json(read_json(folder / "model.json")))
        except (TornModel, StorageError) as error:
            raise StorageError(
                f"the stored model {model_id} is damaged: {error.message}",
                hint=f"remove {folder} and import it again",
            ) from error

    def models(self) -> list[StoredModel]:
        """Every model in the store that is not damaged, by id. Raises StorageError where the folder
        is unreadable.
        """
        found = (self._got(folder.name) for folder in self.folders())
        return [stored for stored in found if isinstance(stored, StoredModel)]

    def damaged(self) -> list[StorageError]:
        """What is to be said of each model that is not among `models`. Raises likewise."""
        found = (self._got(folder.name) for folder in self.folders())
        return [error for error in found if isinstance(error, StorageError)]

    def _got(self, model_id: str) -> StoredModel | StorageError | None:
        try:
            return self.get(model_id)
        except StorageError as error:
            return error

    def folders(self) -> list[Path]:
        """The folders of all models, named by their ids, in that order. Raises StorageError
        likewise.
        """
        try:
            return sorted(path for path in self._models.iterdir() if _MODEL_ID.fullmatch(path.name))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise storage_error(error, self._root, "the list of models") from error

    def remove(self, model_id: str) -> None:
        """Takes a model out of the store, with what engines prepared beside it.

        Raises NotFound where it is not there, Unavailable where a node loads it or has it loaded.
        """
        folder = self._models / model_id
        if not _MODEL_ID.fullmatch(model_id) or not folder.is_dir():
            raise NotFound(f"the store {self._root} holds no model {model_id}")
        with writing(self._root, f"the removal of {model_id}"):
            grave = self._staging / f"{_REMOVED}{model_id}.{os.getpid()}"
            self._create_folders()
            publishing = self._locked("publish", PUBLISH_WAIT_S, lambda: None)
            with publishing, self.unused(model_id) as free:
                if not free:
                    raise Unavailable(
                        f"{model_id} is in use by a node of this machine",
                        hint="remove it when its deployments are deleted and its instances gone",
                    )
                self._index.forget(ModelId(model_id))
                # Renamed first: a half-removed model must never be taken for a whole one.
                os.rename(folder, grave)
            shutil.rmtree(grave, ignore_errors=True)

    @property
    def root(self) -> Path:
        return self._root

    @contextmanager
    def unused(self, model_id: str) -> Iterator[bool]:
        """Whether no node of this machine uses the model; within the block none begins to."""
        path = locks.model_lock(self._root, model_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        with locks.locked_if_free(path) as free:
            yield free

    def _create_folders(self) -> None:
        for folder in (self._models, self._staging, self._locks, self._root / "sources"):
            folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def _locked(self, name: str, wait_s: float, on_wait: Callable[[], None]) -> Iterator[None]:
        with locks.locked(self._locks / f"{name}.lock", wait_s=wait_s, on_wait=on_wait):
            yield

    @contextmanager
    def _staged(self, key: str) -> Iterator[Path]:
        """An empty staging folder, gone after the block; the source's lock is held."""
        folder = self._staging / key
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _sweep(self) -> None:
        for folder in (*self.torn(), *self.begun_downloads(older_than_s=DOWNLOAD_KEPT_S)):
            shutil.rmtree(folder, ignore_errors=True)

    def begun_downloads(self, *, older_than_s: float = 0.0) -> Iterator[Path]:
        """What imports that ended early have fetched, and the next one of the source would go on
        with; locked as those of `torn` are.
        """
        for folder in sorted(self._downloads.glob("*")):
            with (
                locks.locked_if_free(self._locks / f"{folder.name}.lock") as free,
                suppress(OSError),
            ):
                if free and time.time() - folder.stat().st_mtime >= older_than_s:
                    yield folder

    def torn(self) -> Iterator[Path]:
        """What killed imports and removals left in staging: folders whose lock is free. Each is
        locked until the next is asked for: an import that begins in it meanwhile waits.
        """
        for folder in sorted(self._staging.glob("*")):
            if folder.name.startswith(_REMOVED):
                yield folder
                continue
            with locks.locked_if_free(self._locks / f"{folder.name}.lock") as stale:
                if stale:
                    yield folder

    def _import(
        self, source: str, folder: Path, progress: Progress, weights: WeightPrecision | None
    ) -> StoredModel:
        staged, downloads = folder / "model", folder / "download"
        if source.startswith(REMOTE):  # what has arrived outlives this import
            downloads = self._downloads / folder.name
        downloads.mkdir(parents=True, exist_ok=True)
        os.utime(downloads)  # what is gone on with is kept anew (DOWNLOAD_KEPT_S)
        staged.mkdir()
        try:
            return self._fetched(source, downloads, staged, progress, weights)
        except (TornModel, UnsupportedModel):
            # No import can be made of it: the next shall fetch what the source has then.
            shutil.rmtree(downloads, ignore_errors=True)
            raise

    def _fetched(
        self,
        source: str,
        downloads: Path,
        staged: Path,
        progress: Progress,
        weights: WeightPrecision | None,
    ) -> StoredModel:
        # Only here: a node has its imports made by a child, and starts without what makes them.
        from mesh_loader.model_plan import plan_import

        look = partial(check_quantised, plain=True) if self._plain else None
        path = fetch(source, downloads, progress, self._rate, self._reach, look, weights)
        entries, before = require_contained(path), stamps_of(path)
        # Nobody writes to these again; to a user's own, anybody may.
        own_files = source.startswith(("hf://", *REMOTE))
        plan = plan_import(path, own_files=own_files, as_is=self._as_is, plain=self._plain)
        model_id = content_id(files_of(path), progress)
        stored = self.get(model_id)
        if stored is None:
            self._write(plan, source, model_id, staged, progress)
            # Its own files may have got a second name, in the store.
            swapped = require_contained(path) != entries and not own_files
            if swapped or stamps_of(path) != before:
                raise TornModel(
                    f"{path.name} changed while it was imported",
                    hint="import it again when nothing writes to it",
                )
            stored = self._publish(staged, model_id)
        lasting = not path.is_relative_to(downloads)
        self._index.record(source, model_id, path if lasting else None, before if lasting else ())
        shutil.rmtree(downloads, ignore_errors=True)
        progress("done", 1.0)
        return stored

    def _write(
        self, plan: "Plan", source: str, model_id: ModelId, staged: Path, progress: Progress
    ) -> ModelInfo:
        parameters = plan.write(staged, progress)
        info = info_of_folder(
            staged, model_id=model_id, source=source, form=plan.form, parameters=parameters
        )
        write_json(staged / "model.json", to_json(info))
        progress("write digests", 0.0)
        write_index(staged)
        progress("write digests", 1.0)
        return info

    def _publish(self, staged: Path, model_id: ModelId) -> StoredModel:
        target = self._models / model_id
        with self._locked("publish", PUBLISH_WAIT_S, lambda: None):
            if not target.is_dir():  # another source with the same content may have come first
                sync_folder(staged)
                os.rename(staged, target)
                sync_folder(self._models)
        stored = self.get(model_id)
        if stored is None:
            raise StorageError(f"model {model_id} was removed as soon as it was imported")
        return stored
