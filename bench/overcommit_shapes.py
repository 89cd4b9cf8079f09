"""What an engine books instances of a shape at, over what they take: a random 1B, the demo model.

Each in a process of its own, which loads and unloads until the books have been corrected, loads
once more and computes the largest iterations, in which it takes the most.
"""

import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.demo_model import stored_model
from bench.driving import INSTANCE, no_progress, order
from bench.peer import in_own_process
from mesh.domain.profile import IterationShape
from mesh.memory.footprints import SEEN_MIN
from mesh_loader.store import ModelStore, StoredModel
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from mesh_nodes.engines.openvino.footprint import ENGINE_BYTES, KERNEL_SIZES
from tests.support.tiny_model import LlamaShape, write_llama

SAMPLE_S = 0.05


_STATUS = "/proc/{}/status"
_WORDS = ("VmHWM", "VmRSS", "RssFile")


def sizes_of(status: str) -> dict[str, int]:
    """The sizes that the system tells of a process, in bytes; none of one that ends."""
    lines = [line.split() for line in status.splitlines()]
    return {each[0][:-1]: int(each[1]) * 1024 for each in lines if each[2:] == ["kB"]}


def own_bytes(word: str) -> int:
    """One size of this process."""
    return sizes_of(Path(_STATUS.format("self")).read_text("ascii"))[word]


@dataclass(slots=True, kw_only=True)
class Resident:
    """Samples of one process against its limit."""

    limit_bytes: int
    samples: int = 0
    over: int = 0
    """Samples above the limit."""
    rss_bytes_max: int = 0
    file_bytes: int = 0
    """The pages of files in the largest sample, which the system could take back."""
    high_water_bytes: int = 0
    """The most at any time, by the system's own account."""

    @property
    def rss_share_max(self) -> float:
        return self.rss_bytes_max / max(self.limit_bytes, 1)

    @property
    def high_water_share(self) -> float:
        return self.high_water_bytes / max(self.limit_bytes, 1)

    def note(self, status: str) -> None:
        """One reading of /proc/PID/status. One without memory, of a process that ends, is none."""
        found = sizes_of(status)
        if not all(word in found for word in _WORDS):
            return
        peak, rss, file = (found[word] for word in _WORDS)
        self.samples += 1
        self.over += rss > self.limit_bytes
        self.high_water_bytes = max(self.high_water_bytes, peak)
        if rss > self.rss_bytes_max:
            self.rss_bytes_max, self.file_bytes = rss, file


@contextmanager
def watched(pid: int, limit_bytes: int) -> Iterator[Resident]:
    """Samples the process every SAMPLE_S until the end of the block, or of the process."""
    resident = Resident(limit_bytes=limit_bytes)
    over = threading.Event()
    status = Path(_STATUS.format(pid))

    def watch() -> None:
        while not over.wait(SAMPLE_S):
            try:
                resident.note(status.read_text(encoding="ascii", errors="replace"))
            except OSError:
                return

    watcher = threading.Thread(target=watch, name="resident", daemon=True)
    watcher.start()
    try:
        yield resident
    finally:
        over.set()
        watcher.join()


BILLION = LlamaShape(hidden=2048, intermediate=5632, layers=22, heads=32, kv_heads=4, head_size=64)
"""A TinyLlama but for its vocabulary: 0.97 billion parameters."""
CONTEXT_TOKENS = 512
KV_BLOCKS, BATCH_MAX = 160, 128
SECONDS_MAX = 900.0
LARGEST = IterationShape(prefill_tokens=512)
_FORGET_PEAK = Path("/proc/self/clear_refs")
"""Where writing 5 has the high water mark begin anew."""


def booked_over_rss() -> Mapping[str, float]:
    """By shape. Raises Unavailable when a process fails."""
    with tempfile.TemporaryDirectory() as folder:
        source = write_llama(Path(folder) / "source", BILLION)
        billion = ModelStore(Path(folder) / "store").import_model(f"file://{source}")
        models = {"135M": stored_model(), "1B": billion}
        return {
            name: in_own_process(f"an instance of {name}", measure, model, s_max=SECONDS_MAX)
            for name, model in models.items()
        }


def measure(model: StoredModel) -> float:
    """What is booked, the process included, over its RSS at that peak."""
    engine = OpenVinoEngine()
    base_bytes = own_bytes("VmRSS") + ENGINE_BYTES
    engine.prepare(model.info, model.path, no_progress)
    for life in range(SEEN_MIN + 1):
        if life:
            engine.unload(INSTANCE)
            # As a node's heartbeats find it between two instances.
            base_bytes = max(base_bytes, own_bytes("VmRSS"))
        _live(engine, model)
    _FORGET_PEAK.write_text("5", encoding="ascii")
    engine.measure(INSTANCE, LARGEST)
    held = sum(books.weights_bytes + books.kv_held_bytes for books in engine.memory())
    return (base_bytes + held) / own_bytes("VmHWM")


def _live(engine: OpenVinoEngine, model: StoredModel) -> None:
    wanted = order(
        model, kv_blocks=KV_BLOCKS, context_tokens_max=CONTEXT_TOKENS, batch_max=BATCH_MAX
    )
    engine.load(wanted, no_progress)
    decodes = [
        IterationShape(decode_batch=batch, decode_context_tokens=32)
        for batch in (*range(1, KERNEL_SIZES), BATCH_MAX)
    ]
    for shape in (*decodes, LARGEST):
        engine.measure(INSTANCE, shape)
