"""An arrival, and a trace of them in order, with the figures by which traces are compared.

Readers and generators end here; replay and the simulator start here. Times are seconds from the
trace's start, functions are numbers (one deployment each), lengths are tokens.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mesh.domain.checks import CONTEXT_TOKENS_MAX
from mesh.domain.errors import InvalidInput

ARRIVALS_MAX = 5_000_000
"""In one trace: about 1 GB of memory."""
FUNCTIONS_MAX = 200_000
DURATION_S_MAX = 366 * 24 * 3600.0
BLOCK_TOKENS = 512
"""The tokens of one of `Arrival.blocks`, as Mooncake's traces have them."""
TOKENS_MAX = CONTEXT_TOKENS_MAX
"""The longest prompt, and the longest answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a conversation: its prompt is all that was said before, and a question."""

    conversation: int
    left: int
    """Turns after this one."""
    system_tokens: int
    """With so many, the same in all conversations of its function, the first prompt begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request as it arrives at `t_s`. Its answer has exactly `output_tokens`."""

    t_s: float
    function: int
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """What its prompt is made of, BLOCK_TOKENS each but for the last: the same number stands for
    the same tokens after the same beginning. Empty where the source does not tell.
    """
    turn: Turn | None = None
    """In place of `blocks`, where it is of a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How one length spreads over all arrivals, in tokens."""

    mean: float
    p50: int
    p90: int
    p99: int
    most: int

    @classmethod
    def of(cls, values: Iterable[int]) -> "Spread":
        """Zeros for no values."""
        ordered = sorted(values) or [0]
        return cls(
            mean=sum(ordered) / len(ordered),
            p50=percentile(ordered, 50),
            p90=percentile(ordered, 90),
            p99=percentile(ordered, 99),
            most=ordered[-1],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a trace amounts to."""

    arrivals: int
    functions: int
    """With at least one arrival."""
    duration_s: float
    rate_per_s: float
    busiest_tenth: float
    """Share of the arrivals that the busiest tenth of the functions (rounded up) receives."""
    input_tokens: Spread
    output_tokens: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Arrivals in the order of `t_s`, all of them within [0, duration_s].

    `labels[f]` is what the source calls function `f`; without a source's names it is empty.
    `left_out` counts the source's requests that are not arrivals: those without a prompt or answer.
    """

    name: str
    arrivals: tuple[Arrival, ...] = field(repr=False)
    duration_s: float
    labels: tuple[str, ...] = field(default=(), repr=False)
    left_out: int = 0
    out_of_order: int = 0
    """Rows of the source that came after a later one, where its format allows that."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.duration_s) and 0 < self.duration_s <= DURATION_S_MAX):
            raise InvalidInput(
                f"trace {self.name}: its duration is {self.duration_s:g} s; it must be above 0 and "
                f"at most {DURATION_S_MAX:g}"
            )
        last_s = 0.0
        for arrival in self.arrivals:
            if not last_s <= arrival.t_s <= self.duration_s:
                raise InvalidInput(
                    f"trace {self.name}: an arrival at {arrival.t_s:g} s follows one at "
                    f"{last_s:g} s in a trace of {self.duration_s:g} s"
                )
            last_s = arrival.t_s

    def label(self, function: int) -> str:
        """What the source calls it; its number where the source has no names."""
        return self.labels[function] if self.labels else str(function)

    def functions(self) -> tuple[int, ...]:
        """Numbers of those with at least one arrival, ascending."""
        return tuple(sorted({arrival.function for arrival in self.arrivals}))

    def summary(self) -> Summary:
        counts = sorted(Counter(a.function for a in self.arrivals).values(), reverse=True)
        busiest = counts[: math.ceil(len(counts) / 10)]
        return Summary(
            arrivals=len(self.arrivals),
            functions=len(counts),
            duration_s=self.duration_s,
            rate_per_s=len(self.arrivals) / self.duration_s,
            busiest_tenth=sum(busiest) / max(1, len(self.arrivals)),
            input_tokens=Spread.of(a.input_tokens for a in self.arrivals),
            output_tokens=Spread.of(a.output_tokens for a in self.arrivals),
        )

    def dispersion(self, window_s: float) -> float:
        """The index of dispersion of counts: variance over mean of the arrivals in windows of
        `window_s`. 1 for a Poisson process, more for bursts; 0 when nothing arrives.

        Raises InvalidInput when the trace has fewer than two whole windows.
        """
        windows = int(self.duration_s / window_s) if window_s > 0 else 0
        if windows < 2:
            raise InvalidInput(
                f"trace {self.name} lasts {self.duration_s:g} s, less than two windows of "
                f"{window_s:g} s"
            )
        counts = [0] * windows
        for arrival in self.arrivals:
            if (window := int(arrival.t_s / window_s)) < windows:
                counts[window] += 1
        mean = sum(counts) / windows
        return sum((n - mean) ** 2 for n in counts) / windows / mean if mean else 0.0


def percentile(ordered: Sequence[int], percent: float) -> int:
    """The nearest-rank percentile of values in ascending order, at least one."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
