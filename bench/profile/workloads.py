"""What is predicted and then measured: prompts of every length, batches of every size."""

import random
from dataclasses import dataclass
from math import exp, log

BATCH_MAX = 32
PROMPT_TOKENS_MAX = 1800
CONTEXT_TOKENS = (32, 1024)
"""Mean contexts of a batch."""
MIXED = (0.25, 1.75)
"""Contexts of one batch, over their mean."""
NOISY_CONTEXT_TOKENS = (32, 384)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Requests with contexts of these lengths are computed once; then batches of them decode, the
    largest first: filling the cache anew for each batch would take most of the time.
    """

    context_tokens: tuple[int, ...]
    batches: tuple[int, ...]
    """Descending; the first is of all requests."""


def prompts(draw: random.Random, count: int) -> list[int]:
    """Lengths in tokens, as many short as long ones (log-uniform)."""
    return [round(exp(draw.uniform(0.0, log(PROMPT_TOKENS_MAX)))) for _ in range(count)]


def sweeps(draw: random.Random, batches: int, count: int) -> list[Sweep]:
    """So many batches of random sizes in so many sweeps, whose mean contexts cover the range."""
    least, most = CONTEXT_TOKENS
    found = []
    for number in range(count):
        mean = least + (most - least) * (number + draw.random()) / count
        share = batches * (number + 1) // count - batches * number // count
        sizes = sorted((draw.randint(1, BATCH_MAX) for _ in range(share)), reverse=True)
        contexts = tuple(round(mean * draw.uniform(*MIXED)) for _ in range(max(sizes, default=0)))
        found.append(Sweep(context_tokens=contexts, batches=tuple(sizes)))
    return found


def noisy_batches(draw: random.Random, count: int) -> list[int]:
    """Sizes of batches that follow each other beside a noisy neighbour."""
    return [draw.randint(1, BATCH_MAX) for _ in range(count)]
