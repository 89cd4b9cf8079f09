"""How large a KV cache is to be: the demand of its requests, and a watermark against ping-pong.

A request's term of eq. 2 of LLM-Mesh (§6.1) with one refinement: none is expected to write more
than it may. A cache grows early and by more than is needed, and shrinks late (§6.2).
The controller core adds the terms up in KV blocks, of which each request begins its own.
"""

from math import ceil


def recommended(required: int, share: float = 0.25) -> int:
    """Blocks to grow to, or to shrink to, where so many are required: w of §6.2 more."""
    return ceil(required * (1.0 + share))


def expected_tokens(
    prompt_tokens: int, output_tokens: int, *, output_tokens_max: int, output_tokens_mean: float
) -> int:
    """I + max(O, mean O) of one request, of eq. 2; `output_tokens` are those so far."""
    expected = max(output_tokens, ceil(output_tokens_mean))
    return prompt_tokens + min(expected, output_tokens_max)
