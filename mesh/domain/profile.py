"""Profiles: measured iteration times of a model on a device, how they are read, and stalls.

A table answers for the sizes between its points by linear interpolation, in two dimensions by
bilinear (LLM-Mesh §5.2); below its first point it answers with that, above its last point in
proportion to the size. What a prediction makes of a profile is in `mesh.compute.times`.
"""

from bisect import bisect_right
from collections.abc import Sequence

from mesh.domain.ids import ModelId
from mesh.domain.model import Mixture, Widths
from mesh.domain.ranges import Seconds
from mesh.domain.reasons import DeviceKind, ProfileSource
from mesh.domain.values import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationShape:
    """What one iteration computes: a chunk of prompts, one decode of a batch, or both at once."""

    prefill_tokens: int = 0
    """Prompt tokens computed."""
    prefill_past_tokens: int = 0
    """Tokens already in the cache before them; the mean over those tokens."""
    decode_batch: int = 0
    decode_context_tokens: int = 0
    """KV tokens that each of the batch attends to, its new one included; the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Seconds over two sizes. `seconds[i][j]` belongs to `rows[i]` and `columns[j]`; both ascend,
    and neither is empty. A grid of one column holds for every size along it.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def at(self, row: float, column: float) -> float:
        """Seconds at these sizes."""
        rows, columns, seconds = self.rows, self.columns, self.seconds
        left, right, part = 0, 0, 0.0
        last = columns[-1]
        if column >= last:
            left = right = -1
        elif right := bisect_right(columns, column):
            left = right - 1
            before = columns[left]
            part = (column - before) / (columns[right] - before)
        high = bisect_right(rows, row) if row < rows[-1] else 0
        upper = seconds[high - 1] if high or row >= rows[-1] else seconds[0]
        value = upper[left] + (upper[right] - upper[left]) * part
        if high:
            low = rows[high - 1]
            if row > low:
                lower = seconds[high]
                beyond = lower[left] + (lower[right] - lower[left]) * part
                value += (beyond - value) * ((row - low) / (rows[high] - low))
        elif row >= rows[-1]:
            value *= row / rows[-1]
        if column > last > 0:
            value *= column / last
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTimes:
    """What one operator takes of iterations, all layers together."""

    name: str
    """A `mesh.domain.operators.Role`, or REST."""
    prefill: Grid
    """Prompt tokens by tokens already in the cache."""
    decode: Grid
    """Batch sizes by mean context tokens."""


def _sum(grids: Sequence[Grid]) -> Grid:
    """The sum of grids over the same sizes."""
    rows = zip(*(grid.seconds for grid in grids), strict=True)
    return replace(grids[0], seconds=tuple(tuple(map(sum, zip(*row, strict=True))) for row in rows))


REST = "rest"
"""What no operator explains: the inputs of an iteration, the shapes of its nodes, its sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoresTimes:
    """What operators take, REST among them, of iterations that have so many cores of the node."""

    cores: int
    operators: tuple[OperatorTimes, ...]

    @property
    def prefill(self) -> Grid:
        """Seconds of whole iterations."""
        return _sum([each.prefill for each in self.operators])

    @property
    def decode(self) -> Grid:
        return _sum([each.decode for each in self.operators])


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedIteration:
    """One iteration, and the seconds that an engine's counters tell of its operators by name."""

    elapsed_s: float
    operators: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Iteration times of one model on one kind of device, and what is needed to scale them to
    another model.

    `prefill` has rows of prompt tokens in an iteration and columns of tokens already in the cache;
    `decode` rows of batch sizes and columns of mean context tokens.
    """

    model_id: ModelId
    device: DeviceKind
    fingerprint: str
    """Equal on nodes whose iterations take equally long; see `NodeHello`."""
    hardware: str
    """The device, in words."""
    cores: int
    parameters: int
    weights_bytes: int
    kv_bytes_per_token: int
    prefill: Grid
    decode: Grid
    scaled_from: str = ""
    """What an estimated profile was scaled from; empty for a measured one."""
    measured_s: Seconds = 0.0
    """How long measuring took."""
    mixture: Mixture | None = None
    """The model's, as ModelInfo has it."""
    source: ProfileSource = ProfileSource.SURVEY
    """How the times of a measured one, or one from operators, are known; see `origin`."""
    shape: str = ""
    """The model's, as ModelInfo has it; empty for a profile of an earlier version."""
    measured_as: str = ""
    """The model of the same shape that was measured; empty where it was this one."""
    operators: tuple[OperatorTimes, ...] = ()
    """What its iterations were made of when they were counted, REST among them; empty where they
    never were.
    """
    widths: Widths | None = None
    """The model's, as ModelInfo has them, where it was measured."""
    by_cores: tuple[CoresTimes, ...] = ()
    """The same with some of the node's cores, where that was counted; cores ascend."""

    @property
    def measured(self) -> bool:
        return not self.scaled_from

    @property
    def origin(self) -> ProfileSource:
        """How its times are known."""
        counted = self.source is ProfileSource.OPERATORS
        return self.source if self.measured or counted else ProfileSource.ESTIMATE

    def taken_for(self, model_id: ModelId) -> "Profile":
        """The same times for another model of the same shape, or for this one."""
        if model_id == self.model_id:
            return self
        measured = self.measured_as or self.model_id
        return replace(
            self, model_id=model_id, measured_as="" if measured == model_id else measured
        )

    def estimates_the_same_as(self, other: "Profile") -> bool:
        """Whether both are estimates, and of the same times."""
        same = self.prefill == other.prefill and self.decode == other.decode
        return same and not self.measured and not other.measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """Iterations of an instance, since it was loaded or got another profile, that took far longer
    than those around them. Nothing is predicted from a single one.
    """

    count: int = 0
    longest_s: Seconds = 0.0
    """What the longest stall took above what was expected."""
    ago_s: Seconds = 0.0
    """The seconds since the last stall ended."""
