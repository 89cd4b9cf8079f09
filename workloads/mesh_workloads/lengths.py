"""Lengths of prompts and answers, drawn from tables of quantiles.

Published traces have several modes (prompts of a few fixed templates, answers cut at a limit),
which no lognormal fits; a table of quantiles does. Between two of them the logarithm of the length
is interpolated. `published` has the tables; function traces and the generator draw here.
"""

import math
import random
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from mesh.domain.errors import InvalidInput
from mesh_workloads.trace import TOKENS_MAX

DRAWS_MAX = 100
"""Until a request fits into the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """`tokens[i]` is the length that the share `shares[i]` of the requests does not exceed.

    Shares ascend from 0 to 1; lengths never descend and are at least 1.
    """

    shares: tuple[float, ...]
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.shares) != len(self.tokens) or len(self.shares) < 2:
            raise InvalidInput(
                f"a table of quantiles has {len(self.shares)} shares and {len(self.tokens)} "
                "lengths; it needs as many of both, at least two"
            )
        ascending = all(a < b for a, b in pairwise(self.shares))
        if not ascending or self.shares[0] != 0.0 or self.shares[-1] != 1.0:
            raise InvalidInput(f"shares must ascend from 0 to 1; they are {self.shares}")
        rising = all(a <= b for a, b in pairwise(self.tokens))
        if not rising or self.tokens[0] < 1 or self.tokens[-1] > TOKENS_MAX:
            raise InvalidInput(f"lengths must rise from 1 to {TOKENS_MAX}; they are {self.tokens}")

    def at(self, share: float) -> int:
        """The quantile of a share from 0 to 1."""
        right = min(bisect_right(self.shares, share), len(self.shares) - 1)
        low, high = self.tokens[right - 1], self.tokens[right]
        width = self.shares[right] - self.shares[right - 1]
        part = (share - self.shares[right - 1]) / width
        return round(low * math.exp(part * math.log(high / low)))

    def mean(self) -> float:
        """The mean of the interpolated table, in tokens."""
        total = 0.0
        for i in range(len(self.shares) - 1):
            low, high = self.tokens[i], self.tokens[i + 1]
            mean = float(low) if low == high else (high - low) / math.log(high / low)
            total += (self.shares[i + 1] - self.shares[i]) * mean
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The lengths of requests: prompt and answer are drawn independently of each other.

    In the Azure LLM traces their rank correlation is 0.07 (conversation) and -0.02 (code).
    """

    name: str
    input: Quantiles
    output: Quantiles
    context_tokens_max: int | None = None
    """Both together; None for no limit. Longer requests are drawn again."""

    def draw(self, draw: random.Random) -> tuple[int, int]:
        """Tokens of a prompt and of its answer.

        Raises InvalidInput when no request fits into the context.
        """
        for _ in range(DRAWS_MAX):
            tokens = self.input.at(draw.random()), self.output.at(draw.random())
            if self.context_tokens_max is None or sum(tokens) <= self.context_tokens_max:
                return tokens
        raise InvalidInput(
            f"lengths {self.name}: {DRAWS_MAX} requests in a row were longer than a context of "
            f"{self.context_tokens_max} tokens",
            hint="raise context_tokens_max or choose shorter lengths",
        )
