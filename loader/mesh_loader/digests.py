"""The digests of a folder's files: written when it is made, checked before its files are used.

Each file has one digest for every 4 MiB, so that damage is named by its place. Owns `digests.json`,
which lies beside the files. The store, and engines for what they derive, write it before the folder
is renamed into place; engines check it before they map or read, `stored_damage` checks it all.
XXH3 finds accidents at the speed of memory; it is no defence against somebody who wants to deceive.
"""

import json
import os
import threading
from collections.abc import Callable, Collection, Iterator
from enum import StrEnum
from itertools import zip_longest
from pathlib import Path
from typing import Any

import xxhash

from mesh.domain.errors import TornModel
from mesh.domain.values import dataclass
from mesh_loader.safetensors_file import write_synced

INDEX = "digests.json"
WEIGHTS_SUFFIXES = (".safetensors", ".ggml")
"""The suffixes of the files that hold a model's original weights."""
CHUNK_BYTES = 4 << 20
CHECKED_MAX = 65_536
"""Files that a process remembers to have checked; beyond it begins anew."""
_VERSION = 1
_REMOVED = "removed"
"""In the place of a file's digests: it was taken out on purpose."""

Stamp = tuple[int, int, int, int, int]
"""Device, inode, size, times of the last change of content and of inode: another file or another
content has another."""


class Verify(StrEnum):
    """When an engine checks the files of a load: the first time that this process meets a file as
    it is now, with every load, or not at all."""

    FIRST = "first"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A file that is not what was written."""

    path: Path
    what: str

    def __str__(self) -> str:
        return f"{self.path} is damaged: {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expected:
    size_bytes: int
    chunks: tuple[str, ...]


def write_index(folder: Path) -> None:
    """Digests of all files that lie in the folder. Raises OSError; what is there is whole."""
    files = {
        path.name: _entry(path)
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != INDEX
    }
    _write(folder, files)


def note_removed(folder: Path, names: Collection[str]) -> None:
    """These files are missed no more. Raises OSError, TornModel where the index is damaged."""
    files = _read(folder)
    if files is not None:
        _write(folder, {name: _REMOVED if name in names else files[name] for name in files})


def require_originals(folder: Path) -> None:
    """Raises TornModel where files of a model's folder were taken out on purpose, or its index is
    damaged."""
    gone = [name for name, entry in (_read(folder) or {}).items() if entry == _REMOVED]
    if gone:
        raise TornModel(
            f"{folder.name} is needed with its original weights, of which {gone[0]} was removed "
            "by `mesh store gc --originals`",
            hint=f"`mesh store rm {folder.name}`, then import its source again",
        )


def damages(folder: Path) -> Iterator[Damage]:
    """Reads all files of a folder, and names what is damaged, missing, or without digest."""
    try:
        files = _read(folder)
    except TornModel as error:
        yield Damage(path=folder / INDEX, what=error.message)
        return
    if files is None:
        yield Damage(path=folder / INDEX, what="it is missing: nothing in this folder is checked")
        return
    for name in files:
        if (damage := _damage(folder / name, files[name], lambda: None)) is not None:
            yield damage


class Verifier:
    """Checks files as often as it was told to. Methods may be called from any thread."""

    def __init__(self, when: Verify = Verify.FIRST) -> None:
        self._when = when
        self._checked = dict[Stamp, None]()
        self._lock = threading.Lock()

    def check(
        self,
        folder: Path,
        *,
        without: tuple[str, ...] = (),
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """All files of a folder, or all that end in none of these; a folder whose maker wrote no
        digests passes, unless every load is checked. `between` is called between any two reads.

        Raises TornModel, with the file and where in it, for the first that is damaged.
        """
        if self._when is Verify.NEVER:
            return
        files = _read(folder)
        if files is None:
            if self._when is Verify.ALWAYS:
                raise TornModel(f"{folder} has no {INDEX}: its files cannot be checked")
            return
        for name, entry in files.items():
            if not name.endswith(without):
                self._check(folder / name, entry, between)

    def _check(self, path: Path, entry: object, between: Callable[[], None]) -> None:
        stamp = _stamp(path)
        if self._when is Verify.FIRST and stamp in self._checked:
            return
        damage = _damage(path, entry, between)
        if damage is not None and _stamp(path) != stamp:
            # It went amid the reading, or was derived anew: what is there now is what counts.
            stamp, damage = _stamp(path), _damage(path, entry, between)
        if damage is not None:
            raise TornModel(str(damage), hint="`mesh store verify` names all that is damaged")
        with self._lock:
            if len(self._checked) >= CHECKED_MAX:
                self._checked.clear()
            # What was written while it was read has another stamp, and is read again.
            if stamp is not None:
                self._checked[stamp] = None


def _read(folder: Path) -> dict[str, Any] | None:
    """The entries by file name; None where the folder has no index."""
    try:
        content = json.loads((folder / INDEX).read_bytes())
        if content["version"] != _VERSION or content["chunk_bytes"] != CHUNK_BYTES:
            raise ValueError("it is of another version")
        files = content["files"]
        if content["self"] != _digest(_canonical(files)):
            raise ValueError("it is not what was written")
        return dict(files)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TornModel(
            f"{folder / INDEX} is damaged: {error}", hint="import the model again"
        ) from error


def _write(folder: Path, files: dict[str, Any]) -> None:
    content = {
        "version": _VERSION,
        "chunk_bytes": CHUNK_BYTES,
        "self": _digest(_canonical(files)),
        "files": files,
    }
    temporary = folder / f"{INDEX}.new"
    write_synced(temporary, _canonical(content))
    os.replace(temporary, folder / INDEX)


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "chunks": list(_chunk_digests(path))}


def _damage(path: Path, entry: object, between: Callable[[], None]) -> Damage | None:
    if entry == _REMOVED:
        return None
    assert isinstance(entry, dict), entry
    expected = _Expected(size_bytes=entry["bytes"], chunks=tuple(entry["chunks"]))
    try:
        size_bytes = path.stat().st_size
        if size_bytes != expected.size_bytes:
            what = f"it has {size_bytes} bytes, {expected.size_bytes} were written"
            return Damage(path=path, what=what)
        for n, (found, written) in enumerate(zip_longest(_chunk_digests(path), expected.chunks)):
            if found != written:
                begin, end = n * CHUNK_BYTES, min((n + 1) * CHUNK_BYTES, size_bytes)
                return Damage(path=path, what=f"bytes {begin} to {end} are not what was written")
            between()
    except OSError as error:
        return Damage(path=path, what=f"it cannot be read: {error.strerror or error}")
    return None


def _chunk_digests(path: Path) -> Iterator[str]:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            while count < CHUNK_BYTES and (more := file.readinto(buffer[count:])):
                count += more
            yield _digest(buffer[:count])


def _digest(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _stamp(path: Path) -> Stamp | None:
    try:
        state = path.stat()
    except OSError:
        return None
    times = state.st_mtime_ns, state.st_ctime_ns
    return state.st_dev, state.st_ino, state.st_size, *times
