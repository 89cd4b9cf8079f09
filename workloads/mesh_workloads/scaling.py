"""A trace made quicker or slower, denser or sparser, with longer or shorter requests.

The time scale keeps every arrival and moves it. The rate scale keeps the times: below 1 arrivals
are left out, above 1 the trace is laid over itself, each copy begun elsewhere so that bursts do not
pile up. Before: `reading` or `generating`. After: `replay_plan`.
"""

import math
import random
from dataclasses import dataclass, replace

from mesh.domain.errors import InvalidInput
from mesh_workloads.trace import ARRIVALS_MAX, TOKENS_MAX, Arrival, Trace

SCALE_MAX = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """1 leaves what it scales as it is. The same seed leaves out the same arrivals."""

    time: float = 1.0
    """Times are multiplied by it: 0.5 plays the trace twice as quickly."""
    rate: float = 1.0
    """Arrivals: 0.1 keeps a tenth of them, 3 sends three times as many."""
    tokens: float = 1.0
    """Lengths of prompts and answers are multiplied by it and rounded, to 1 at least."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("time", "rate", "tokens"):
            value = getattr(self, name)
            if not 0 < value <= SCALE_MAX:
                raise InvalidInput(
                    f"the {name} scale is {value:g}; it must be above 0 and at most {SCALE_MAX:g}",
                    hint="1 leaves the trace as it is",
                )

    def of(self, trace: Trace) -> Trace:
        """Raises InvalidInput when more arrivals than a trace may have are asked for, or none is
        left.
        """
        if not trace.arrivals:
            raise InvalidInput(
                f"trace {trace.name} has no arrivals within {trace.duration_s:g} s",
                hint="take a longer window, or another seed of what is generated",
            )
        arrivals = trace.arrivals if self.rate == 1.0 else self._denser(trace)
        if not arrivals:
            raise InvalidInput(
                f"a rate scale of {self.rate:g} leaves none of the {len(trace.arrivals)} arrivals "
                f"of trace {trace.name}",
                hint="raise the rate scale, or take a longer window",
            )
        if self.time != 1.0 or self.tokens != 1.0:
            arrivals = tuple(self._one(arrival) for arrival in arrivals)
        return replace(trace, arrivals=arrivals, duration_s=trace.duration_s * self.time)

    def _one(self, arrival: Arrival) -> Arrival:
        return Arrival(
            t_s=arrival.t_s * self.time,
            function=arrival.function,
            input_tokens=self._length(arrival.input_tokens),
            output_tokens=self._length(arrival.output_tokens),
        )

    def _length(self, tokens: int) -> int:
        return min(max(1, round(tokens * self.tokens)), TOKENS_MAX)

    def _denser(self, trace: Trace) -> tuple[Arrival, ...]:
        """Whole copies, the first as it is and the others turned round by a part of the trace's
        duration, and a last one of which only a share is kept.
        """
        copies, share = int(self.rate), self.rate % 1
        if math.ceil(self.rate) * len(trace.arrivals) > ARRIVALS_MAX:
            raise InvalidInput(
                f"{self.rate:g} times {len(trace.arrivals)} arrivals are more than {ARRIVALS_MAX}",
                hint="lower the rate scale, or take a shorter window",
            )
        draw = random.Random(f"{self.seed}/rate")
        found: list[Arrival] = []
        for copy in range(copies + 1):
            kept = share if copy == copies else 1.0
            turned_s = draw.random() * trace.duration_s if copy else 0.0
            found += (
                replace(a, t_s=(a.t_s + turned_s) % trace.duration_s) if copy else a
                for a in trace.arrivals
                if kept == 1.0 or draw.random() < kept
            )
        return tuple(sorted(found, key=lambda arrival: (arrival.t_s, arrival.function)))
