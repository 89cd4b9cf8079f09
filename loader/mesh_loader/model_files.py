"""The files of a model at its source: which they are, whether they changed, and their hash.

The store takes stamps (size and time) before and after an import, so that a file that changes
meanwhile is noticed, and names the model after the hash of these files' content.
"""

import hashlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from mesh.domain.errors import StorageError, TornModel
from mesh.domain.ids import ModelId
from mesh.domain.values import dataclass
from mesh.runtime.engine import Progress

FOLDER_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".xml", ".bin", ".gguf")
"""What of a folder can matter to a model; a README may change without making another model."""
WANTED_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer*")
"""What is fetched of a model's folder somewhere else."""
TEMPLATES = "additional_chat_templates"
"""The folder in which transformers writes chat templates with names, a file each."""
MODULE_CONFIGS = "[0-9]_*/config.json"
"""The configurations of what sentence-transformers puts after a model."""
FOLDER_FILES_MAX = 4096
SMALL_SUFFIXES = (".json", ".jinja", ".txt", ".model")
SMALL_BYTES_MAX = 256 << 20
"""The longest file that holds no weights; the largest in use take some 35 MB."""
SPARSE_BYTES_LEAST = 1 << 30
SPARSE_SHARE_MAX = 15 / 16
"""A longer file of which more is holes is refused: reading its zeros would take hours."""
HOLES_MAX = 4096
"""So many are counted."""
LAYOUT_VERSION = 3
"""Part of every model id: raised when an importer comes to write other files from the same source,
so that models imported earlier are imported anew."""
HASH_PIECE_BYTES = 1 << 20
MODEL_ID_DIGITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStamp:
    """A file as it was: where, how long, and when last written."""

    path: str
    size_bytes: int
    modified_ns: int


_POINTER = b"version https://git-lfs.github.com/spec/"
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def opened(path: Path) -> BinaryIO:
    """A file of a model, to be read. Never waits, as opening a named pipe would.

    Raises TornModel for what is no plain file, OSError where it cannot be opened.
    """
    require_plain(path, path.stat().st_mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        require_plain(path, os.fstat(descriptor).st_mode)  # what was looked at may have gone
    except TornModel:
        os.close(descriptor)
        raise
    return open(descriptor, "rb")


def require_plain(path: Path, mode: int) -> None:
    """Raises TornModel."""
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no plain file")
        raise TornModel(f"{path.name} is {kind}", hint="put the file itself in its place")


def files_of(path: Path) -> list[Path]:
    """The file itself, or the files of a folder that an import may read, sorted by name.

    Raises TornModel for what is no plain file, or a link to nothing.
    """
    try:
        if not path.is_dir():
            return [path]
        files = [
            file
            for file in (
                *sorted(path.iterdir()),
                *sorted((path / TEMPLATES).glob("*.jinja")),
                *sorted(path.glob(MODULE_CONFIGS)),
            )
            if file.suffix in FOLDER_SUFFIXES and not file.is_dir()
        ]
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    if len(files) > FOLDER_FILES_MAX:
        raise TornModel(f"{path} holds {len(files)} files, more than {FOLDER_FILES_MAX}")
    for file in files:
        try:
            require_plain(file, file.stat().st_mode)
        except FileNotFoundError:
            raise TornModel(
                f"{file.name} is a link to a file that is not there", hint="fetch the folder again"
            ) from None
        except OSError as error:
            raise StorageError(f"{file} cannot be read: {error.strerror}") from error
    return files


def check_fetched(path: Path) -> None:
    """Raises TornModel for files in whose place Git has left pointers, for files that are too long
    or hardly hold anything, and what `files_of` does.
    """
    for file in files_of(path):
        with opened(file) as content:
            pointer = content.read(len(_POINTER)) == _POINTER
            _check_length(content, file)
        if pointer:
            raise TornModel(
                f"{file.name} is a pointer of Git LFS, in the place of the file itself",
                hint=f"run git lfs pull in {file.parent}",
            )


def _check_length(content: BinaryIO, file: Path) -> None:
    """Raises TornModel. All files of a folder are hashed, whether a model needs them or not."""
    size_bytes = os.fstat(content.fileno()).st_size
    if file.suffix in SMALL_SUFFIXES and size_bytes > SMALL_BYTES_MAX:
        raise TornModel(
            f"{file.name} holds {size_bytes} bytes; such a file may have {SMALL_BYTES_MAX}"
        )
    if size_bytes < SPARSE_BYTES_LEAST:
        return
    holes_bytes = end = 0
    for _ in range(HOLES_MAX):
        begin = os.lseek(content.fileno(), end, os.SEEK_HOLE)
        if begin == size_bytes:
            break
        try:
            end = os.lseek(content.fileno(), begin, os.SEEK_DATA)
        except OSError:  # a hole reaches the end
            end = size_bytes
        holes_bytes += end - begin
        if end == size_bytes:
            break
    else:  # what was not looked at counts as never written
        holes_bytes += size_bytes - end
    if holes_bytes > SPARSE_SHARE_MAX * size_bytes:
        raise TornModel(
            f"{file.name} is {size_bytes} bytes long, of which {holes_bytes} were never written",
            hint="fetch the file again, or take it out of the folder",
        )


def stamps_of(path: Path) -> tuple[FileStamp, ...]:
    """Stamps of `files_of(path)`."""
    stamps = []
    for file in files_of(path):
        try:
            state = file.stat()
        except OSError as error:
            raise StorageError(f"{file} cannot be read: {error.strerror}") from error
        stamps.append(
            FileStamp(path=str(file), size_bytes=state.st_size, modified_ns=state.st_mtime_ns)
        )
    return tuple(stamps)


def content_id(files: Sequence[Path], progress: Progress) -> ModelId:
    """The model's id: SHA-256 over names, sizes and bytes of the files, in the order given.

    A single file counts without its name, so the same GGUF under two names is one model.
    """
    total_bytes = max(1, sum(file.stat().st_size for file in files))
    done_bytes = 0
    digest = hashlib.sha256(f"mesh model layout {LAYOUT_VERSION}\n".encode())
    for file in files:
        name = file.name if len(files) > 1 else ""
        digest.update(f"{name}\0{file.stat().st_size}\n".encode())
        with opened(file) as content:
            while piece := content.read(HASH_PIECE_BYTES):
                digest.update(piece)
                done_bytes += len(piece)
                progress("hash", min(1.0, done_bytes / total_bytes))
    return ModelId(f"sha256-{digest.hexdigest()[:MODEL_ID_DIGITS]}")
