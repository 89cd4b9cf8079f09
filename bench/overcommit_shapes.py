"""What an engine books instances of a shape at, over what they take: a random 1B, the demo model.

Each in a process of its own, which loads and unloads until the books have been corrected, loads
once more and computes the largest iterations, in which it takes the most.
`python -m bench.overcommit_shapes MODEL_JSON FOLDER` prints one number: what is booked, the process
included, over its RSS at that peak.
"""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.demo_model import stored_model
from mesh.domain.errors import EngineError
from mesh.domain.ids import DeploymentName, InstanceId
from mesh.domain.model import ModelFormat, ModelInfo
from mesh.domain.profile import IterationShape
from mesh.domain.steps import LoadOrder
from mesh.memory.footprints import SEEN_MIN
from mesh_loader.store import ModelStore, StoredModel
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from mesh_nodes.engines.openvino.footprint import ENGINE_BYTES, KERNEL_SIZES
from tests.support.tiny_model import LlamaShape, write_llama

SAMPLE_S = 0.05


_STATUS = "/proc/{}/status"
_WORDS = ("VmHWM", "VmRSS", "RssAnon", "RssFile")


def status_bytes(pid: int | str, word: str) -> int:
    """One size that the system tells of a process. Raises OSError or KeyError when it has none."""
    lines = Path(_STATUS.format(pid)).read_text(encoding="ascii", errors="replace").splitlines()
    return int(dict(line.split(":", 1) for line in lines)[word].split()[0]) * 1024


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
        found = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        if not all(word in found for word in _WORDS):
            return
        peak, rss, _, file = (int(found[word].split()[0]) * 1024 for word in _WORDS)
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
KV_BLOCKS = 160
SECONDS_MAX = 900.0
INSTANCE = InstanceId("i")
LARGEST = IterationShape(prefill_tokens=512)
_FORGET_PEAK = Path("/proc/self/clear_refs")
"""Where writing 5 has the high water mark begin anew."""


def booked_over_rss() -> Mapping[str, float]:
    """By shape. Raises EngineError when a process fails."""
    with tempfile.TemporaryDirectory() as folder:
        source = write_llama(Path(folder) / "source", BILLION)
        billion = ModelStore(Path(folder) / "store").import_model(f"file://{source}")
        return {"135M": _measured(stored_model()), "1B": _measured(billion)}


def _measured(model: StoredModel) -> float:
    done = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps(asdict(model.info)), str(model.path)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    if done.returncode:
        raise EngineError(f"{model.info.model_id} was not measured: exit code {done.returncode}")
    return float(done.stdout)


def measure(info: ModelInfo, path: Path) -> float:
    """In a process that has done nothing else."""
    engine = OpenVinoEngine()
    base_bytes = status_bytes("self", "VmRSS") + ENGINE_BYTES
    engine.prepare(info, path, lambda *_: None)
    for life in range(SEEN_MIN + 1):
        if life:
            engine.unload(INSTANCE)
            # As a node's heartbeats find it between two instances.
            base_bytes = max(base_bytes, status_bytes("self", "VmRSS"))
        _live(engine, info, path)
    _FORGET_PEAK.write_text("5", encoding="ascii")
    engine.measure(INSTANCE, LARGEST)
    held = sum(books.weights_bytes + books.kv_held_bytes for books in engine.memory())
    return (base_bytes + held) / status_bytes("self", "VmHWM")


def _live(engine: OpenVinoEngine, info: ModelInfo, path: Path) -> None:
    order = LoadOrder(
        instance_id=INSTANCE,
        deployment=DeploymentName("d"),
        model=info,
        model_path=path,
        kv_blocks=KV_BLOCKS,
        context_tokens_max=CONTEXT_TOKENS,
        batch_max=128,
    )
    engine.load(order, lambda *_: None)
    decodes = [
        IterationShape(decode_batch=batch, decode_context_tokens=32)
        for batch in (*range(1, KERNEL_SIZES), 128)
    ]
    for shape in (*decodes, LARGEST):
        engine.measure(INSTANCE, shape)


if __name__ == "__main__":
    fields = json.loads(sys.argv[1])
    fields |= {"format": ModelFormat(fields["format"])}
    print(measure(ModelInfo(**fields), Path(sys.argv[2])))
