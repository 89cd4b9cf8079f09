"""What every engine is asked to do: prompts and outputs of one length, several at once."""

import random

CONCURRENCIES = (1, 8, 16)
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 64
"""Of every request: nobody stops at an end-of-sequence token."""
CONTEXT_TOKENS = 256
THREADS = 2

Prompts = list[list[int]]


def prompts(count: int, vocabulary_tokens: int, seed: int) -> Prompts:
    """Random token ids, so that no engine can share a prefix; special tokens come first in the
    vocabulary and are left out."""
    draw = random.Random(seed)
    return [
        [draw.randrange(vocabulary_tokens // 100, vocabulary_tokens) for _ in range(PROMPT_TOKENS)]
        for _ in range(count)
    ]
