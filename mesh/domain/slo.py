"""Service level objectives and headroom, the measure of urgency that all scheduling rests on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a deployment promises for each request (LLM-Mesh §3.1).

    The first token is due `max(ttft_s, prompt tokens / ttft_tokens_per_s)` after arrival, every
    further one `tpot_s` later than the one before it was due.
    """

    ttft_s: float = 2.0
    ttft_tokens_per_s: float = 512.0
    tpot_s: float = 0.25

    def ttft_limit_s(self, prompt_tokens: int) -> float:
        """Seconds from arrival by which the first token of a prompt of this length is due."""
        return max(self.ttft_s, prompt_tokens / self.ttft_tokens_per_s)


def headroom_s(
    *, start_s: float, ttft_limit_s: float, tpot_s: float, output_tokens: int, now_s: float
) -> float:
    """Seconds by which the next token may still be delayed (LLM-Mesh §5.1, eq. 1).

    `output_tokens` counts the tokens generated so far. Negative once the SLO is violated.
    """
    return start_s + ttft_limit_s + tpot_s * output_tokens - now_s
