"""Which model a source was imported as: one small file a source, replaced atomically.

An entry holds until the source's own files change. Where they are gone altogether, as a deleted
download or an uninstalled package, the import stands: it was made once.
"""

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from mesh.domain.errors import StorageError, TornModel
from mesh.domain.ids import ModelId
from mesh_loader.model_files import LAYOUT_VERSION, FileStamp, stamps_of
from mesh_loader.safetensors_file import write_synced

KEY_DIGITS = 24


def source_key(source: str) -> str:
    """A file name for a source."""
    return hashlib.sha256(source.encode("utf-8", "surrogateescape")).hexdigest()[:KEY_DIGITS]


class SourceIndex:
    """The entries under one folder. A damaged entry counts as none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def lookup(self, source: str) -> ModelId | None:
        """The model that the source was imported as, None if never or if its files changed."""
        try:
            entry = json.loads(self._path(source).read_bytes())
            if entry["source"] != source or entry["layout"] != LAYOUT_VERSION:
                return None
            path = None if entry["path"] is None else Path(entry["path"])
            stamps = tuple(FileStamp(**stamp) for stamp in entry["files"])
            model_id = ModelId(str(entry["model_id"]))
        except (OSError, ValueError, TypeError, KeyError):
            return None
        unchanged = path is None or not os.path.exists(path) or _stamps_now(path) == stamps
        return model_id if unchanged else None

    def record(
        self, source: str, model_id: ModelId, path: Path | None, stamps: tuple[FileStamp, ...]
    ) -> None:
        """Remembers the import; call it with the source's lock held.

        `path` is the file or folder that `stamps` are of, None for a download that is gone.
        """
        entry = {
            "source": source,
            "layout": LAYOUT_VERSION,
            "model_id": model_id,
            "path": None if path is None else str(path),
            "files": [asdict(stamp) for stamp in stamps],
        }
        target = self._path(source)
        temporary = target.with_suffix(".new")
        write_synced(temporary, json.dumps(entry, indent=2).encode())
        os.replace(temporary, target)

    def forget(self, model_id: ModelId) -> None:
        """Drops every entry of a model."""
        for path in sorted(self._folder.glob("*.json")):
            try:
                if json.loads(path.read_bytes()).get("model_id") == model_id:
                    path.unlink(missing_ok=True)
            except (OSError, ValueError, AttributeError):
                continue

    def _path(self, source: str) -> Path:
        return self._folder / f"{source_key(source)}.json"


def _stamps_now(path: Path) -> tuple[FileStamp, ...] | None:
    """None where the files cannot be looked at: the import will say why."""
    try:
        return stamps_of(path)
    except (StorageError, TornModel):
        return None
