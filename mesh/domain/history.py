"""How long answers turn out: the mean output length of a deployment, from its last requests.

The mean O of LLM-Mesh eq. 2. Up to WINDOW requests it is their plain mean, with the prior; from
then on each new one counts for 1/WINDOW and the older ones fade. Two numbers are all that is kept.
"""

from dataclasses import dataclass

WINDOW = 256
PRIOR_TOKENS = 128.0
"""The mean that is expected before the first answer has ended; it counts as much as PRIOR_COUNT
answers.
"""
PRIOR_COUNT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputHistory:
    """The answers of one deployment so far. It is a value: `after` gives the next one."""

    mean_tokens: float = PRIOR_TOKENS
    count: int = PRIOR_COUNT
    """Requests in the mean, WINDOW at most."""

    def after(self, output_tokens: int) -> "OutputHistory":
        """One more request has ended with so many tokens."""
        count = min(self.count + 1, WINDOW)
        mean_tokens = self.mean_tokens + (output_tokens - self.mean_tokens) / count
        return OutputHistory(mean_tokens=mean_tokens, count=count)
