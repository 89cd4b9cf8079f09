"""What the requests of a deployment have shown: how long answers turn out, and how long after the
one before it each call comes.

The mean length is O of LLM-Mesh eq. 2. Up to WINDOW requests it is their plain mean, with the
prior; from then on each new one counts for 1/WINDOW and the older ones fade. The times between
calls are a histogram, as in "Serverless in the Wild" (ATC 2020), section 4.2, with bins that widen
with the time: a timer's calls all fall into one or two of them.
"""

from dataclasses import dataclass, field, replace
from math import log2

WINDOW = 256
PRIOR_TOKENS = 128.0
"""The mean that is expected before the first answer has ended; it counts as much as PRIOR_COUNT
answers.
"""
PRIOR_COUNT = 4
GAP_LEAST_S = 0.25
"""The end of the first bin."""
BINS_PER_OCTAVE = 4
BINS_MAX = 80
"""The last bin ends after 2.5 days; what is longer falls into it, too."""
GAPS_KEPT_SHARE = 0.98
"""Each gap lowers the weight of those before it that are no longer to this share. Longer ones keep
theirs: of what comes after a longer pause it says nothing, and the calls of a burst would else make
a deployment forget how long its pauses are.
"""
CHANCE_MOST = 1.0 - 1e-6
"""No call is certain."""
PRIOR_GAPS = 1.0
"""The weight, in gaps, of what is expected by the rate of calls alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGaps:
    """The times between the calls of one deployment. It is a value: `after` gives the next one."""

    weights: tuple[float, ...] = ()
    """By bin, BINS_MAX at most."""

    def after(self, gap_s: float) -> "CallGaps":
        """One more call has come, so long after the one before it."""
        octaves = log2(gap_s / GAP_LEAST_S) if gap_s > GAP_LEAST_S else -1.0
        falls = min(int(octaves * BINS_PER_OCTAVE) + 1, BINS_MAX - 1) if octaves >= 0.0 else 0
        shorter, longer = self.weights[: falls + 1], self.weights[falls + 1 :]
        weights = [*(weight * GAPS_KEPT_SHARE for weight in shorter), *longer]
        weights += [0.0] * (falls + 1 - len(weights))
        weights[falls] += 1.0
        return CallGaps(weights=tuple(weights))

    def bounded(self) -> "CallGaps":
        """Without weights beyond the last bin, as another version may have stored them."""
        return CallGaps(weights=self.weights[:BINS_MAX])

    def chance(self, idle_s: float, within_s: float, by_rate: float) -> float:
        """The probability of a call `within_s` from now where none has come for `idle_s`, and
        `by_rate` is that probability by the rate of calls alone.
        """
        until_s = idle_s + within_s
        comes, left, begin_s = PRIOR_GAPS * by_rate, PRIOR_GAPS, 0.0
        for number, weight in enumerate(self.weights):
            end_s = _BIN_ENDS_S[number]
            if weight and end_s > idle_s:
                # Within a bin all times are as likely.
                first_s = max(begin_s, idle_s)
                stays = weight * (end_s - first_s) / (end_s - begin_s)
                left += stays
                comes += stays * min(max(until_s - first_s, 0.0) / (end_s - first_s), 1.0)
            begin_s = end_s
        return min(comes / left, CHANCE_MOST)


_BIN_ENDS_S = [GAP_LEAST_S * 2 ** (number / BINS_PER_OCTAVE) for number in range(BINS_MAX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputHistory:
    """The requests of one deployment so far. It is a value: `after` and `called` give the next."""

    mean_tokens: float = PRIOR_TOKENS
    count: int = PRIOR_COUNT
    """Requests in the mean, WINDOW at most."""
    gaps: CallGaps = field(default_factory=CallGaps)
    classes: tuple[tuple[str, float, int], ...] = ()
    """The mean and the count of each SLO class of which a request has ended, by its name."""

    def mean_of(self, slo_class: str) -> float:
        """The mean length of the answers of a class; of all, before one of it has ended."""
        return next((mean for name, mean, _ in self.classes if name == slo_class), self.mean_tokens)

    def after(self, output_tokens: int, slo_class: str = "") -> "OutputHistory":
        """One more request has ended with so many tokens."""
        count = min(self.count + 1, WINDOW)
        mean_tokens = self.mean_tokens + (output_tokens - self.mean_tokens) / count
        found = replace(self, mean_tokens=mean_tokens, count=count)
        if not slo_class:
            return found
        known = {name: (mean, count) for name, mean, count in self.classes}
        mean, count = known.get(slo_class, (self.mean_tokens, PRIOR_COUNT))
        count = min(count + 1, WINDOW)
        known[slo_class] = mean + (output_tokens - mean) / count, count
        return replace(found, classes=tuple((name, *of) for name, of in sorted(known.items())))

    def called(self, gap_s: float) -> "OutputHistory":
        """One more call has come, so long after the one before it."""
        return replace(self, gaps=self.gaps.after(gap_s))
