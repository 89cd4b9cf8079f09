"""The blobs of a node's store: found by key, kept by a rename, the least recently used dropped.

`blob_maker` puts blobs here from a process of its own, `compilation` takes them. Several nodes may
share a folder. Nothing in it is needed: what is damaged or gone costs a load its compile.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mesh_loader import locks
from mesh_nodes.engines.openvino.prepared import Layout
from mesh_nodes.engines.openvino.shape_blob import BoundBlob

BLOBS_MAX = 64
BLOBS_BYTES_MAX = 1 << 30
"""A blob takes a megabyte and its rope tables: 8 bytes for each token of the context limit and
element of a head."""
_SUFFIX = ".blob"
_SCRATCH = ".making-"

log = logging.getLogger(__name__)


class BlobFolder:
    """Methods may be called from any thread and any number of processes."""

    def __init__(self, path: Path) -> None:
        """The folder is made with the first blob."""
        self.path = path

    def bind(self, key: str, layout: Layout) -> BoundBlob | None:
        """This blob with the weights of the layout; None when there is none, or no sound one, or
        none that may be mapped now.
        """
        path = self._path(key)
        try:
            bound = BoundBlob(path, key, layout)
            os.utime(path)
        except (FileNotFoundError, BlockingIOError):
            # The latter: the weights or the blob are open for writing somewhere.
            return None
        except (OSError, ValueError) as error:
            self.drop(key, str(error))
            return None
        return bound

    def has(self, key: str) -> bool:
        """Whether there is one of this key, sound or not."""
        return self._path(key).exists()

    def keys(self) -> frozenset[str]:
        """The keys of all blobs, sound or not."""
        return frozenset(path.stem for path in self.path.glob(f"*{_SUFFIX}"))

    def drop(self, key: str, why: str) -> None:
        """Take a blob out. It is made anew after the next load that wants it."""
        path = self._path(key)
        log.warning("the blob %s is dropped, its models are compiled: %s", path, why)
        with suppress(OSError):
            path.unlink()

    def keep(self, key: str, written: Path) -> None:
        """Put in a blob that lies in a scratch folder, whole or not at all. Raises OSError."""
        written.rename(self._path(key))
        self._make_room(key)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder beside the blobs for the block. Raises OSError."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._sweep()
        scratch = tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=self.path)
        with scratch as folder, locks.locked_if_free(Path(folder)):
            yield Path(folder)

    def _make_room(self, kept: str) -> None:
        """Within both bounds, the latest used first; what was just put in stays."""
        found = []
        for path in self.path.glob(f"*{_SUFFIX}"):
            with suppress(FileNotFoundError):
                state = path.stat()
                found.append((path.stem == kept, state.st_mtime, state.st_size, path))
        left_bytes = BLOBS_BYTES_MAX
        for place, (is_kept, _, size_bytes, path) in enumerate(sorted(found, reverse=True)):
            left_bytes -= size_bytes
            if not is_kept and (place >= BLOBS_MAX or left_bytes < 0):
                path.unlink(missing_ok=True)

    def _sweep(self) -> None:
        for folder in self.path.glob(f"{_SCRATCH}*"):
            with suppress(OSError):
                if locks.abandoned(folder):
                    shutil.rmtree(folder, ignore_errors=True)

    def _path(self, key: str) -> Path:
        return self.path / f"{key}{_SUFFIX}"
