"""Measures loads from disk and from the pool, sleeps and wakes of the demo model.

Each round has an engine of its own, which loads an instance from disk, puts it to sleep, wakes it,
puts it to sleep again and loads one of other limits, in another process, from the weights that
stand in the pool; every one of them answers a prompt, and all answers must be the same. The last
line is one JSON object with the medians: `load_s`, `pooled_s` (a load from the pool), `sleep_s`,
`wake_s`, `again_s` (a sleep of what has slept before), `ratio` of load to wake and `pooled_ratio`
of load to load from the pool in a round, and `load_s_as_is` where nothing may sleep.
"""

import os
from statistics import median

from bench.demo_model import stored_model
from bench.driving import no_progress, order, request
from bench.harness import Report, spread_table, timed
from mesh.domain.ids import InstanceId
from mesh.domain.steps import LoadTier
from mesh_loader.store import StoredModel
from mesh_nodes.engines.vllm import VllmEngine, start_spawner
from mesh_nodes.engines.vllm.spawner import Spawner

KV_BLOCKS = 64
CONTEXT_TOKENS = 512
BATCH = 8
PROMPT = tuple(range(100, 148))
OUTPUT_TOKENS = 8
STEPS_MAX = 4 * OUTPUT_TOKENS
"""One for the prompt and one for each further token are enough."""
WORDS = {
    "load_s_as_is": "load from disk, nothing may sleep",
    "load_s": "load from disk, to a process that may sleep",
    "pooled_s": "load from the pool, to another process",
    "sleep_s": "sleep",
    "wake_s": "wake",
    "again_s": "sleep again",
}


class Switched:
    """One engine, and an instance that comes and goes."""

    def __init__(self, stored: StoredModel, spawner: Spawner, asleep_max: int) -> None:
        self._engine = VllmEngine(spawner=spawner, asleep_max=asleep_max)
        self._stored = stored
        self.close = self._engine.close
        self._loads = 0

    def load_s(self, tier: LoadTier, batch_max: int = BATCH) -> float:
        """What sleeps is woken for as many requests alone."""
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
        return timed(lambda: self._engine.unload(self._instance))[0]


def measure(rounds: int, threads: int) -> dict[str, list[float]]:
    """Seconds of every round but the first, which warms up."""
    stored, spawner = stored_model(), start_spawner(threads)
    taken: dict[str, list[float]] = {name: [] for name in WORDS}
    answers = set()
    try:
        spawner.await_ready()
        for _ in range(rounds + 1):
            for asleep_max in (0, 1):
                switched = Switched(stored, spawner, asleep_max)
                try:
                    answers |= one_round(switched, taken, sleeps=bool(asleep_max))
                finally:
                    switched.close()
    finally:
        spawner.close()
    if len(answers) != 1:
        raise SystemExit(f"error: {len(answers)} different answers to one prompt")
    return {name: seconds[1:] for name, seconds in taken.items()}


def one_round(
    switched: Switched, taken: dict[str, list[float]], *, sleeps: bool
) -> set[tuple[int, ...]]:
    """The answers of all that was loaded."""
    taken["load_s" if sleeps else "load_s_as_is"].append(switched.load_s(LoadTier.DISK))
    answers = {switched.answer()}
    slept_s = switched.unload_s()
    if sleeps:
        taken["sleep_s"].append(slept_s)
        taken["wake_s"].append(switched.load_s(LoadTier.HOST))
        answers.add(switched.answer())
        taken["again_s"].append(switched.unload_s())
        taken["pooled_s"].append(switched.load_s(LoadTier.HOST, BATCH + 1))
        answers.add(switched.answer())
    return answers


def run(*, rounds: int = 7, threads: int = len(os.sched_getaffinity(0))) -> Report:
    taken = measure(rounds, threads)
    title = f"SmolLM2-135M in float32, medians of {rounds} rounds"
    table = spread_table({text: taken[name] for name, text in WORDS.items()}, "", title)
    ratios = {
        key: round(median(a / b for a, b in zip(taken["load_s"], taken[name], strict=True)), 2)
        for key, name in (("ratio", "wake_s"), ("pooled_ratio", "pooled_s"))
    }
    medians = {name: round(median(seconds), 4) for name, seconds in taken.items()}
    return Report(
        figures={**medians, **ratios, "rounds": rounds, "threads": threads}, shown=[table]
    )
