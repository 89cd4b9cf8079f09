"""How a load is divided among functions: a few receive most requests, many receive few.

Rates follow from their rank alone, nothing is drawn: the same parameters give the same rates, and
they add up to the load.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

from mesh.domain.errors import InvalidInput
from mesh_workloads.trace import FUNCTIONS_MAX

EXPONENT_MAX = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Zipf:
    """The function of rank r (from 1) has a rate proportional to r^-exponent.

    0 makes all alike. The LLM-Mesh load's 128 counts, by least squares of the logarithms: 1.96.
    """

    exponent: float

    def rates_per_s(self, functions: int, total_per_s: float) -> list[float]:
        """Descending; their sum is `total_per_s`."""
        _check("exponent", self.exponent)
        return _shared(functions, total_per_s, lambda rank: -self.exponent * math.log(rank + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """Rates are the quantiles (r - 1/2) / n of a lognormal distribution with this sigma.

    0 makes all alike. The logarithms of the LLM-Mesh load's 128 counts have a standard deviation of
    1.91; its busiest 13 functions receive 75 % of the requests, by this law 71 %.
    """

    sigma: float

    def rates_per_s(self, functions: int, total_per_s: float) -> list[float]:
        """Descending; their sum is `total_per_s`."""
        _check("sigma", self.sigma)
        normal = NormalDist()
        return _shared(
            functions,
            total_per_s,
            lambda rank: -self.sigma * normal.inv_cdf((rank + 0.5) / functions),
        )


Rates = Zipf | Lognormal


def _check(name: str, value: float) -> None:
    if not 0 <= value <= EXPONENT_MAX:
        raise InvalidInput(f"{name} is {value:g}; it must be from 0 to {EXPONENT_MAX:g}")


def _shared(functions: int, total_per_s: float, log_weight: Callable[[int], float]) -> list[float]:
    if not 1 <= functions <= FUNCTIONS_MAX:
        raise InvalidInput(f"functions is {functions}; it must be from 1 to {FUNCTIONS_MAX}")
    if not (math.isfinite(total_per_s) and total_per_s > 0):
        raise InvalidInput(f"the total rate is {total_per_s:g} a second; it must be above 0")
    weights = [math.exp(log_weight(rank)) for rank in range(functions)]
    whole = math.fsum(weights)
    return [total_per_s * weight / whole for weight in weights]
