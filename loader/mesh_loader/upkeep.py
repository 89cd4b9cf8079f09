"""What a store holds beyond need, and what of it is damaged: for `mesh store gc` and `verify`.

Decides what nobody uses: remains of killed processes, compiled shapes of which no model is there,
and, when asked, original weights that prepared ones stand for. Takes no model: that is
`ModelStore.remove`. Any number of imports, loads and removals may go on meanwhile.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mesh.domain.errors import MeshError
from mesh.domain.model import ModelFormat
from mesh.domain.values import dataclass
from mesh_loader import locks
from mesh_loader.digests import INDEX, WEIGHTS_SUFFIXES, Damage, damages, note_removed
from mesh_loader.disk import tree_bytes, writing
from mesh_loader.prepared_key import is_current
from mesh_loader.store import ModelStore, StoredModel

_PREFACE_BYTES = 4096
"""The first line of a compiled shape fits into this: JSON with its digest and the size of the
weights it takes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A file or folder that gc has taken."""

    path: Path
    why: str
    size_bytes: int


def stored_damages(store: ModelStore) -> Iterator[Damage]:
    """Reads all that is in the store, and names each file that is not what was written."""
    for folder in _models(store):
        try:
            store.get(folder.name)
        except MeshError as error:
            yield Damage(path=folder / "model.json", what=error.message)
        yield from damages(folder)
        for prepared in _prepared(folder):
            yield from damages(prepared)
    for path in _blobs(store):
        what = _blob_damage(path)
        if what:
            yield Damage(path=path, what=what)


def collect(store: ModelStore, *, originals: bool) -> Iterator[Leftover]:
    """Removes, and tells what it has removed. `originals`: also weights of which the prepared ones
    are there and whole; no engine but the one that prepared them can load such a model.

    Raises StorageError where the store cannot be written.
    """
    with writing(store.root, "the removal of what nobody uses"):
        for path in store.torn():
            yield _leftover(path, "an import or a removal was killed")
        for path in store.begun_downloads():
            yield _leftover(path, "a download that nobody has gone on with")
        scratch = [
            *store.root.glob("models/*/prepared/.*"),
            *store.root.glob("compiled/.making-*"),
        ]
        for path in scratch:
            if locks.abandoned(path):
                yield _leftover(path, "its maker was killed")
        yield from _collect_blobs(store)
        if originals:
            for stored in store.models():
                yield from _collect_originals(store, stored)


def _collect_blobs(store: ModelStore) -> Iterator[Leftover]:
    sizes = {
        path.stat().st_size
        for folder in _models(store)
        for prepared in _prepared(folder)
        for path in prepared.glob("*.bin")
    }
    for path in _blobs(store):
        with suppress(FileNotFoundError):
            try:
                wanted = _preface(path).get("weights_bytes")
            except ValueError:
                wanted = None
            if wanted not in sizes:
                yield _leftover(path, "no model of its shape is stored")


def _collect_originals(store: ModelStore, stored: StoredModel) -> Iterator[Leftover]:
    folder = stored.path
    weights = sorted(path for path in folder.iterdir() if path.name.endswith(WEIGHTS_SUFFIXES))
    if stored.info.format is not ModelFormat.SAFETENSORS or not weights:
        return
    read = [path for path in _prepared(folder) if is_current(path.name)]
    if not (folder / INDEX).exists() or not any(_whole(path) for path in read):
        return
    with store.unused(stored.info.model_id) as free:
        if not free:
            return
        # First: from now on nobody expects them.
        note_removed(folder, [path.name for path in weights])
        for path in weights:
            yield _leftover(path, "prepared weights stand for it")


def _whole(prepared: Path) -> bool:
    return next(damages(prepared), None) is None


def _models(store: ModelStore) -> list[Path]:
    return sorted(path for path in store.root.glob("models/*") if path.is_dir())


def _prepared(folder: Path) -> list[Path]:
    return sorted(folder.glob("prepared/[!.]*"))


def _blobs(store: ModelStore) -> list[Path]:
    return sorted(store.root.glob("compiled/*.blob"))


def _preface(path: Path) -> dict[str, object]:
    """Raises OSError, or ValueError where it is none."""
    with path.open("rb") as file:
        preface = json.loads(file.read(_PREFACE_BYTES))
    if not isinstance(preface, dict):
        raise ValueError("its first page is no object")
    return preface


def _blob_damage(path: Path) -> str:
    try:
        preface = _preface(path)
        with path.open("rb") as file:
            file.seek(_PREFACE_BYTES)
            whole = hashlib.file_digest(file, "sha256").hexdigest() == preface.get("sha256")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        return f"its first page cannot be read: {error}"
    written = preface.pop("preface_sha256", None)
    if written != hashlib.sha256(json.dumps(preface).encode()).hexdigest():
        return "its first page is not what was written"
    return "" if whole else "its content is not what was written"


def _leftover(path: Path, why: str) -> Leftover:
    if path.is_dir():
        size_bytes = tree_bytes(path)
        shutil.rmtree(path, ignore_errors=True)
    else:
        size_bytes = path.stat().st_size
        path.unlink(missing_ok=True)
    return Leftover(path=path, why=why, size_bytes=size_bytes)
