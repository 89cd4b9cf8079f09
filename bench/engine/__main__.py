"""Measures mesh's engine, OpenVINO GenAI and llama.cpp in turn, A B C A B C …, on the same prompts.

With weights of 8 bits and of 4, each engine in a process of its own, idle while another is
measured: prompts of 128 tokens answered greedily at 1, 8 and 16 at once, and sampled at 8; first
tokens of prompts of 128 and 2,048. The last line is one JSON object, of the first model, with all
in `models`: `ratio_to_best` (mesh over the better peer, by requests at once), `sampled_ratio`,
`prefill_ratio_to_best`, the like with `_i4` of 4 bits (mesh's `i4-g128`, in groups as GenAI has
them), `i4_decode_ratio` (a token's time in these over that in 8 bits, mesh's), and
the `precisions` that mesh chose, with what each candidate took and its share of the roofline.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from bench.cold_start.shapes import DEMO, SHAPES
from bench.engine.contenders import ENTRIES, timed
from bench.engine.models import I8, WIDTHS, Models, prepared_models
from bench.engine.report import Measured, Seconds, print_figures, print_model
from bench.engine.trial import Trial, print_trial
from bench.engine.workload import FIRST, PREFILL, SAMPLING, WORKS, Work, shortened
from bench.peer import Peer
from bench.printing import errors_told
from mesh.cli import output
from mesh.domain.model import WeightPrecision
from mesh_nodes.engines.openvino.architecture import read_architecture

MODELS = (DEMO, "1B")
ROUNDS = {DEMO: 3}
"""The rounds of the demo model; any other model has one, because its iterations are long."""
OUTPUT_TOKENS = 16
"""The output of a request to such a model."""
WARM_UP_TOKENS = 4


class Bench:
    """The peers that could be started, and what was measured."""

    def __init__(self, peers: list[Peer], works: Sequence[Work], vocabulary_tokens: int) -> None:
        self._peers = peers
        self._works = works
        self._vocabulary_tokens = vocabulary_tokens
        self._seed = 0
        self._seconds: dict[str, dict[str, list[float]]]
        self._seconds = {peer.name: {work.name: [] for work in works} for peer in peers}
        self.seconds: Seconds = self._seconds
        self.idle_share = 0.0

    def warm_up(self, works: Sequence[Work]) -> None:
        for work in works:
            asked = self._prompts(work), shortened(work, WARM_UP_TOKENS)
            for peer in self._peers:
                output.message(f"warm up {peer.name}, {work.name}")
                peer.ask(asked)

    def round(self, number: int) -> None:
        for work in self._works:
            asked = self._prompts(work), work
            for peer in self._peers:
                taken_s = self._measure(peer, asked)
                self._seconds[peer.name][work.name].append(taken_s)
                rate = work.counted_tokens / taken_s
                output.message(f"round {number}: {peer.name}, {work.name}: {rate:.1f} tokens/s")

    def _measure(self, peer: Peer, asked: tuple[list[list[int]], Work]) -> float:
        others = [other for other in self._peers if other is not peer]
        start_s, before_s = time.monotonic(), [other.cpu_s() for other in others]
        taken_s: float = peer.ask(asked)
        wall_s = time.monotonic() - start_s
        for other, used_s in zip(others, before_s, strict=True):
            self.idle_share = max(self.idle_share, (other.cpu_s() - used_s) / wall_s)
        return taken_s

    def _prompts(self, work: Work) -> list[list[int]]:
        self._seed += 1
        return work.prompts(self._vocabulary_tokens, self._seed)


def measure(models: Models, works: Sequence[Work], warm: Sequence[Work], rounds: int) -> Bench:
    """Engines that are not installed are left out. Raises Unavailable when one fails."""
    with ExitStack() as stack:
        peers = []
        for entry in ENTRIES:
            if entry.installed:
                output.message(f"start {entry.name}")
                peer = stack.enter_context(Peer(entry.name, timed, entry.name, models))
                peer.wait_ready()
                peers.append(peer)
        bench = Bench(peers, works, models.stored.info.vocabulary_tokens)
        bench.warm_up(warm)
        for number in range(1, rounds + 1):
            bench.round(number)
        return bench


def measured_model(name: str, rounds: int) -> Measured:
    """Raises MeshError."""
    output.message(f"{name}: prepare the model for each engine")
    forms = {weights: prepared_models(name, weights) for weights in WIDTHS}
    output.message(f"{name}: compare precisions")
    trial = Trial.of(read_architecture(forms[I8].stored.path))
    print_trial(trial)
    works = WORKS if name == DEMO else [shortened(work, OUTPUT_TOKENS) for work in WORKS]
    seconds: dict[WeightPrecision, Seconds] = {}
    idle_share = 0.0
    for weights, models in forms.items():
        wanted, warm = list(works), list(works)
        if name != DEMO:
            # What takes long is computed once, without having been warmed up.
            wanted = [w for w in works if weights is I8 or w.name != SAMPLING.name]
            warm = [w for w in wanted if w.count <= 8 and w.name not in (FIRST.name, PREFILL.name)]
        bench = measure(replace(models, precisions=trial.chosen), wanted, warm, rounds)
        idle_share = max(idle_share, bench.idle_share)
        seconds[weights] = {
            engine: {work.name: by_work.get(work.name, []) for work in works}
            for engine, by_work in bench.seconds.items()
        }
    return Measured(
        name=name,
        works=works,
        seconds=seconds,
        idle_share=idle_share,
        precisions=trial.figures(),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=None, help="(3 of the demo model, else 1)")
    parser.add_argument("--quick", action="store_true", help="the demo model, one round")
    options = parser.parse_args()
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    names = [DEMO] if options.quick else list(dict.fromkeys(options.models))
    missing = [entry.name for entry in ENTRIES if not entry.installed]
    found = []
    with errors_told():
        for name in names:
            usual = 1 if options.quick else ROUNDS.get(name, 1)
            found.append(measured_model(name, options.rounds or usual))
            print_model(found[-1])
    if missing:
        print(f"error: not installed, so not measured: {', '.join(missing)}", file=sys.stderr)
        print("hint: make bench-engine, or pip install -e '.[bench]'", file=sys.stderr)
    print_figures(found, missing)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
