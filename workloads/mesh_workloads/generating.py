"""A workload without any file: rates over functions, arrivals over time, lengths over requests.

Every function has its own seeded stream, so that its requests stay the same whatever the number of
the others, as long as its rate does. Times are rounded to a microsecond: the last digits of
logarithms differ between machines.
"""

import random
from dataclasses import dataclass, replace

from mesh.domain.errors import InvalidInput
from mesh_workloads.lengths import Lengths
from mesh_workloads.processes import POISSON, STEADY, Diurnal, OnOff, Process
from mesh_workloads.published import AZURE_CONVERSATION
from mesh_workloads.rates import Lognormal, Rates
from mesh_workloads.trace import ARRIVALS_MAX, DURATION_S_MAX, Arrival, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is generated. Function 0 has the highest rate."""

    name: str
    functions: int
    rate_per_s: float
    """The rate of all functions together, on average over a whole period of `diurnal`."""
    duration_s: float
    rates: Rates
    process: Process = POISSON
    diurnal: Diurnal = STEADY
    """The same for all functions."""
    lengths: Lengths = AZURE_CONVERSATION

    def __post_init__(self) -> None:
        if not 0 < self.duration_s <= DURATION_S_MAX:
            raise InvalidInput(
                f"workload {self.name}: duration_s is {self.duration_s:g}; it must be above 0 and "
                f"at most {DURATION_S_MAX:g}"
            )
        if self.rate_per_s * self.diurnal.passed_s(self.duration_s) > ARRIVALS_MAX / 2:
            raise InvalidInput(
                f"workload {self.name}: {self.rate_per_s:g} requests a second for "
                f"{self.duration_s:g} s are more than {ARRIVALS_MAX // 2}",
                hint="lower rate_per_s or duration_s",
            )

    def rates_per_s(self) -> list[float]:
        """By function. Raises InvalidInput for parameters out of bounds."""
        return self.rates.rates_per_s(self.functions, self.rate_per_s)

    def index_of_dispersion(self, window_s: float) -> float:
        """The expected index of dispersion of all functions together, apart from what `diurnal`
        adds.
        """
        rates = self.rates_per_s()
        parts = [rate * self.process.index_of_dispersion(rate, window_s) for rate in rates]
        return sum(parts) / sum(rates)


GENERATED_S = 120.0
GENERATED_ON_S = 20.0


def bursty(functions: int, rate_per_s: float, duration_s: float = GENERATED_S) -> Workload:
    """A load for a small cell: a few functions take most calls, each in bursts of some seconds."""
    return Workload(
        name="generated",
        functions=functions,
        rate_per_s=rate_per_s,
        duration_s=duration_s,
        rates=Lognormal(sigma=1.0),
        process=OnOff(duty=0.4, on_s=GENERATED_ON_S),
    )


def generate(workload: Workload, seed: int) -> Trace:
    """The same arrivals for the same workload and seed.

    Raises InvalidInput for parameters out of bounds.
    """
    arrivals: list[Arrival] = []
    for function, rate_per_s in enumerate(workload.rates_per_s()):
        arrivals += _of_function(workload, function, rate_per_s, seed)
        if len(arrivals) > ARRIVALS_MAX:
            raise InvalidInput(
                f"workload {workload.name}: more than {ARRIVALS_MAX} arrivals were drawn",
                hint="lower rate_per_s or duration_s",
            )
    arrivals.sort(key=lambda arrival: (arrival.t_s, arrival.function))
    return Trace(name=workload.name, arrivals=tuple(arrivals), duration_s=workload.duration_s)


def _of_function(workload: Workload, function: int, rate_per_s: float, seed: int) -> list[Arrival]:
    draw = random.Random(f"{seed}/{function}/arrivals")
    lengths = random.Random(f"{seed}/{function}/lengths")
    end_s = workload.diurnal.passed_s(workload.duration_s)
    found = []
    for passed_s in workload.process.times(rate_per_s, end_s, draw):
        input_tokens, output_tokens = workload.lengths.draw(lengths)
        t_s = min(round(workload.diurnal.when_s(passed_s), 6), workload.duration_s)
        found.append(
            Arrival(
                t_s=t_s,
                function=function,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
            )
        )
    return found


LLM_MESH = Workload(
    name="llm-mesh",
    functions=128,
    rate_per_s=9266 / 1800,
    duration_s=1800.0,
    rates=Lognormal(sigma=1.91),
    process=OnOff(duty=0.4, on_s=200.0),
    lengths=replace(AZURE_CONVERSATION, context_tokens_max=4096),
)
"""Like the load of LLM-Mesh §8.1 for 128 models, from its figures alone: 9,266 requests in 30
minutes, in bursts. Its busiest tenth of the functions receives 75 % of the requests, here 71 %; its
index of dispersion in windows of 1, 10 and 60 s is 1.5, 6.2 and 32.6, here 1.6, 7.1 and 32.9.
"""
