"""Brings one remote file onto this disk, through breaks, kills and restarts of either side.

What has arrived lies in a part file, beside it the version that it is a part of (size and ETag):
a later try, of this process or the next, continues it, and begins anew where the server has
another version by now, so that two are never mixed. Owns the retries; http_download and
s3_download say how to open a file at an offset, the store where the parts lie.
"""

import gzip
import json
import lzma
import os
import shutil
import tarfile
import time
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Protocol

from mesh.domain.errors import TornModel, Unavailable, UnsupportedModel
from mesh.domain.units import format_bytes
from mesh.domain.values import dataclass
from mesh.runtime.engine import Progress
from mesh_loader.disk import require_free
from mesh_loader.download_rate import DownloadRate

TRIES_MAX = 6
"""In a row that bring less than TRY_BYTES_MIN more than any before."""
TRY_BYTES_MIN = 1 << 20
CHANGES_MAX = 3
"""A file that changes more often while it is fetched is given up."""
PAUSE_S = 0.5
"""Before the second try; each further one doubles it."""
PAUSE_S_MAX = 30.0
PAUSE_PIECE_S = 0.2
"""A cancellation is noticed within this time."""
PIECE_BYTES = 64 << 10
FREE_CHECK_BYTES = 16 << 20
"""Between two looks at the disk, which others fill as well, this much may be downloaded."""


class Interrupted(Exception):
    """A try that may go better the next time. `after_s`: the server asks for such a pause."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


class Changed(Exception):
    """The server has another version than the part that was to go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """What tells one content of a remote file from another."""

    size_bytes: int | None
    """None where the server does not say."""
    tag: str
    """A strong ETag or a date of change; empty where the server gives none: then no part of it is
    ever continued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A file that is being sent. The content begins at `begin_bytes`: 0 unless a part goes on."""

    version: Version
    begin_bytes: int
    pieces: Iterator[bytes]
    """Raises Interrupted where the connection breaks."""


class RemoteFile(Protocol):
    """A file somewhere else."""

    @property
    def name(self) -> str:
        """For people; holds no secret."""
        ...

    def open(self, begin_bytes: int, part_of: Version | None) -> AbstractContextManager[Opened]:
        """Its content from `begin_bytes` on where it still is `part_of`, else from the start.

        Raises Interrupted where a further try may help, a MeshError where none does.
        """
        ...


def download(remote: RemoteFile, target: Path, rate: DownloadRate, progress: Progress) -> None:
    """Fetches the file to `target`; nothing is done where it lies there already.

    Raises Unavailable after TRIES_MAX vain tries, TornModel where the file keeps changing,
    StorageError where it does not fit on the disk, and what RemoteFile.open and `progress` raise.
    Whatever is raised, what has arrived stays for the next call.
    """
    part = _Part(target)
    vain_tries = changes = best_bytes = 0
    pause_s = PAUSE_S
    while not target.exists():
        try:
            _try(remote, part, rate, progress)
            return
        except Changed:
            part.drop()
            changes, best_bytes = changes + 1, 0
            if changes > CHANGES_MAX:
                raise TornModel(
                    f"{remote.name} changed {changes} times while it was fetched",
                    hint="fetch it again when nothing writes to it",
                ) from None
            continue
        except Interrupted as interrupted:
            reason, after_s = str(interrupted), interrupted.after_s
        if part.size_bytes >= best_bytes + TRY_BYTES_MIN:
            vain_tries, best_bytes, pause_s = 0, part.size_bytes, PAUSE_S
        vain_tries += 1
        if vain_tries >= TRIES_MAX:
            raise Unavailable(
                f"{remote.name} could not be fetched in {vain_tries} tries: {reason}; "
                f"{format_bytes(part.size_bytes)} are kept",
                hint="check the network and try again: what has arrived is not fetched twice",
            )
        _pause(max(pause_s, min(after_s, PAUSE_S_MAX)), reason, part, progress, remote.name)
        pause_s = min(2 * pause_s, PAUSE_S_MAX)


class _Part:
    """The part file and its version, which is on the disk before the first byte is."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.with_name(target.name + ".part")
        self._note = target.with_name(target.name + ".version")

    @property
    def size_bytes(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def version(self) -> Version | None:
        """None where nothing is there that could be continued."""
        try:
            version = Version(**json.loads(self._note.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None
        return version if version.tag and self.size_bytes else None

    def drop(self) -> None:
        self.path.unlink(missing_ok=True)

    def begin(self, version: Version) -> None:
        """An empty part of this version."""
        self.drop()
        self._note.write_text(json.dumps(asdict(version)), encoding="utf-8")

    def finish(self) -> None:
        with self.path.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(self.path, self.target)
        self._note.unlink(missing_ok=True)


def _try(remote: RemoteFile, part: _Part, rate: DownloadRate, progress: Progress) -> None:
    """One try, to the end of the file.

    Raises Interrupted, Changed and what else may come; what has arrived is in the part file.
    """
    known = part.version()
    if known is not None and part.size_bytes == known.size_bytes:
        part.finish()  # an earlier try was killed while the disk took it
        return
    with remote.open(part.size_bytes if known else 0, known) as opened:
        total_bytes, have_bytes = opened.version.size_bytes, opened.begin_bytes
        if known is not None and opened.version != known:
            raise Changed(f"{known} is {opened.version} now")
        if not have_bytes:
            part.begin(opened.version)
        free_checked_bytes = have_bytes - FREE_CHECK_BYTES
        with part.path.open("ab", buffering=0) as file:
            for piece in opened.pieces:
                if have_bytes - free_checked_bytes >= FREE_CHECK_BYTES:
                    free_checked_bytes = have_bytes
                    rest_bytes = (
                        FREE_CHECK_BYTES if total_bytes is None else total_bytes - have_bytes
                    )
                    require_free(part.target.parent, rest_bytes, f"the copy of {remote.name}")
                phase, share = phase_of(remote.name, have_bytes, total_bytes)
                rate.wait(len(piece), partial(progress, phase, share))
                file.write(piece)
                have_bytes += len(piece)
                progress(*phase_of(remote.name, have_bytes, total_bytes))
    if total_bytes is not None and have_bytes != total_bytes:
        if have_bytes > total_bytes:
            part.drop()
        raise Interrupted(f"{have_bytes} of {total_bytes} bytes came")
    part.finish()


def phase_of(name: str, have_bytes: int, total_bytes: int | None) -> tuple[str, float]:
    """What a `Progress` is told of a download."""
    whole = "" if total_bytes is None else f" of {format_bytes(total_bytes)}"
    share = _share(have_bytes, total_bytes)
    return f"download {name}, {format_bytes(have_bytes)}{whole}", share


def _share(have_bytes: int, total_bytes: int | None) -> float:
    return min(1.0, have_bytes / total_bytes) if total_bytes else 0.0


def _pause(seconds: float, reason: str, part: _Part, progress: Progress, name: str) -> None:
    until_s = time.monotonic() + seconds
    version = part.version()
    share = _share(part.size_bytes, version.size_bytes if version else None)
    while (left_s := until_s - time.monotonic()) > 0:
        progress(f"download {name}: {reason}; another try in {seconds:.1f} s", share)
        time.sleep(min(left_s, PAUSE_PIECE_S))


ENTRIES_MAX = 10_000
_PIECE_BYTES = 1 << 20
_CORRUPT = (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError)
_BOTH_FILE_AND_FOLDER = (NotADirectoryError, IsADirectoryError, FileExistsError)


def unpacked(archive: Path, folder: Path, progress: Progress) -> Path:
    """The model's folder in `folder`: of an archive of one folder, that one.

    Raises TornModel for a broken archive, UnsupportedModel for one with links or paths that lead
    elsewhere, StorageError where it does not fit.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    phase = f"unpack {archive.name}"
    try:
        with tarfile.open(archive) as tar:
            entries = _entries(tar, archive.name, folder, progress)
            total_bytes = sum(entry.size for entry in entries)
            done_bytes = 0
            for entry in entries:
                progress(phase, done_bytes / max(1, total_bytes))
                tar.extract(entry, folder, set_attrs=False, filter="data")
                done_bytes += entry.size
    except tarfile.FilterError as error:
        raise UnsupportedModel(f"the archive {archive.name} leads out of its folder") from error
    except (*_CORRUPT, *_BOTH_FILE_AND_FOLDER) as error:
        reason = str(error).partition("\n")[0].rstrip(":")  # below: what each compression says
        raise TornModel(
            f"the archive {archive.name} is corrupt: {reason}",
            hint="compare it with the one at its source: tar -tf",
        ) from error
    progress(phase, 1.0)
    inside = list(folder.iterdir())
    return inside[0] if len(inside) == 1 and inside[0].is_dir() else folder


def _entries(
    tar: tarfile.TarFile, name: str, folder: Path, progress: Progress
) -> list[tarfile.TarInfo]:
    entries, total_bytes = [], 0
    for entry in tar:
        progress(f"list {name}", 0.0)
        total_bytes += entry.size
        # Before what it says it holds is read: of an archive that unfolds without end, that is all.
        require_free(folder, total_bytes, f"the content of {name}")
        if not (entry.isfile() or entry.isdir()):
            raise UnsupportedModel(
                f"the archive {name} holds {entry.name}, which is neither file nor folder",
                hint="pack it without links: tar --dereference --hard-dereference",
            )
        entries.append(entry)
        if len(entries) > ENTRIES_MAX:
            raise UnsupportedModel(f"the archive {name} holds more than {ENTRIES_MAX} entries")
    # A compressed archive has its checksum behind what tar reads.
    while tar.fileobj is not None and tar.fileobj.read(_PIECE_BYTES):
        progress(f"list {name}", 0.0)
    return entries
