"""The two questions asked of the bare engine and of a whole cell, and their answers."""

from dataclasses import dataclass
from itertools import pairwise

PROMPT_TOKENS = tuple(range(100, 116))
"""Short, so that what is added is not lost in the noise of a long prefill."""
BATCH = 8
BATCH_TOKENS = 64
TTFT_REPEATS = 8
KV_TOKENS = 16384
CONTEXT_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Milliseconds: each first token of a lone request, each token of a batch of eight."""

    ttft_ms: tuple[float, ...]
    token_ms: tuple[float, ...]


def steady(times_s: list[list[float]]) -> tuple[float, ...]:
    """Milliseconds between tokens while every stream of the batch is decoding.

    `times_s` holds the arrival times of each stream's tokens. The first gap of a stream may hold
    another's prefill, and streams that ended early leave a smaller batch: both are left out.
    """
    start_s = max(stream[1] for stream in times_s)
    end_s = min(stream[-1] for stream in times_s)
    return tuple(
        1e3 * (after - before)
        for stream in times_s
        for before, after in pairwise(stream)
        if before >= start_s and after <= end_s
    )
