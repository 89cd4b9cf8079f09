"""What it takes to bring a model into a store, step by step: the demo model's GGUF.

It is downloaded from a server on this machine (so as fast as this machine can, and no network),
hashed, dequantised, given digests, prepared for OpenVINO; then the digests that a first load looks
at are checked, with the files in the page cache and not. Each round has a store of its own. The
last line is one JSON object, with the median seconds of each step.
"""

import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median

from bench.cold_start_cell import bring, forget
from bench.demo_model import demo_gguf
from bench.driving import no_progress
from bench.harness import Report, in_turn, rounded, spread_table, timed
from mesh_loader.digests import WEIGHTS_SUFFIXES, Verifier, Verify
from mesh_loader.reach import Reach
from mesh_loader.store import ModelStore
from mesh_nodes.engines.openvino.engine import OpenVinoEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A phase was told of."""

    at_s: float
    phase: str


def seconds_by_step(marks: Sequence[Mark], end_s: float) -> dict[str, float]:
    """Each phase lasts until another is told of, the last one until the end. What follows a comma
    in a phase is how far it is; a download is one step, whatever its file is called.
    """
    steps: dict[str, float] = {}
    ends_s = [mark.at_s for mark in marks[1:]] + [end_s]
    for mark, until_s in zip(marks, ends_s, strict=True):
        name = mark.phase.partition(", ")[0]
        step = "download" if name.startswith("download ") else name
        steps[step] = steps.get(step, 0.0) + until_s - mark.at_s
    return steps


PREPARE, CACHED, STORED = "prepare", "check digests, cached", "check digests, stored"


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of these files."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def measured(source: str, root: Path, engine: OpenVinoEngine) -> dict[str, float]:
    """Seconds by step, into an empty store. Raises MeshError."""
    marks: list[Mark] = []
    # Models may come from a server on this machine.
    store = ModelStore(root, reach=Reach(named=("127.0.0.1", "localhost")))

    def note(phase: str, share: float) -> None:
        marks.append(Mark(at_s=time.perf_counter(), phase=phase))

    stored = store.import_model(source, note)
    found = seconds_by_step(marks, time.perf_counter())
    found.pop("done", None)
    os.sync()
    found[PREPARE], _ = timed(lambda: engine.prepare(stored.info, stored.path, no_progress))
    (prepared,) = stored.path.glob("prepared/*")
    for step, ready in ((CACHED, bring), (STORED, forget)):
        ready(stored.path)
        verifier = Verifier(Verify.ALWAYS)
        begun_s = time.perf_counter()
        verifier.check(stored.path, without=WEIGHTS_SUFFIXES)
        verifier.check(prepared)
        found[step] = time.perf_counter() - begun_s
    return found


def run(*, rounds: int = 5, quick: bool = False) -> Report:
    rounds = 1 if quick else rounds
    seconds: dict[str, list[float]] = defaultdict(list)
    model, engine = demo_gguf(), OpenVinoEngine()
    with served(model.parent) as address:
        for _, _, source in in_turn({model.name: f"{address}/{model.name}"}, rounds):
            with tempfile.TemporaryDirectory() as folder:
                found = measured(source, Path(folder), engine)
            for step, taken_s in found.items():
                seconds[step].append(taken_s)
    table = spread_table(seconds, "step", f"{model.name}, {model.stat().st_size / 1e6:.0f} MB")
    return Report(
        figures={step: rounded(median(taken)) for step, taken in seconds.items()}, shown=[table]
    )
