"""What both contenders compute: eight requests, prefilled at once and then decoded together."""

BATCH = 8
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 64
CONTEXT_TOKENS = 512
BLOCK_TOKENS = 32
KV_BLOCKS = BATCH * CONTEXT_TOKENS // BLOCK_TOKENS
PREFILL_TOKENS_MAX = 256


def prompt(number: int) -> list[int]:
    """Another one for each request."""
    return [100 + (number * 37 + index * 11) % 4000 for index in range(PROMPT_TOKENS)]
