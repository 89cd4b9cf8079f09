"""What every engine is asked to do: prompts and outputs of one length, several at once."""

import random
from dataclasses import dataclass, replace

from mesh.domain.request import SamplingParams

CONCURRENCIES = (1, 8, 16)
PROMPT_TOKENS = 128
LONG_PROMPT_TOKENS = 2048
OUTPUT_TOKENS = 64
"""The output of every request: nobody stops at an end-of-sequence token."""
CONTEXT_TOKENS = LONG_PROMPT_TOKENS + OUTPUT_TOKENS
KV_TOKENS = max(CONCURRENCIES) * 256
"""Enough for all at once, and for a long prompt."""
THREADS = 2
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, top_k=40)

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """So many requests at once."""

    name: str
    count: int
    prompt_tokens: int = PROMPT_TOKENS
    output_tokens: int = OUTPUT_TOKENS
    sampled: bool = False

    @property
    def counted_tokens(self) -> int:
        """The tokens whose rate is told: output tokens, or those of the prompts where there is only
        a prefill.
        """
        each = self.prompt_tokens if self.output_tokens == 1 else self.output_tokens
        return self.count * each

    def prompts(self, vocabulary_tokens: int, seed: int) -> Prompts:
        """Random token ids, so that no engine can share a prefix; special tokens come first in the
        vocabulary and are left out.
        """
        draw = random.Random(seed)
        least = vocabulary_tokens // 100
        return [
            [draw.randrange(least, vocabulary_tokens) for _ in range(self.prompt_tokens)]
            for _ in range(self.count)
        ]


GREEDY = {count: Work(name=f"greedy {count}", count=count) for count in CONCURRENCIES}
SAMPLING = Work(name="sampled 8", count=8, sampled=True)
FIRST = Work(name="first token", count=1, output_tokens=1)
"""What of `GREEDY[1]` is no decode."""
PREFILL = Work(name="prefill 2048", count=1, prompt_tokens=LONG_PROMPT_TOKENS, output_tokens=1)
WORKS = (*GREEDY.values(), SAMPLING, FIRST, PREFILL)


def shortened(work: Work, output_tokens: int) -> Work:
    """With answers of so many tokens at most."""
    return replace(work, output_tokens=min(work.output_tokens, output_tokens))
