"""Has the blobs made that loads of this node have missed, one after the other, beside all else.

A load that had to compile asks; the blob is made in a child process (`python -m
mesh_nodes.engines.openvino.blob_maker JOB SCRATCH`), so that neither its memory nor its crash is
the node's, and the next load of the shape finds it in the
folder, or waits for it if that is worth it. Owns the queue, its thread, which lives while there is
something to make, and the child's priority: the least, but a load's while one waits for it.
"""

import gc
import json
import logging
import mmap
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mesh.domain.errors import Cancelled, EngineError, MeshError, StorageError
from mesh.domain.model import WeightPrecision
from mesh.domain.units import format_bytes
from mesh.domain.values import dataclass
from mesh_loader.bounded_child import end_first, run_bounded
from mesh_loader.disk import require_free
from mesh_nodes.engines.openvino.architecture import read_architecture
from mesh_nodes.engines.openvino.blob_folder import BlobFolder
from mesh_nodes.engines.openvino.compilation import CompiledGraph, Compiler
from mesh_nodes.engines.openvino.exported import Bytes, without_weights
from mesh_nodes.engines.openvino.precisions import Precisions
from mesh_nodes.engines.openvino.probe import probe_logits
from mesh_nodes.engines.openvino.shape_blob import BoundBlob


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobJob:
    """The model whose shape is wanted, and how its node compiles."""

    key: str
    folder: str
    model_path: str
    context_tokens_max: int
    threads: int
    weights: WeightPrecision
    precisions: Precisions

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "BlobJob":
        from cattrs import structure  # 30 ms of CPU, which the node itself need not spend

        return structure(json.loads(text), cls)


WISHES_MAX = 16
"""At most so many orders wait. A shape that finds no place asks again with its next load."""
TRIES_MAX = 2
"""For one shape, until the node is started again."""
MAKE_S_MAX = 600.0
"""Seconds, on a node without load, for a model of a billion parameters; on a busy one far longer,
since the child takes what others leave."""
CHILD_BYTES = 256 << 20
"""What the child takes besides the model's weights."""
CHILD_START_S = 1.5
"""The child takes about this long until it compiles: Python imports and the start of OpenVINO's
plugin.
"""
MAKE_COMPILES = 2.0
"""What making takes from there on, over the load that missed the blob: compile, export, checks."""
WAIT_COMPILES_MAX = 3.0
"""The longest that a load waits instead of compiling, in times of its compile. The first that waits
may be later than it would be; those behind it, all of which are imports, are earlier.
"""
WAIT_S_MAX = 60.0
NICE = 19
WAITED_NICE = 5
"""As loads from disk have it. To go back to it the system wants CAP_SYS_NICE; without, a child that
has been begun for nobody stays below all who compute."""
UNWAITED_S = 0.5
"""For a load right behind the one that asked: until then the child has a load's priority."""
_CLOSE_S_MAX = 1.0
_CHILD = "mesh_nodes.engines.openvino.blob_maker"

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Wanted:
    """A job that waits, or is being done."""

    job: BlobJob
    model_bytes: int
    compile_s: float
    begun_s: float | None = None
    pid: int | None = None
    """The process id of the child."""
    waiting_loads: int = 0

    def note_child(self, pid: int) -> None:
        self.pid = pid

    def left_s(self, now_s: float) -> float:
        """Until it is made, if it goes as expected."""
        made_s = CHILD_START_S + MAKE_COMPILES * self.compile_s
        return made_s if self.begun_s is None else max(0.0, self.begun_s + made_s - now_s)

    @property
    def patience_s(self) -> float:
        return min(WAIT_COMPILES_MAX * self.compile_s, WAIT_S_MAX)


class BlobMaker:
    """Methods may be called from any thread."""

    def __init__(self, available_bytes: Callable[[], int]) -> None:
        self._available_bytes = available_bytes
        self._wanted: deque[_Wanted] = deque()
        """The one that is being made first."""
        self._tries: dict[str, int] = {}
        """By key: one entry for each shape and context limit that was compiled here."""
        self._vain = set[str]()
        """Keys that a load has waited for in vain: no other one does."""
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._closed = threading.Event()

    def ask(self, job: BlobJob, model_bytes: int, compile_s: float) -> None:
        """Have the blob made soon, unless it is wished for already or was not to be had.
        `model_bytes`: what the compiled model takes; `compile_s`: what its load took without.
        """
        with self._changed:
            if self._closed.is_set() or len(self._wanted) >= WISHES_MAX:
                return
            if self._of(job.key) is not None or self._tries.get(job.key, 0) >= TRIES_MAX:
                return
            self._wanted.append(_Wanted(job, model_bytes, compile_s))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work_off, name="mesh-blobs", daemon=True
                )
                self._thread.start()

    def wait_for(self, key: str, on_wait: Callable[[], None]) -> bool:
        """Block until a blob that is asked for is made, or could not be. False at once where none
        is, or where it takes too long to wait for; and where it did. `on_wait` is called before.
        """
        with self._changed:
            wanted = self._of(key)
            if wanted is None or key in self._vain:
                return False
            now_s = time.monotonic()
            if wanted.left_s(now_s) > wanted.patience_s:
                return False
            if wanted is not self._wanted[0]:
                self._wanted.remove(wanted)
                self._wanted.insert(1, wanted)
            on_wait()
            wanted.waiting_loads += 1
            over = self._changed.wait_for(
                lambda: wanted not in self._wanted or self._closed.is_set(), wanted.patience_s
            )
            wanted.waiting_loads -= 1
            if not over:
                self._vain.add(key)
                log.warning(
                    "the blob of shape %s was not made within %.1f s: its models are compiled",
                    *(key, wanted.patience_s),
                )
            return over

    def awaited(self) -> frozenset[str]:
        """Keys of blobs that a load waits for: any behind it will find them."""
        with self._changed:
            return frozenset(each.job.key for each in self._wanted if each.waiting_loads)

    def wait(self, timeout_s: float) -> bool:
        """Until nothing is left to make; False when there is after `timeout_s`."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def close(self) -> None:
        """Stop what is being made and forget the rest."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
        self.wait(_CLOSE_S_MAX)

    def _of(self, key: str) -> _Wanted | None:
        return next((each for each in self._wanted if each.job.key == key), None)

    def _work_off(self) -> None:
        while True:
            with self._changed:
                if self._closed.is_set() or not self._wanted:
                    self._thread = None
                    return
                wanted = self._wanted[0]
                wanted.begun_s = time.monotonic()
            try:
                self._make(wanted)
            except Cancelled:
                return
            finally:
                with self._changed:
                    self._wanted.popleft()
                    self._changed.notify_all()

    def _make(self, wanted: _Wanted) -> None:
        job, model_bytes = wanted.job, wanted.model_bytes
        folder = BlobFolder(Path(job.folder))
        if folder.has(job.key):
            return  # by another node of the store, or for an instance that shared this model
        wanted_bytes, available_bytes = model_bytes + CHILD_BYTES, self._available_bytes()
        if wanted_bytes > available_bytes:
            log.info(
                "no blob of shape %s for now: making it takes %s, %s are available",
                *(job.key, format_bytes(wanted_bytes), format_bytes(available_bytes)),
            )
            return
        self._tries[job.key] = self._tries.get(job.key, 0) + 1
        try:
            with folder.scratch() as scratch:
                # OpenVINO exports all of the weights, and the blob takes them out again.
                require_free(scratch, model_bytes, f"the blob of shape {job.key}")
                ended = run_bounded(
                    [sys.executable, "-m", _CHILD, job.to_json(), str(scratch)],
                    timeout_s=MAKE_S_MAX,
                    environment={},
                    on_begin=wanted.note_child,
                    on_wait=partial(self._go_on, wanted),
                )
        except (OSError, StorageError) as error:
            log.warning("no blob of shape %s, its models are compiled: %s", job.key, error)
            return
        if ended.exit_code == 0:
            log.info("made the blob of shape %s: its next loads need no compile", job.key)
            return
        reason = "its time was up" if ended.exit_code is None else _last_line(ended.output)
        log.warning("no blob of shape %s, its models are compiled: %s", job.key, reason)

    def _go_on(self, wanted: _Wanted) -> None:
        if self._closed.is_set():
            raise Cancelled("the node stops")
        assert wanted.begun_s is not None
        assert wanted.pid is not None
        waited = wanted.waiting_loads or time.monotonic() < wanted.begun_s + UNWAITED_S
        _put_below(wanted.pid, WAITED_NICE if waited else NICE)


def _put_below(pid: int, nice: int) -> None:
    """All threads of a process so far below this one's, as far as the system permits it."""
    own = os.getpriority(os.PRIO_PROCESS, os.getpid())
    with suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(thread), own + nice)


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def make_blob(job: BlobJob, scratch: Path) -> None:
    """In the child: compiles a model, lets OpenVINO export it, takes the weights out, and keeps the
    blob if a model imported from it computes the same logits as the compiled one, bit by bit.
    `scratch` is an empty folder beside the blobs. Raises EngineError when there can be no blob;
    other MeshErrors, OSError, RuntimeError or ValueError.
    """
    folder, model_path = BlobFolder(Path(job.folder)), Path(job.model_path)
    compiler = Compiler(threads=job.threads, weights=job.weights, precisions=job.precisions)
    architecture, layout = read_architecture(model_path), compiler.layout(model_path)
    if layout is None:
        raise EngineError(f"{model_path.name} has no prepared weights")
    key = compiler.blob_key(architecture, job.context_tokens_max, layout)
    if key != job.key:
        raise EngineError(f"the shape is {key} here and {job.key} at the node")

    def logits(graph: CompiledGraph) -> npt.NDArray[np.float32]:
        with graph.first_run():
            return probe_logits(
                graph,
                vocabulary_tokens=architecture.vocabulary_tokens,
                context_tokens_max=job.context_tokens_max,
            )

    exports = scratch / "exports"
    exports.mkdir()
    graph, exported = compiler.export(architecture, model_path, job.context_tokens_max, exports)
    blob = without_weights(_mapped(exported), _mapped(layout.path), layout.in_halves())
    expected = logits(graph)
    # One model in memory at a time.
    del graph
    gc.collect()
    written = scratch / key
    blob.write(written, key)
    found = logits(compiler.import_bound(key, BoundBlob(written, key, layout)))
    if not np.array_equal(found, expected):
        raise EngineError(
            "imported and compiled differ: logits by up to "
            f"{float(np.abs(found - expected).max()):.3g}"
        )
    folder.keep(key, written)


def main() -> int:
    """What goes wrong is the last line on stderr, with exit code 1."""
    end_first()
    try:
        make_blob(BlobJob.from_json(sys.argv[1]), Path(sys.argv[2]))
    except (MeshError, OSError, RuntimeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _mapped(path: Path) -> Bytes:
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


if __name__ == "__main__":
    sys.exit(main())
