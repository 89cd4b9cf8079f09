"""How large a KV cache is to be: the demand of its requests, and a watermark against ping-pong.

Eq. 2 of LLM-Mesh (§6.1) with one refinement: no request is expected to write more than it may. A
cache grows early and by more than is needed, and shrinks late (§6.2). All sizes are in KV blocks,
since that is what an engine can give; each request begins its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    """Settings of a cell."""

    share: float = 0.25
    """w of LLM-Mesh §6.2: what is recommended over what is required."""
    least_tokens: int | None = None
    """L_min of §6.1; None: one full context, as in the paper."""

    def recommended(self, required: int) -> int:
        """Blocks to grow to, or to shrink to."""
        return ceil(required * (1.0 + self.share))

    def target(self, current: int, required: int) -> int:
        """Blocks that the cache should have: more than it has if it does not do, fewer if it is
        far too large, else what it has.
        """
        recommended = self.recommended(required)
        if current < required or recommended * (1.0 + self.share) < current:
            return recommended
        return current


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Of one request, in tokens."""

    prompt_tokens: int
    output_tokens: int
    """So far."""
    output_tokens_max: int

    def tokens(self, output_tokens_mean: float) -> int:
        """I + max(O, mean O), of eq. 2."""
        expected = max(self.output_tokens, ceil(output_tokens_mean))
        return self.prompt_tokens + min(expected, self.output_tokens_max)


def required_blocks(
    demands: Iterable[Demand],
    *,
    output_tokens_mean: float,
    block_tokens: int,
    least_tokens: int,
) -> int:
    """M_require of eq. 2, in blocks of `block_tokens` tokens."""
    blocks = sum(-(-demand.tokens(output_tokens_mean) // block_tokens) for demand in demands)
    return max(blocks, -(-least_tokens // block_tokens))
