"""Has the blobs made that loads of this node have missed, one after the other, beside all else.

A load that had to compile asks; the blob is made in a child process (`blob_making`), so that
neither its memory nor its crash is the node's, and the next load of the shape finds it in the
folder. Owns the queue and its thread, which lives while there is something to make.
"""

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from mesh.domain.errors import Cancelled, StorageError
from mesh.domain.units import format_bytes
from mesh_loader.bounded_child import run_bounded
from mesh_loader.disk import require_free
from mesh_nodes.engines.openvino.blob_folder import BlobFolder
from mesh_nodes.engines.openvino.blob_wish import BlobWish

WISHES_MAX = 16
"""That wait. A shape that finds no place asks again with its next load."""
TRIES_MAX = 2
"""For one shape, until the node is started again."""
MAKE_S_MAX = 600.0
"""Seconds, on a node without load, for a model of a billion parameters; on a busy one far longer,
since the child takes what others leave."""
CHILD_BYTES = 256 << 20
"""What the child takes besides the model's weights."""
_CLOSE_S_MAX = 1.0
_CHILD = "mesh_nodes.engines.openvino.blob_making"

log = logging.getLogger(__name__)


class BlobMaker:
    """Methods may be called from any thread."""

    def __init__(self, available_bytes: Callable[[], int]) -> None:
        self._available_bytes = available_bytes
        self._waiting: deque[tuple[BlobWish, int]] = deque()
        self._tries: dict[str, int] = {}
        """By key: one entry for each shape and context limit that was compiled here."""
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def ask(self, wish: BlobWish, model_bytes: int) -> None:
        """Have the blob made soon, unless it is wished for already or was not to be had.
        `model_bytes`: what the compiled model takes.
        """
        with self._lock:
            waits = any(waiting.key == wish.key for waiting, _ in self._waiting)
            if self._closed.is_set() or waits or len(self._waiting) >= WISHES_MAX:
                return
            if self._tries.get(wish.key, 0) >= TRIES_MAX:
                return
            self._waiting.append((wish, model_bytes))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work_off, name="mesh-blobs", daemon=True
                )
                self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Until nothing is left to make; False when there is after `timeout_s`."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def close(self) -> None:
        """Stop what is being made and forget the rest."""
        self._closed.set()
        self.wait(_CLOSE_S_MAX)

    def _work_off(self) -> None:
        while True:
            with self._lock:
                if self._closed.is_set() or not self._waiting:
                    self._thread = None
                    return
                wish, model_bytes = self._waiting[0]
            try:
                self._make(wish, model_bytes)
            except Cancelled:
                return
            finally:
                with self._lock:
                    self._waiting.popleft()

    def _make(self, wish: BlobWish, model_bytes: int) -> None:
        folder = BlobFolder(Path(wish.folder))
        if folder.has(wish.key):
            return  # by another node of the store, or for an instance that shared this model
        wanted_bytes, available_bytes = model_bytes + CHILD_BYTES, self._available_bytes()
        if wanted_bytes > available_bytes:
            log.info(
                "no blob of shape %s for now: making it takes %s, %s are available",
                *(wish.key, format_bytes(wanted_bytes), format_bytes(available_bytes)),
            )
            return
        self._tries[wish.key] = self._tries.get(wish.key, 0) + 1
        try:
            with folder.scratch() as scratch:
                # OpenVINO exports all of the weights, and the blob takes them out again.
                require_free(scratch, model_bytes, f"the blob of shape {wish.key}")
                ended = run_bounded(
                    [sys.executable, "-m", _CHILD, wish.to_json(), str(scratch)],
                    timeout_s=MAKE_S_MAX,
                    environment={},
                    on_wait=self._go_on,
                )
        except (OSError, StorageError) as error:
            log.warning("no blob of shape %s, its models are compiled: %s", wish.key, error)
            return
        if ended.exit_code == 0:
            log.info("made the blob of shape %s: its next loads need no compile", wish.key)
            return
        reason = "its time was up" if ended.exit_code is None else _last_line(ended.output)
        log.warning("no blob of shape %s, its models are compiled: %s", wish.key, reason)

    def _go_on(self) -> None:
        if self._closed.is_set():
            raise Cancelled("the node stops")


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1] if lines else "it said nothing"
