"""Measures mesh's engine, OpenVINO GenAI and llama.cpp in turn, A B C A B C …, on the same prompts.

Each runs in a process of its own and is idle while another is measured. The last line is one JSON
object: `ratio_to_best` (mesh over the better peer) and `tokens_per_s`, by requests at once, and the
`precisions` that mesh chose, with what each candidate took.
"""

import argparse
import sys
import time
from contextlib import ExitStack
from dataclasses import replace

from bench.engine.contenders import ENTRIES, timed
from bench.engine.models import Models, prepared_models
from bench.engine.report import Rates, print_report
from bench.engine.trial import Trial, print_trial
from bench.engine.workload import CONCURRENCIES, OUTPUT_TOKENS, prompts
from bench.peer import Peer
from bench.printing import errors_told
from mesh.cli import output
from mesh_nodes.engines.openvino.architecture import read_architecture

ROUNDS = 5


class Bench:
    """The peers that could be started, and what was measured."""

    def __init__(self, peers: list[Peer], vocabulary_tokens: int) -> None:
        self._peers = peers
        self._vocabulary_tokens = vocabulary_tokens
        self._seed = 0
        self.rates: Rates = {peer.name: {n: [] for n in CONCURRENCIES} for peer in peers}
        self.idle_share = 0.0

    def warm_up(self) -> None:
        """Everything that comes later has run once, at every size."""
        for count in CONCURRENCIES:
            for peer in self._peers:
                output.message(f"warm up {peer.name}, {count} at once")
                peer.ask(self._prompts(count))

    def round(self, number: int) -> None:
        for count in CONCURRENCIES:
            asked = self._prompts(count)
            for peer in self._peers:
                rate = count * OUTPUT_TOKENS / self._measure(peer, asked)
                self.rates[peer.name][count].append(rate)
                output.message(f"round {number}: {peer.name}, {count} at once: {rate:.1f} tokens/s")

    def _measure(self, peer: Peer, asked: list[list[int]]) -> float:
        others = [other for other in self._peers if other is not peer]
        start_s, before_s = time.monotonic(), [other.cpu_s() for other in others]
        taken_s: float = peer.ask(asked)
        wall_s = time.monotonic() - start_s
        for other, used_s in zip(others, before_s, strict=True):
            self.idle_share = max(self.idle_share, (other.cpu_s() - used_s) / wall_s)
        return taken_s

    def _prompts(self, count: int) -> list[list[int]]:
        self._seed += 1
        return prompts(count, self._vocabulary_tokens, self._seed)


def measure(models: Models, rounds: int) -> Bench:
    """Engines that are not installed are left out. Raises Unavailable when one fails."""
    with ExitStack() as stack:
        peers = []
        for entry in ENTRIES:
            if entry.installed:
                output.message(f"start {entry.name}")
                peer = stack.enter_context(Peer(entry.name, timed, entry.name, models))
                peer.wait_ready()
                peers.append(peer)
        bench = Bench(peers, models.stored.info.vocabulary_tokens)
        bench.warm_up()
        for number in range(1, rounds + 1):
            bench.round(number)
        return bench


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    missing = [entry.name for entry in ENTRIES if not entry.installed]
    with errors_told():
        output.message("prepare the model for each engine")
        models = prepared_models()
        output.message("compare precisions")
        trial = Trial.of(read_architecture(models.stored.path))
        models = replace(models, precisions=trial.chosen)
        bench = measure(models, options.rounds)
    if missing:
        print(f"error: not installed, so not measured: {', '.join(missing)}", file=sys.stderr)
        print("hint: make bench-engine, or pip install -e '.[bench]'", file=sys.stderr)
    print_trial(trial)
    print_report(bench.rates, bench.idle_share, missing, trial.figures())
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
