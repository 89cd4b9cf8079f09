"""How a deployment's calls of the last minutes kept its SLO, in a few numbers, and the cell's pace.

Read-only values for people and APIs, as `views` are. The controller's `recent` counts them; the
page and its API show them.
"""

from dataclasses import dataclass

from mesh.domain.reasons import RefusalReason


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentCalls:
    """The calls that ended within the last `window_s` seconds; times are `None` where none has."""

    window_s: float
    """Five minutes, or less where more calls have ended than are kept."""
    finished: int
    """How many have all of their tokens."""
    met: int
    """How many of those kept TTFT and mean TPOT, as was promised."""
    refused: tuple[tuple[RefusalReason, int], ...]
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    tpot_p50_s: float | None
    tpot_p95_s: float | None

    @property
    def attainment(self) -> float | None:
        """The share of the finished calls that met their SLO; `None` where none has finished."""
        return self.met / self.finished if self.finished else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CellGauges:
    """What only a whole picture of the cell shows; `None` at times at which nobody took one."""

    nodes_ready: int | None = None
    nodes_used: int | None = None
    """The nodes that hold an instance."""
    headroom_least_s: float | None = None
    """The least headroom of all requests."""
    iteration_s: float | None = None
    """The time of an iteration as predicted, in the mean over the instances that answer."""
    iteration_measured_s: float | None = None
    """The same as the last iterations have measured it."""
    base_bytes: int | None = None
    weights_bytes: int | None = None
    kv_used_bytes: int | None = None
    kv_cached_bytes: int | None = None
    kv_idle_bytes: int | None = None
    in_flight_bytes: int | None = None
    free_bytes: int | None = None
    """The parts of all nodes' memory, as the bars divide it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSample(CellGauges):
    """The cell at one second, for charts. What is per second is the mean since the last sample."""

    time_unix_s: float
    running: int
    queued: int
    tokens_per_s: float
    refused_per_s: float
    attainment: float | None
    """As of `RecentCalls`, of all deployments together."""
