"""Measures vLLM's own loop and mesh's adapter in turn, A B C A B C …, decoding a batch of eight.

B asks for one iteration a message, C for a turn of four, as the node's agent does where nobody else
has work.

Both compute on one core less than there are, so that the agent has one. The last line is one JSON
object: `overhead_share`, the median over rounds of how much longer an iteration takes when the
agent asks for it than in vLLM's own loop (medians of each round), and `agent_ms_p50`, what of an
iteration is not spent in the engine process: sending, receiving, waking up. The same with `_of_4`,
an iteration's share of its turn.
"""

import argparse
import os
import time
from contextlib import closing
from statistics import median

from bench.demo_model import stored_model
from bench.driving import LoadedModel
from bench.peer import Peer
from bench.printing import errors_told, last_line, show_table
from bench.vllm_step import bare
from bench.vllm_step.workload import (
    BATCH,
    CONTEXT_TOKENS,
    OUTPUT_TOKENS,
    PREFILL_TOKENS_MAX,
    prompt,
)
from mesh_loader.store import StoredModel
from mesh_nodes.engines.vllm import VllmEngine
from mesh_nodes.engines.vllm.environment import ENVIRONMENT

ROUNDS = 10
TURN = 4
"""Iterations of a turn."""
OVERHEAD_SHARE_MAX = 0.05
AGENT_MS_MAX = 1.0


class Adapter:
    """mesh's engine, stepped as the node's agent steps it."""

    def __init__(self, stored: StoredModel, threads: int) -> None:
        self._model = LoadedModel(
            VllmEngine(threads=threads),
            stored,
            kv_tokens=BATCH * CONTEXT_TOKENS,
            context_tokens_max=CONTEXT_TOKENS,
            batch_max=BATCH,
        )
        self.close = self._model.close

    def steps_ms(self, iterations: int) -> tuple[list[float], list[float]]:
        """The times of every turn of so many iterations that decoded the whole batch, per
        iteration: in all, and in the agent's side.
        """
        for number in range(BATCH):
            self._model.submit(prompt(number), OUTPUT_TOKENS)
        taken_ms, agent_ms, running = [], [], BATCH
        while running:
            start_s = time.perf_counter()
            result = self._model.step(PREFILL_TOKENS_MAX, iterations)
            elapsed_s = time.perf_counter() - start_s
            running -= sum(output.finish is not None for output in result.outputs)
            if result.decode_batch == BATCH and result.iterations == iterations:
                taken_ms.append(1e3 * elapsed_s / iterations)
                agent_ms.append(1e3 * (elapsed_s - result.elapsed_s) / iterations)
        return taken_ms, agent_ms


class Rounds:
    """What the adapter took, beside vLLM's own loop in the same rounds."""

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations
        self._whole_ms: list[float] = []
        self._agent_ms: list[float] = []

    def note(self, taken_ms: list[float], agent_ms: list[float]) -> None:
        self._whole_ms.append(median(taken_ms))
        self._agent_ms += agent_ms

    @property
    def whole_ms(self) -> float:
        return median(self._whole_ms)

    @property
    def agent_ms(self) -> float:
        return median(self._agent_ms)

    def overhead_share(self, own_ms: list[float]) -> float:
        return median(b / a - 1.0 for a, b in zip(own_ms, self._whole_ms, strict=True))


def measure(rounds: int, threads: int) -> tuple[list[float], Rounds, Rounds]:
    """The median of each round: in vLLM's own loop, with single iterations, and with turns."""
    stored = stored_model()
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
    own_ms, single, turns = [], Rounds(1), Rounds(TURN)
    with (
        Peer("vLLM's own loop", bare.contender, str(stored.path), environment=environment) as own,
        closing(Adapter(stored, threads)) as adapter,
    ):
        own.wait_ready()
        for number in range(rounds + 1):
            own_taken = own.ask()
            taken = [(each, adapter.steps_ms(each.iterations)) for each in (single, turns)]
            if number > 0:  # the first warms up
                own_ms.append(median(own_taken))
                for each, times in taken:
                    each.note(*times)
    return own_ms, single, turns


def report(rounds: int, threads: int) -> None:
    own_ms, single, turns = measure(rounds, threads)
    share, share_of_4 = single.overhead_share(own_ms), turns.overhead_share(own_ms)
    own = f"{median(own_ms):.2f}"
    rows = [
        ("vLLM's own loop, ms an iteration", own, own, ""),
        (
            "stepped by the agent, ms an iteration",
            *(f"{each.whole_ms:.2f}" for each in (single, turns)),
            "",
        ),
        ("overhead", f"{share:+.1%}", f"{share_of_4:+.1%}", f"{OVERHEAD_SHARE_MAX:.0%}"),
        (
            "of it on the agent's side, ms",
            *(f"{each.agent_ms:.2f}" for each in (single, turns)),
            f"{AGENT_MS_MAX:.1f}",
        ),
    ]
    show_table(
        ("", "one a message", f"turns of {TURN}", "limit"),
        rows,
        title=f"batch {BATCH}, medians over {rounds} rounds",
    )
    figures = {
        "overhead_share": round(share, 4),
        "agent_ms_p50": round(single.agent_ms, 3),
        "overhead_share_of_4": round(share_of_4, 4),
        "agent_ms_p50_of_4": round(turns.agent_ms, 3),
        "own_ms_p50": round(median(own_ms), 3),
        "stepped_ms_p50": round(single.whole_ms, 3),
        "stepped_ms_p50_of_4": round(turns.whole_ms, 3),
        "batch": BATCH,
        "rounds": rounds,
        "threads": threads,
    }
    last_line(figures)


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=max(1, cores - 1))
    options = parser.parse_args()
    with errors_told():
        report(options.rounds, options.threads)


if __name__ == "__main__":
    main()
