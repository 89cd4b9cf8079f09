"""Service level objectives and headroom, the measure of urgency that all scheduling rests on."""

from dataclasses import dataclass
from enum import StrEnum


class ColdStart(StrEnum):
    """What becomes of a request that only a load makes late."""

    LATE = "late"
    """It is taken, and its caller is told by how much it may be late."""
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a deployment promises for each request (LLM-Mesh §3.1).

    The first token is due `max(ttft_s, prompt tokens / ttft_tokens_per_s)` after arrival, every
    further one `tpot_s` later than the one before it was due.
    """

    ttft_s: float = 2.0
    ttft_tokens_per_s: float = 512.0
    tpot_s: float = 0.25
    cold_start: ColdStart = ColdStart.LATE

    def ttft_limit_s(self, prompt_tokens: int) -> float:
        """Seconds from arrival by which the first token of a prompt of this length is due."""
        return max(self.ttft_s, prompt_tokens / self.ttft_tokens_per_s)


def due_s(*, start_s: float, ttft_limit_s: float, tpot_s: float, output_tokens: int) -> float:
    """When the next token is due, with `output_tokens` generated so far.

    Less the current time that is the headroom: the seconds by which the token may still be delayed
    (LLM-Mesh §5.1, eq. 1). Negative once the SLO is violated.
    """
    return start_s + ttft_limit_s + tpot_s * output_tokens


def next_due_s(due_s: float, tpot_s: float, now_s: float, tokens: int = 1) -> float:
    """When the token after so many of which the first was due at `due_s`, and which came now, is
    due for the scheduler.

    A token that came late is forgiven: the request continues at the pace of its SLO from there. Its
    SLO is lost, and were it to catch up at the expense of others, theirs would be, too (the domino
    effect of earliest deadline first under overload).
    """
    return (due_s if due_s > now_s else now_s) + tokens * tpot_s
