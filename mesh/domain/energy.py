"""What computing takes: the watts of a device, and the joules of nodes, requests and tokens.

A device draws its idle power all the time, and more while it computes: equation 9 of operator-level
autoscaling, by which plans, their executions and nodes without a counter reckon alike. A node tells
its joules with its heartbeats; the books of the controller share them out.
"""

from collections.abc import Iterable
from enum import StrEnum
from math import isfinite

from mesh.domain.errors import InvalidInput
from mesh.domain.ranges import Joules, Seconds
from mesh.domain.values import dataclass


class EnergySource(StrEnum):
    """Where a node's joules come from."""

    RAPL = "rapl"
    NVML = "nvml"
    WATTS = "watts"
    """The watts that the node was given: joules follow from them and the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    idle_watts: float
    busy_watts: float
    """While it computes."""

    def joules(self, elapsed_s: float, busy_s: float) -> float:
        """The joules of a device in so many seconds, of which it computes for `busy_s`."""
        return self.idle_watts * elapsed_s + (self.busy_watts - self.idle_watts) * busy_s


def parse_watts(text: str) -> Power:
    """Parse IDLE:BUSY. Raises InvalidInput for other text."""
    try:
        idle, busy = map(float, text.split(":"))
    except ValueError:
        idle = busy = -1.0
    if not (0 <= idle <= busy and busy > 0 and isfinite(busy)):
        raise InvalidInput(
            f"--watts {text!r} is not IDLE:BUSY, with a BUSY above 0 and not below IDLE",
            hint="such as 60:230, what the device draws while it rests and while it computes",
        )
    return Power(idle_watts=idle, busy_watts=busy)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyReading:
    """What a node's energy counter says."""

    source: EnergySource | None = None
    joules: float | None = None
    """What was taken since some time before; `None` where no counter can be read."""
    reason: str = ""
    """Why there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """The joules of a node since its last heartbeat. Joules are `None` where they are not known."""

    source: EnergySource | None = None
    idle_j: Joules | None = None
    """While it did not compute."""
    busy_j: Joules | None = None
    """In the iterations that ended since then."""
    busy_s: Seconds = 0.0
    """How long those took, with the ones that were measured or primed for nobody."""
    reason: str = ""
    """Why joules are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyView:
    """What a node, the requests of a deployment, or all nodes of a cell took since the controller
    began to count. `None` where nobody told it.
    """

    sources: tuple[EnergySource, ...] = ()
    reason: str = ""
    """Why joules of nodes are not known."""
    idle_j: float | None = None
    """While nodes did not compute: of no deployment."""
    busy_j: float | None = None
    """While they computed."""
    requests: int = 0
    """The requests that ended while their node told its joules."""
    output_tokens: int = 0
    j_per_request: float | None = None
    """Busy joules; the same holds for `j_per_output_token`."""
    j_per_output_token: float | None = None


NO_ENERGY = EnergyView()


def together(views: Iterable[EnergyView]) -> EnergyView:
    """The sum of what is known, such as that of a deployment in several cells, and its ratios."""
    every = list(views)
    if len(every) == 1 and every[0].busy_j is None:
        return every[0]  # it has no ratios
    busy_j, requests = plus(one.busy_j for one in every), sum(one.requests for one in every)
    output_tokens = sum(one.output_tokens for one in every)
    return EnergyView(
        sources=tuple(sorted({source for one in every for source in one.sources})),
        reason="; ".join(dict.fromkeys(one.reason for one in every if one.reason)),
        idle_j=plus(one.idle_j for one in every),
        busy_j=busy_j,
        requests=requests,
        output_tokens=output_tokens,
        j_per_request=busy_j / requests if busy_j is not None and requests else None,
        j_per_output_token=busy_j / output_tokens if busy_j is not None and output_tokens else None,
    )


def plus(joules: Iterable[float | None]) -> float | None:
    """The sum of those that are known; `None` where none is."""
    known = [one for one in joules if one is not None]
    return sum(known) if known else None
