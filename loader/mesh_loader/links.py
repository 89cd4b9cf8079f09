"""Symbolic links in the folder of a model: which of them an import follows.

A link may lead to another file of the same folder, and in a snapshot of the Hugging Face cache into
the `blobs` of its own repository, where that cache keeps all content. Any other link would have the
import read, store and serve a file that the folder only points at. `sources` comes before, and
`store` asks before an import reads anything of the folder and again once it has read all.
"""

import os
from contextlib import suppress
from pathlib import Path

from mesh.domain.errors import StorageError, TornModel, UnsupportedModel
from mesh_loader.model_files import FOLDER_FILES_MAX

LEVELS_MAX = 3
"""A model's folder is looked through this deep. Models have their files at the first two levels."""
SNAPSHOTS, _BLOBS = "snapshots", "blobs"
Entry = tuple[str, int, int]
"""A path, its inode, and when that was last changed, in ns."""


def require_contained(folder: Path) -> tuple[Entry, ...]:
    """All entries of the folder. Where they are the same after a while, nothing was put in the
    place of another and taken away again meanwhile, as a link that leads out could be.

    Raises UnsupportedModel, with its name, for a link that leads out of the folder, TornModel
    for a folder of too many files, StorageError where it cannot be read. A single file, which the
    source itself names, may be a link.
    """
    if not folder.is_dir():
        return ()
    try:
        within = _allowed(Path(os.path.realpath(folder)))
        entries, links = _entries(folder)
    except OSError as error:
        raise StorageError(f"{folder} cannot be read: {error.strerror}") from error
    for link in links:
        # A link to itself, or one that leads nowhere, has a path as well; reading it fails later.
        target = Path(os.path.realpath(link))
        if not any(target.is_relative_to(root) for root in within):
            raise UnsupportedModel(
                f"{link.relative_to(folder)} in {folder} is a link that leads out of the folder",
                hint="replace the link with the file itself, or name the folder that has the files",
            )
    return entries


def _allowed(folder: Path) -> tuple[Path, ...]:
    """Where links of a real folder may lead: there and, from a snapshot of the Hugging Face cache,
    into the blobs of the repository (models--ORG--NAME/{snapshots/COMMIT,blobs})."""
    repository = folder.parent.parent
    if folder.parent.name == SNAPSHOTS and repository.name.startswith("models--"):
        blobs = repository / _BLOBS
        # If `blobs` itself is a link, it would lead wherever whoever made it liked.
        return (folder, blobs) if not blobs.is_symlink() else (folder,)
    return (folder,)


def _entries(folder: Path) -> tuple[tuple[Entry, ...], list[Path]]:
    """What is in the folder, and which of it are links, without following them to other folders."""
    found = [_entry(str(folder), os.stat(folder))]
    links, folders = list[Path](), [(folder, 1)]
    while folders:
        current, level = folders.pop()
        with os.scandir(current) as entries:
            for entry in entries:
                if len(found) > FOLDER_FILES_MAX:
                    raise TornModel(f"{folder} holds more than {FOLDER_FILES_MAX} files")
                found.append(_entry(entry.path, entry.stat(follow_symlinks=False)))
                if entry.is_symlink():
                    links.append(Path(entry.path))
                    with suppress(OSError):  # it leads nowhere
                        found.append(_entry(entry.path, entry.stat()))
                elif entry.is_dir() and level < LEVELS_MAX:
                    folders.append((Path(entry.path), level + 1))
    return tuple(sorted(found)), links


def _entry(path: str, state: os.stat_result) -> Entry:
    """Nobody can set the time of the last change of an entry, which a move counts as, too."""
    return path, state.st_ino, state.st_ctime_ns
