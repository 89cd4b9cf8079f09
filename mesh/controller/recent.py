"""What came of the calls of the last five minutes, by deployment, and the cell's last 15 minutes.

The meter tells each end and each token; whoever samples tells the queue. A deployment keeps at most
CALLS_MAX ends, so that a flood shortens the window, which says so, and never costs memory.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict

from mesh.domain.reasons import RefusalReason
from mesh.domain.recent import CellGauges, CellSample, RecentCalls
from mesh.domain.values import dataclass, replace
from mesh.report.distribution import Distribution

WINDOW_S = 300.0
CALLS_MAX = 1_000
"""At most so many ends of a deployment are kept, and of all together."""
STEP_S = 6.0
"""A window that these fill is shorter, and told to a tenth of a minute."""
SAMPLES_MAX = 900
"""A quarter of an hour at one sample a second."""
LOOK_S, LOOKS_MAX = 14.0, 5_760
"""The gauges of one sample in so many seconds are kept, for a day."""
_NO_GAUGES = CellGauges()
ALL = "*"
"""The key under which the calls of all deployments count together."""


@dataclass(frozen=True, slots=True)
class _End:
    at_s: float
    refused: RefusalReason | None = None
    met: bool = False
    ttft_s: float = 0.0
    tpot_s: float | None = None


class Recent:
    """Owns the windows and the samples. Times are those of the host's clock, in seconds."""

    def __init__(self) -> None:
        self._ends: dict[str, deque[_End]] = {}
        self._changes: Counter[str] = Counter()
        """How often an end of each deployment has come or gone."""
        self._said: dict[tuple[str, ...], tuple[int, RecentCalls]] = {}
        """What was counted last, and the changes until then."""
        self._tokens = 0
        self._refused = 0
        self._sampled: tuple[float, int, int] | None = None
        """When the last sample was taken, and the tokens and refusals until then."""
        self.samples: deque[CellSample] = deque(maxlen=SAMPLES_MAX)
        self.looks: deque[tuple[float, CellGauges]] = deque(maxlen=LOOKS_MAX)
        """How the nodes stood within the last day, for reports."""

    def tokens(self, count: int) -> None:
        self._tokens += count

    def finished(
        self, now_s: float, name: str, *, ttft_s: float, tpot_s: float | None, met: bool
    ) -> None:
        """`tpot_s`: the mean of the call, or `None` for one of a single token."""
        self._end(name, _End(now_s, met=met, ttft_s=ttft_s, tpot_s=tpot_s))

    def refused(self, now_s: float, name: str, reason: RefusalReason) -> None:
        self._refused += 1
        self._end(name, _End(now_s, refused=reason))

    def forget(self, name: str) -> None:
        """Its deployment was removed."""
        self._ends.pop(name, None)
        self._changes.pop(name, None)
        self._said.clear()

    def calls(self, now_s: float, names: tuple[str, ...] = (ALL,)) -> RecentCalls:
        """The window of these deployments together: that of the one whose window is shortest."""
        for name in names:
            self._expire(now_s, name)
        of_all = [self._ends[name] for name in names if name in self._ends]
        full_from_s = (ends[0].at_s for ends in of_all if len(ends) == CALLS_MAX)
        from_s = max(full_from_s, default=now_s - WINDOW_S)
        changes = sum(self._changes[name] for name in names)
        known = self._said.get(names)
        if known is None or known[0] != changes:
            counted = [end for ends in of_all for end in ends if end.at_s >= from_s]
            known = self._said[names] = changes, _counted(counted)
        window_s = min(WINDOW_S, max(round((now_s - from_s) / STEP_S), 1) * STEP_S)
        return known[1] if window_s == WINDOW_S else replace(known[1], window_s=window_s)

    def _expire(self, now_s: float, name: str) -> None:
        ends = self._ends.get(name)
        while ends and ends[0].at_s < now_s - WINDOW_S:
            ends.popleft()
            self._changes[name] += 1

    def sample(
        self,
        now_s: float,
        time_unix_s: float,
        *,
        running: int,
        queued: int,
        gauges: CellGauges = _NO_GAUGES,
    ) -> None:
        """Keep how the cell stands, for charts."""
        seen = gauges.nodes_ready is not None
        if seen and (not self.looks or now_s - self.looks[-1][0] >= LOOK_S):
            self.looks.append((now_s, gauges))
        since_s, tokens, refused = self._sampled or (now_s - 1.0, self._tokens, self._refused)
        span_s = max(now_s - since_s, 1e-3)
        self._sampled = now_s, self._tokens, self._refused
        self.samples.append(
            CellSample(
                time_unix_s=time_unix_s,
                running=running,
                queued=queued,
                tokens_per_s=(self._tokens - tokens) / span_s,
                refused_per_s=(self._refused - refused) / span_s,
                attainment=self.calls(now_s).attainment,
                **asdict(gauges),
            )
        )

    def _end(self, name: str, end: _End) -> None:
        for key in (name, ALL):
            self._changes[key] += 1
            self._ends.setdefault(key, deque(maxlen=CALLS_MAX)).append(end)


def _counted(ends: Sequence[_End]) -> RecentCalls:
    done = [end for end in ends if end.refused is None]
    ttft = Distribution.of(end.ttft_s for end in done)
    tpot = Distribution.of(end.tpot_s for end in done)
    refused = Counter(end.refused for end in ends if end.refused is not None)
    return RecentCalls(
        window_s=WINDOW_S,
        finished=len(done),
        met=sum(end.met for end in done),
        refused=tuple(sorted(refused.items())),
        ttft_p50_s=ttft.at(50),
        ttft_p95_s=ttft.at(95),
        tpot_p50_s=tpot.at(50),
        tpot_p95_s=tpot.at(95),
    )
