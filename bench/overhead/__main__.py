"""Measures a cell and the bare engine in turn, A B A B …, and prints what the cell adds, and where.

Twice: with one core left to the controller, the client and the loops, as where these have a machine
of their own; and with the engine on all cores, where whatever they compute it computes later. The
last line is one JSON object: `ttft_added_ms_p50`, `token_added_ms_p50` (medians over rounds of the
difference of the round's medians) for the first, the same with `_all_cores` for the second, and
`hops_ms`, the way of a first token.
"""

import argparse
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from bench.cells import deployed, local_cell
from bench.demo_model import SOURCE, stored_model
from bench.overhead import bare, cell, hops
from bench.overhead.workload import CONTEXT_TOKENS, SLO, Answer
from bench.peer import Peer
from bench.printing import errors_told, last_line, show_table
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.ids import DeploymentName

NAME = DeploymentName("overhead")
ROUNDS = 10
HEADINGS = ("", "engine on", "bare engine", "cell", "added", "limit")


def measure(rounds: int, threads: int, join_ms: float) -> tuple[list[Answer], list[Answer]]:
    """Answers of the bare engine and of the cell, round by round; one warm-up round first."""
    spec = DeploymentSpec(name=NAME, source=SOURCE, context_tokens_max=CONTEXT_TOKENS, slo=SLO)
    with (
        Peer("the bare engine", bare.contender, threads) as plain,
        local_cell(threads=threads, join_ms=join_ms) as local,
    ):
        plain.wait_ready()
        deployed(local.address, [spec])
        asked = [(plain.ask(), cell.ask(local.address, NAME)) for _ in range(rounds + 1)]
    answers = asked[1:]
    return [a for a, _ in answers], [b for _, b in answers]


def way(rounds: int, threads: int) -> Mapping[str, float]:
    """Milliseconds of each hop to a lone first token, in a cell that keeps journals."""
    spec = DeploymentSpec(name=NAME, source=SOURCE, context_tokens_max=CONTEXT_TOKENS, slo=SLO)
    with tempfile.TemporaryDirectory() as folder:
        controller, node = Path(folder) / "controller.journal", Path(folder) / "cpu0.journal"
        with local_cell(threads=threads, journal=controller, node_journals=node.parent) as local:
            deployed(local.address, [spec])
            answers = [one for _ in range(rounds) for one in cell.ask_alone(local.address, NAME)]
        return hops.hops_ms(controller, node, answers)


def compare(key: str, bares: list[Answer], cells: list[Answer]) -> tuple[float, float, float]:
    """Medians in ms: the bare engine, the cell, and what the cell adds."""
    alone = [median(getattr(a, f"{key}_ms")) for a in bares]
    whole = [median(getattr(a, f"{key}_ms")) for a in cells]
    return median(alone), median(whole), median(w - a for w, a in zip(whole, alone, strict=True))


def report(rounds: int, join_ms: float) -> None:
    cores = len(os.sched_getaffinity(0))
    rows = []
    figures: dict[str, float] = {}
    for threads, suffix in ((max(1, cores - 1), ""), (cores, "_all_cores")):
        bares, cells = measure(rounds, threads, join_ms)
        for label, key, limit in (
            ("first token, one request", "ttft", 3.0),
            ("each token, batch of 8", "token", 0.5),
        ):
            alone, whole, added = compare(key, bares, cells)
            numbers = (f"{alone:.2f}", f"{whole:.2f}", f"{added:.2f}")
            limits = "" if suffix else f"{limit:.1f}"
            rows.append((label, f"{threads} of {cores}", *numbers, limits))
            figures |= {
                f"{key}_added_ms_p50{suffix}": round(added, 3),
                f"{key}_bare_ms_p50{suffix}": round(alone, 3),
            }
    show_table(HEADINGS, rows, title=f"medians over {rounds} rounds, ms")
    hops_ms = way(rounds, max(1, cores - 1))
    ways = [(hop, f"{ms:.2f}") for hop, ms in hops_ms.items()]
    show_table(("first token, one request", "ms"), ways, title="medians, with journals kept")
    last_line({**figures, "hops_ms": {hop: round(ms, 3) for hop, ms in hops_ms.items()}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--join-ms", type=float, default=0.0, help="as of mesh controller")
    options = parser.parse_args()
    with errors_told():
        stored_model()
        report(options.rounds, options.join_ms)


if __name__ == "__main__":
    main()
