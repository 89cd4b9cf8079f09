"""Measures loads from disk, sleeps and wakes of the demo model in turn, on an idle engine.

Each round loads an instance that nothing asleep can stand for, puts it to sleep and wakes it; every
one of them answers a prompt, and all answers must be the same. The last line is one JSON object
with the medians: `load_s`, `sleep_s`, `wake_s`, `again_s` (a sleep of what has slept before),
`ratio` of load to wake in a round, and `load_s_as_is` of an engine on which nothing may sleep.
"""

import argparse
import os
import time
from statistics import median

from bench.demo_model import stored_model
from bench.driving import no_progress, order, request
from bench.printing import errors_told, last_line, show_table
from mesh.domain.ids import InstanceId
from mesh.domain.steps import LoadTier
from mesh_loader.store import StoredModel
from mesh_nodes.engines.vllm import VllmEngine

ROUNDS = 7
KV_BLOCKS = 64
CONTEXT_TOKENS = 512
BATCH = 8
PROMPT = tuple(range(100, 148))
OUTPUT_TOKENS = 8
STEPS_MAX = 4 * OUTPUT_TOKENS
"""One for the prompt and one for each further token are enough."""


class Switched:
    """One engine, and an instance that comes and goes."""

    def __init__(self, stored: StoredModel, threads: int, asleep_max: int) -> None:
        self._engine = VllmEngine(threads=threads, asleep_max=asleep_max)
        self._engine.await_ready()
        self._stored = stored
        self._loads = 0

    def load_s(self, tier: LoadTier, batch_max: int) -> float:
        """Only another one for as many requests can be woken."""
        self._loads += 1
        self._instance = InstanceId(f"bench-{self._loads}")
        wanted = order(
            self._stored,
            kv_blocks=KV_BLOCKS,
            context_tokens_max=CONTEXT_TOKENS,
            batch_max=batch_max,
            instance_id=self._instance,
        )
        loaded = self._engine.load(wanted, no_progress)
        if loaded.tier is not tier:
            raise SystemExit(f"error: loaded from {loaded.tier}, not from {tier}")
        return loaded.elapsed_s

    def answer(self) -> tuple[int, ...]:
        self._engine.submit(self._instance, request("r", PROMPT, OUTPUT_TOKENS))
        tokens: list[int] = []
        for _ in range(STEPS_MAX):
            result = self._engine.step(self._instance, CONTEXT_TOKENS)
            tokens += [token for given in result.outputs for token in given.token_ids]
            if len(tokens) >= OUTPUT_TOKENS:
                return tuple(tokens)
        raise SystemExit(f"error: {len(tokens)} of {OUTPUT_TOKENS} tokens in {STEPS_MAX} steps")

    def unload_s(self) -> float:
        start_s = time.perf_counter()
        self._engine.unload(self._instance)
        return time.perf_counter() - start_s

    def close(self) -> None:
        self._engine.close()


def measure(rounds: int, threads: int) -> dict[str, list[float]]:
    """Seconds of every round but the first, which warms up."""
    stored = stored_model()
    as_is, sleeping = Switched(stored, threads, 0), Switched(stored, threads, 1)
    taken: dict[str, list[float]] = {
        name: [] for name in ("load_s_as_is", "load_s", "sleep_s", "wake_s", "again_s")
    }
    answers = set()
    try:
        for turn in range(rounds + 1):
            batch_max = BATCH + turn % 2
            taken["load_s_as_is"].append(as_is.load_s(LoadTier.DISK, batch_max))
            answers.add(as_is.answer())
            as_is.unload_s()
            taken["load_s"].append(sleeping.load_s(LoadTier.DISK, batch_max))
            answers.add(sleeping.answer())
            taken["sleep_s"].append(sleeping.unload_s())
            taken["wake_s"].append(sleeping.load_s(LoadTier.HOST, batch_max))
            answers.add(sleeping.answer())
            taken["again_s"].append(sleeping.unload_s())
    finally:
        as_is.close()
        sleeping.close()
    if len(answers) != 1:
        raise SystemExit(f"error: {len(answers)} different answers to one prompt")
    return {name: seconds[1:] for name, seconds in taken.items()}


def report(rounds: int, threads: int) -> None:
    taken = measure(rounds, threads)
    medians = {name: median(seconds) for name, seconds in taken.items()}
    words = {
        "load_s_as_is": "load from disk, nothing may sleep",
        "load_s": "load from disk, to a process that may sleep",
        "sleep_s": "sleep",
        "wake_s": "wake",
        "again_s": "sleep again",
    }
    show_table(
        ("", "median s", "least s", "most s"),
        [
            (text, *(f"{pick(taken[name]):.3f}" for pick in (median, min, max)))
            for name, text in words.items()
        ],
        title=f"SmolLM2-135M in float32, medians of {rounds} rounds",
    )
    figures = {name: round(seconds, 4) for name, seconds in medians.items()}
    ratio = median(
        load_s / wake_s for load_s, wake_s in zip(taken["load_s"], taken["wake_s"], strict=True)
    )
    last_line({**figures, "ratio": round(ratio, 2), "rounds": rounds, "threads": threads})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    with errors_told():
        report(options.rounds, options.threads)


if __name__ == "__main__":
    main()
