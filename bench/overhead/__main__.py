"""Measures a cell and the bare engine in turn, A B A B …, and prints what the cell adds.

Twice: with one core left to the controller, the client and the loops, as where these have a machine
of their own; and with the engine on all cores, where whatever they compute it computes later. The
last line is one JSON object: `ttft_added_ms_p50`, `token_added_ms_p50` (medians over rounds of the
difference of the round's medians) for the first, the same with `_all_cores` for the second.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.cells import local_cell
from bench.demo_model import SOURCE, stored_model
from bench.overhead import bare, cell
from bench.overhead.workload import CONTEXT_TOKENS, Answer
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.ids import DeploymentName
from mesh.domain.lifecycle import InstanceState
from mesh.wire.client import MeshClient
from mesh_nodes.engines.openvino import OpenVinoEngine

NAME = DeploymentName("overhead")
ROUNDS = 10
START_S_MAX = 180.0


class BareProcess:
    """The bare engine's end of a pipe."""

    def __init__(self, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.overhead", "--bare", "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read("ready")

    def _read(self, what: str) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"error: the bare engine ended before it was {what}")
        return line

    def ask(self) -> Answer:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        said = json.loads(self._read("measured"))
        return Answer(ttft_ms=tuple(said["ttft_ms"]), token_ms=tuple(said["token_ms"]))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()


@contextmanager
def running_cell(threads: int) -> Iterator[str]:
    """A cell with one loaded instance; its address."""
    with local_cell(threads=threads) as local:
        with MeshClient(local.address) as client:
            _deploy(client)
        yield local.address


def _deploy(client: MeshClient) -> None:
    scaling = Scaling(replicas_min=1, replicas_max=1, keep_alive_s=600.0)
    client.deploy(
        DeploymentSpec(name=NAME, source=SOURCE, context_tokens_max=CONTEXT_TOKENS, scaling=scaling)
    )
    until_s = time.monotonic() + START_S_MAX
    while not any(i.state is InstanceState.READY for i in client.get(NAME).instances):
        if time.monotonic() > until_s:
            raise SystemExit(f"error: not loaded within {START_S_MAX:.0f} s")
        time.sleep(0.1)


def measure(rounds: int, threads: int) -> tuple[list[Answer], list[Answer]]:
    """Answers of the bare engine and of the cell, round by round; one warm-up round first."""
    plain = BareProcess(threads)
    try:
        with running_cell(threads) as address:
            answers = [(plain.ask(), cell.ask(address, NAME)) for _ in range(rounds + 1)][1:]
    finally:
        plain.close()
    return [a for a, _ in answers], [b for _, b in answers]


def compare(key: str, bares: list[Answer], cells: list[Answer]) -> tuple[float, float, float]:
    """Medians in ms: the bare engine, the cell, and what the cell adds."""
    alone = [median(getattr(a, f"{key}_ms")) for a in bares]
    whole = [median(getattr(a, f"{key}_ms")) for a in cells]
    return median(alone), median(whole), median(w - a for w, a in zip(whole, alone, strict=True))


def report(rounds: int) -> None:
    cores = len(os.sched_getaffinity(0))
    table = Table(title=f"medians over {rounds} rounds, ms", title_justify="left", box=None)
    for heading in ("", "engine on", "bare engine", "cell", "added", "limit"):
        table.add_column(heading, justify="left" if not heading else "right")
    figures: dict[str, float] = {}
    for threads, suffix in ((max(1, cores - 1), ""), (cores, "_all_cores")):
        bares, cells = measure(rounds, threads)
        for label, key, limit in (
            ("first token, one request", "ttft", 3.0),
            ("each token, batch of 8", "token", 0.5),
        ):
            alone, whole, added = compare(key, bares, cells)
            row = (f"{alone:.2f}", f"{whole:.2f}", f"{added:.2f}")
            table.add_row(label, f"{threads} of {cores}", *row, "" if suffix else f"{limit:.1f}")
            figures |= {
                f"{key}_added_ms_p50{suffix}": round(added, 3),
                f"{key}_bare_ms_p50{suffix}": round(alone, 3),
            }
    Console(width=100).print(table)
    print(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    if options.bare:
        bare.serve(OpenVinoEngine(threads=options.threads), stored_model())
        return
    stored_model()
    report(options.rounds)


if __name__ == "__main__":
    main()
