"""Times the choice of 32 tokens from 128k and 49k logits each, beside the same by the book.

By the book is row by row: a softmax, for top-p a sort of what is likely, a running total. Logits
are normal, either with five tokens far above the rest, as language models have them, or without
(`flat`), where thousands of tokens are in the nucleus. Times are medians of one thread's CPU time,
so that neighbours on the machine count for little. The last line is one JSON object; its bare keys
are those of peaked logits and 128k.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import numpy.typing as npt

from bench.harness import Report, Table
from mesh.domain.request import SamplingParams
from mesh_nodes.engines.sampling import Draw, choose

ROWS = 32
VOCABULARIES = (131_072, 49_152)
DEVIATION = 2.5
PEAKS = (20.0, 19.0, 18.0, 17.0, 16.0)
"""By which five tokens of a peaked row are above the others."""
WAYS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.8),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95),
    "top_k": SamplingParams(temperature=0.8, top_k=50),
}

Floats = npt.NDArray[np.float32]


def logits_of(vocabulary: int, *, peaked: bool, rng: np.random.Generator) -> Floats:
    logits = (rng.standard_normal((ROWS, vocabulary)) * DEVIATION).astype(np.float32)
    if peaked:
        for row in logits:
            row[rng.integers(0, vocabulary, len(PEAKS))] += np.array(PEAKS, np.float32)
    return logits


def by_the_book(row: Floats, sampling: SamplingParams, number: float) -> int:
    if sampling.temperature <= 0:
        return int(row.argmax())
    weights = np.exp((row - row.max()) / np.float32(sampling.temperature))
    kept = np.arange(row.size)
    if sampling.top_k:
        kept = np.sort(np.argpartition(row, row.size - sampling.top_k)[-sampling.top_k :])
    elif sampling.top_p < 1:
        likely = np.flatnonzero(weights > 1e-4)
        kept = likely[np.argsort(-weights[likely], kind="stable")]
        running = np.cumsum(weights[kept], dtype=np.float64)
        kept = kept[: int(running.searchsorted(sampling.top_p * weights.sum())) + 1]
    running = np.cumsum(weights[kept], dtype=np.float64)
    return int(kept[min(int(running.searchsorted(number * running[-1])), kept.size - 1)])


def ours(logits: Floats, sampling: SamplingParams, index: int) -> None:
    choose(logits, [Draw(sampling, row, index, None) for row in range(ROWS)])


def book(logits: Floats, sampling: SamplingParams, index: int) -> None:
    numbers = np.random.default_rng(index).random(ROWS)
    for row, number in zip(logits, numbers.tolist(), strict=True):
        by_the_book(row, sampling, number)


def measured_ms(run: Callable[[int], object], rounds: int) -> float:
    times_s = []
    for index in range(rounds + 2):
        start_s = time.thread_time()
        run(index)
        times_s.append(time.thread_time() - start_s)
    return 1e3 * median(times_s[2:])


def run(*, rounds: int = 40) -> Report:
    rng = np.random.default_rng(0)
    figures: dict[str, object] = {"rows": ROWS}
    lines = []
    for vocabulary in VOCABULARIES:
        for peaked in (True, False):
            logits = logits_of(vocabulary, peaked=peaked, rng=rng)
            for name, sampling in WAYS.items():
                ours_ms = measured_ms(partial(ours, logits, sampling), rounds)
                book_ms = measured_ms(partial(book, logits, sampling), rounds // 8 + 1)
                size, kind = f"{vocabulary // 1024}k", "peaked" if peaked else "flat"
                key = name + ("" if peaked else "_flat")
                key += "" if vocabulary == VOCABULARIES[0] else f"_{size}"
                figures[f"{key}_ms"] = round(ours_ms, 3)
                figures[f"{key}_by_the_book_ms"] = round(book_ms, 3)
                lines.append((size, kind, name, f"{book_ms:.2f}", f"{ours_ms:.2f}"))
    headings = ("VOCABULARY", "LOGITS", "SAMPLING", "BY THE BOOK MS", "MS")
    return Report(figures=figures, shown=[Table(headings=headings, rows=lines, words=3)])
