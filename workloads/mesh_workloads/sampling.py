"""Which functions of a trace become models, as the LLM-Mesh paper takes them (§8.1).

The paper maps each model to a function of the Azure Functions trace, takes the first 30 minutes and
samples 32, 64 and 128 functions uniformly. Here: functions are ranked by their requests and cut
into 16 strata of equal size; the middle ones of each stratum are taken, 8 for 128 models. They are
numbered by stratum, so that `function % 8 < 2, 4, 8` leaves the loads of 32, 64 and 128 models, the
smaller within the larger, all with the same mix of busy and rare functions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mesh.domain.errors import InvalidInput
from mesh_workloads.trace import Trace

PER_STRATUM = 8
KEPT = {32: 2, 64: 4, 128: 8}
"""Functions of each stratum, by the number of models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """`strata * per_stratum` functions."""

    strata: int = 16
    per_stratum: int = PER_STRATUM

    def __post_init__(self) -> None:
        if self.strata < 1 or self.per_stratum < 1:
            raise InvalidInput(
                f"a sample has {self.strata} strata of {self.per_stratum} functions; both must be "
                "1 or more"
            )

    def of(self, requests: Mapping[str, int]) -> tuple[str, ...]:
        """The labels of the functions taken, busiest stratum first, by their new numbers.

        `requests` counts them by label; functions without any are left out. Equal counts are ranked
        by label. Raises InvalidInput when there are too few functions.
        """
        ranked = sorted((f for f, n in requests.items() if n), key=lambda f: (-requests[f], f))
        needed = self.strata * self.per_stratum
        if len(ranked) < needed:
            raise InvalidInput(
                f"{len(ranked)} functions have requests; {self.strata} strata of "
                f"{self.per_stratum} need {needed}",
                hint="sample fewer functions, or read more of the trace",
            )
        taken: list[str] = []
        for stratum in range(self.strata):
            begin = len(ranked) * stratum // self.strata
            end = len(ranked) * (stratum + 1) // self.strata
            first = begin + (end - begin - self.per_stratum) // 2
            taken += ranked[first : first + self.per_stratum]
        return tuple(taken)


def functions_of(models: int) -> tuple[int, ...]:
    """Numbers of the functions in the load for 32, 64 or 128 models, ascending."""
    if models not in KEPT:
        raise InvalidInput(f"there is no load for {models} models; there are for 32, 64 and 128")
    return tuple(f for f in range(max(KEPT)) if f % PER_STRATUM < KEPT[models])


def load_for(trace: Trace, models: int) -> Trace:
    """The arrivals of the paper's load for 32, 64 or 128 models; functions keep their numbers.

    The trace is one of 128 functions that are numbered as `Sample` does.
    """
    taken = frozenset(functions_of(models))
    busiest = max((a.function for a in trace.arrivals), default=0)
    if busiest >= max(KEPT):
        raise InvalidInput(
            f"trace {trace.name} has a function {busiest}; loads are cut from {max(KEPT)}, from 0",
            hint="sample 128 functions while reading it",
        )
    kept = tuple(a for a in trace.arrivals if a.function in taken)
    return replace(trace, name=f"{trace.name}-{models}", arrivals=kept)
