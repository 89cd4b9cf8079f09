"""Unpacks a fetched tar archive of a model's folder.

Only plain files and folders are taken out, none of them outside of the target, and only where all
of them fit on the disk. http_download and s3_download come before it, model_plan after.
"""

import gzip
import lzma
import shutil
import tarfile
import zlib
from pathlib import Path

from mesh.domain.errors import TornModel, UnsupportedModel
from mesh.runtime.engine import Progress
from mesh_loader.disk import require_free

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
