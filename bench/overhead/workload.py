"""The two questions asked of the bare engine and of a whole cell, and their answers."""

from dataclasses import dataclass

from mesh.domain.slo import Slo

PROMPT_TOKENS = tuple(range(100, 116))
"""Short, so that what is added is not lost in the noise of a long prefill."""
BATCH = 8
BATCH_TOKENS = 64
TTFT_REPEATS = 8
LONE_EVERY_S = 0.5
"""Several times what a request of one token takes. Of the bare engine, too: one that has rested
finds its caches cold.
"""
KV_TOKENS = 16384
SLO = Slo(ttft_s=60.0, tpot_s=5.0)
"""None is refused: what is measured is what the cell adds."""
CONTEXT_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Milliseconds: first tokens of lone requests, means per token of eight streams at once."""

    ttft_ms: tuple[float, ...]
    token_ms: tuple[float, ...]


def steady(times_s: list[list[float]]) -> tuple[float, ...]:
    """Milliseconds per token of each stream, while every stream of the batch is decoding.

    `times_s` holds the arrival times of each stream's tokens. A mean over the window, since several
    tokens may arrive in one message. The first gap of a stream may hold another's prefill, and
    streams that ended early leave a smaller batch: both are outside the window.
    """
    start_s = max(stream[1] for stream in times_s)
    end_s = min(stream[-1] for stream in times_s)
    windows = [[at for at in stream if start_s <= at <= end_s] for stream in times_s]
    return tuple(1e3 * (w[-1] - w[0]) / (len(w) - 1) for w in windows if len(w) > 1)
