"""What the requests of a deployment have shown: how long answers turn out, and how long after the
one before it each call comes.

The mean length is O of LLM-Mesh eq. 2. Up to WINDOW requests it is their plain mean, with the
prior; from then on each new one counts for 1/WINDOW and the older ones fade. The times between
calls are a histogram, as in "Serverless in the Wild" (ATC 2020), section 4.2, with bins that widen
with the time: a timer's calls all fall into one or two of them.
"""

from dataclasses import field
from math import exp, log2

from mesh.domain.values import dataclass, replace

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
"""Each gap lowers the counts of the bins that it reaches to this share. Those of longer bins keep
theirs: it says nothing of them, and the calls of a burst would else make a deployment forget how
long its pauses are.
"""
GAPS_FORGOTTEN_S = 7 * 24 * 3600.0
"""The time in which all counts fall to 37 %: bins that no gap reaches any more are forgotten."""
CHANCE_MOST = 1.0 - 1e-6
"""No call is certain."""
PRIOR_GAPS = 1.0
"""How many gaps the expectation by the rate of calls alone counts for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGaps:
    """The times between the calls of one deployment, as hazards: of the gaps that reached a bin,
    how many ended in it. It is a value: `after` gives the next one.
    """

    ended: tuple[float, ...] = ()
    reached: tuple[float, ...] = ()
    """Counts of gaps by bin, BINS_MAX at most: each fades with the gaps that reach its bin."""

    def after(self, gap_s: float) -> "CallGaps":
        """One more call has come, so long after the one before it."""
        octaves = log2(gap_s / GAP_LEAST_S) if gap_s > GAP_LEAST_S else -1.0
        ends_in = min(int(octaves * BINS_PER_OCTAVE) + 1, BINS_MAX - 1) if octaves >= 0.0 else 0
        by_time = exp(-gap_s / GAPS_FORGOTTEN_S)
        kept, more, upto = by_time * GAPS_KEPT_SHARE, ends_in + 1 - len(self.ended), ends_in + 1
        ended = [count * kept for count in (*self.ended[:upto], *[0.0] * more)]
        reached = [count * kept + 1.0 for count in (*self.reached[:upto], *[0.0] * more)]
        ended[ends_in] += 1.0
        ended += [count * by_time for count in self.ended[upto:]]
        reached += [count * by_time for count in self.reached[upto:]]
        return CallGaps(ended=tuple(ended), reached=tuple(reached))

    def valid(self) -> "CallGaps":
        """Without bins beyond the last one; empty where another version has stored other counts."""
        if len(self.ended) != len(self.reached):
            return CallGaps()
        return CallGaps(ended=self.ended[:BINS_MAX], reached=self.reached[:BINS_MAX])

    def chance(self, idle_s: float, within_s: float, calls_per_s: float) -> float:
        """The probability of a call `within_s` from now where none has come for `idle_s`: 1 less
        the product, over the bins until then, of the probability that none comes in it. Calls at
        the rate alone count for PRIOR_GAPS, fewer in each further bin.
        """
        at_s, until_s = idle_s, idle_s + within_s
        begin_s, prior, none_comes = 0.0, PRIOR_GAPS, 1.0
        for end_s, ended, reached in zip(_BIN_ENDS_S, self.ended, self.reached, strict=False):
            if end_s > at_s:
                # Within a bin all times are as likely.
                left = ended * (end_s - at_s) / (end_s - begin_s)
                upto_s = min(end_s, until_s)
                comes = left * (upto_s - at_s) / (end_s - at_s)
                prior_left = prior * exp(-calls_per_s * (upto_s - at_s))
                stays = reached - (ended - left) + prior
                none_comes *= 1.0 - (comes + prior - prior_left) / stays if stays else 1.0
                at_s, prior = upto_s, prior_left
                if at_s >= until_s:
                    break
            begin_s = end_s
        none_comes *= exp(-calls_per_s * (until_s - at_s))
        return min(1.0 - none_comes, CHANCE_MOST)


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
        # Policies ask for each server that they look at: a generator takes twice as long as a loop.
        for name, mean, _ in self.classes:
            if name == slo_class:
                return mean
        return self.mean_tokens

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
