"""Weights held as i8, as i4 and i4-g128 and, of the demo model, as its file's own 4 bits.

Times are medians of rounds in turn, A B A B …, each contender in a process of its own. Quality is
that of the demo model: perplexity of a text that ships with the benchmark, over that of f16, and
how often the likeliest next token is f16's. The last line is one JSON object; `i4_decode_ratio` and
`i4_g128_decode_ratio` are the time of a token in these over that in i8, of a model of 1.2 billion
parameters at batch 1.
"""

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from bench.demo_model import stored_model
from bench.engine.workload import THREADS
from bench.peer import Peer
from bench.printing import errors_told, last_line, show_status, show_table
from bench.weights.quality import Foretold, foretelling_peer
from bench.weights.speed import LLAMA_1B, SHAPES, model_of_zeros, timed
from mesh.domain.model import ComputePrecision, KvPrecision, WeightPrecision
from mesh_loader.store import StoredModel
from mesh_nodes.engines.openvino.precisions import PLAIN, Precisions

ROUNDS = 5
REPEATS = 7
"""An iteration is repeated this often in a round: the shortest counts."""
I8, I4, I4_G128, F16, FILE = (
    WeightPrecision.I8,
    WeightPrecision.I4,
    WeightPrecision.I4_G128,
    WeightPrecision.F16,
    WeightPrecision.FILE,
)
PRECISIONS = tuple(
    Precisions(compute=compute, kv=kv)
    for compute, kv in (
        (ComputePrecision.F32, KvPrecision.U8),
        (ComputePrecision.BF16, KvPrecision.BF16),
    )
)
"""Beside the plain ones, in f32 where the CPU has no bf16."""
MIB = 2**20

Seconds = dict[WeightPrecision, dict[str, float]]


def measured(
    stored: StoredModel, kinds: tuple[WeightPrecision, ...], rounds: int
) -> tuple[Seconds, dict[WeightPrecision, float]]:
    """Seconds by shape of iteration, and bytes. Raises Unavailable."""
    with ExitStack() as stack:
        peers = {}
        for kind in kinds:
            peers[kind] = stack.enter_context(Peer(kind, timed, stored, kind, THREADS))
            peers[kind].wait_ready()
        times: dict[WeightPrecision, dict[str, list[float]]]
        times = {kind: {name: [] for name in SHAPES} for kind in kinds}
        for number in range(rounds + 1):  # all kernels are there after the first
            for name in SHAPES:
                for kind, peer in peers.items():
                    show_status(f"round {number}: {kind}, {name}")
                    taken_s = min(peer.ask(name) for _ in range(REPEATS))
                    times[kind][name] += [taken_s] if number else []
        taken_bytes = {kind: peer.ask() for kind, peer in peers.items()}
    medians = {k: {name: median(s) for name, s in by.items()} for k, by in times.items()}
    return medians, taken_bytes


def shown(title: str, seconds: Seconds, taken_bytes: dict[WeightPrecision, float]) -> None:
    rows = []
    for kind, by_name in seconds.items():
        cells = [f"{1e3 * s:.1f} ({s / seconds[I8][n]:.2f})" for n, s in by_name.items()]
        rows.append((kind.value, f"{taken_bytes[kind] / MIB:.0f}", *cells))
    show_table(("weights", "MiB", *(f"{name} ms" for name in SHAPES)), rows, title=title)


def foretelling(stored: StoredModel) -> dict[str, Foretold]:
    """By weights, and of i8 by precision, too."""
    kinds = {str(kind): (kind, PLAIN) for kind in (F16, I8, I4, I4_G128, FILE)}
    kinds |= {f"i8, {each}": (I8, each) for each in PRECISIONS}
    found = {}
    for name, (kind, precisions) in kinds.items():
        show_status(f"quality: {name}")
        with Peer(name, foretelling_peer, stored, kind, precisions) as peer:
            peer.wait_ready()
            found[name] = peer.ask()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--no-large", dest="large", action="store_false", help="but the demo model")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    with errors_told():
        stored = stored_model()
        quality = foretelling(stored)
        small = measured(stored, (I8, I4, I4_G128, FILE), options.rounds)
        large = None
        if options.large:
            with tempfile.TemporaryDirectory() as folder:
                zeros = model_of_zeros(Path(folder), LLAMA_1B)
                large = measured(zeros, (I8, I4, I4_G128), options.rounds)
    shown(f"{stored.info.parameters / 1e6:.0f} M parameters, {THREADS} threads", *small)
    if large is not None:
        shown(f"1.2 billion parameters, {THREADS} threads", *large)
    exact = quality[str(F16)]
    show_table(
        ("weights", "perplexity", "over f16's", "f16's next token"),
        [
            (
                kind,
                f"{one.perplexity:.3f}",
                f"{one.perplexity / exact.perplexity:.4f}",
                f"{100 * one.agreement(exact):.1f} %",
            )
            for kind, one in quality.items()
        ],
    )
    last_line(
        {
            "i4_decode_ratio": _decode_ratio(large, I4),
            "i4_g128_decode_ratio": _decode_ratio(large, I4_G128),
            "perplexity_ratio": {
                k: round(one.perplexity / exact.perplexity, 4) for k, one in quality.items()
            },
            "next_token_agreement": {
                k: round(one.agreement(exact), 4) for k, one in quality.items()
            },
            "small_ms": _in_ms(small[0]),
            "large_ms": None if large is None else _in_ms(large[0]),
            "small_mib": _in_mib(small[1]),
            "large_mib": None if large is None else _in_mib(large[1]),
        }
    )


def _decode_ratio(measured_: tuple[Seconds, object] | None, kind: WeightPrecision) -> float | None:
    if measured_ is None:
        return None
    seconds = measured_[0]
    return round(seconds[kind]["decode 1"] / seconds[I8]["decode 1"], 3)


def _in_ms(seconds: Seconds) -> dict[str, dict[str, float]]:
    return {k: {name: round(1e3 * s, 2) for name, s in by.items()} for k, by in seconds.items()}


def _in_mib(taken_bytes: dict[WeightPrecision, float]) -> dict[str, int]:
    return {k: round(b / MIB) for k, b in taken_bytes.items()}


if __name__ == "__main__":
    main()
