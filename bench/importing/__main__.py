"""What it takes to bring a model into a store, step by step: the demo model's GGUF.

It is downloaded from a server on this machine (so as fast as this machine can, and no network),
hashed, dequantised, given digests, prepared for OpenVINO; then the digests that a first load looks
at are checked, with the files in the page cache and not. Each round has a store of its own. The
last line is one JSON object, with the median seconds of each step.
"""

import argparse
import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median

from bench.cold_start.files import bring, forget
from bench.fleet.peer import demo_gguf
from bench.importing.steps import Mark, seconds_by_step
from bench.printing import errors_told, last_line, rounded, show_status, show_table
from mesh_loader.digests import WEIGHTS_SUFFIXES, Verifier, Verify
from mesh_loader.reach import Reach
from mesh_loader.store import ModelStore
from mesh_nodes.engines.openvino.engine import OpenVinoEngine

ROUNDS, QUICK_ROUNDS = 5, 1
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
    begun_s = time.perf_counter()
    engine.prepare(stored.info, stored.path, lambda phase, share: None)
    found[PREPARE] = time.perf_counter() - begun_s
    (prepared,) = stored.path.glob("prepared/*")
    for step, ready in ((CACHED, bring), (STORED, forget)):
        ready(stored.path)
        verifier = Verifier(Verify.ALWAYS)
        begun_s = time.perf_counter()
        verifier.check(stored.path, without=WEIGHTS_SUFFIXES)
        verifier.check(prepared)
        found[step] = time.perf_counter() - begun_s
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, help=f"({ROUNDS})")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} round")
    options = parser.parse_args()
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    seconds: dict[str, list[float]] = defaultdict(list)
    with errors_told():
        model, engine = demo_gguf(), OpenVinoEngine()
        with served(model.parent) as address:
            for number in range(rounds):
                show_status(f"round {number + 1} of {rounds}")
                with tempfile.TemporaryDirectory() as folder:
                    found = measured(f"{address}/{model.name}", Path(folder), engine)
                for step, taken_s in found.items():
                    seconds[step].append(taken_s)
    size_bytes = model.stat().st_size
    rows = [
        (s, *(f"{each:.3f}" for each in (median(t), min(t), max(t)))) for s, t in seconds.items()
    ]
    title = f"{model.name}, {size_bytes / 1e6:.0f} MB"
    show_table(("step", "median s", "least s", "most s"), rows, title=title)
    last_line({step: rounded(median(taken)) for step, taken in seconds.items()})


if __name__ == "__main__":
    main()
