"""Which model a source was imported as: one small file a source, replaced atomically.

An entry holds until the source's own files change. Where they are gone altogether, as a deleted
download or an uninstalled package, the import stands: it was made once.
"""

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from mesh.domain.ids import ModelId
from mesh_loader.model_files import LAYOUT_VERSION, FileStamp
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
            stamps = [FileStamp(**stamp) for stamp in entry["files"]]
            model_id = ModelId(str(entry["model_id"]))
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return model_id if _still_so(stamps) else None

    def record(self, source: str, model_id: ModelId, stamps: tuple[FileStamp, ...]) -> None:
        """Remembers the import; call it with the source's lock held."""
        entry = {
            "source": source,
            "layout": LAYOUT_VERSION,
            "model_id": model_id,
            "files": [asdict(stamp) for stamp in stamps],
        }
        path = self._path(source)
        temporary = path.with_suffix(".new")
        write_synced(temporary, json.dumps(entry, indent=2).encode())
        os.replace(temporary, path)

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


def _still_so(stamps: list[FileStamp]) -> bool:
    states: list[FileStamp | None] = []
    for stamp in stamps:
        try:
            state = os.stat(stamp.path)
        except OSError:
            states.append(None)
        else:
            states.append(
                FileStamp(path=stamp.path, size_bytes=state.st_size, modified_ns=state.st_mtime_ns)
            )
    gone = all(state is None for state in states)
    return gone or states == stamps
