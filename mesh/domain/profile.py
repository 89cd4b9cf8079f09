"""Profiles: measured iteration times of a model on a device, and how they are read.

A table answers for the sizes between its points by linear interpolation, in two dimensions by
bilinear (LLM-Mesh §5.2); below its first point it answers with that, above its last point in
proportion to the size. What a prediction makes of a profile is in `mesh.compute.times`.
"""

from bisect import bisect_right
from dataclasses import dataclass

from mesh.domain.ids import ModelId
from mesh.domain.reasons import DeviceKind


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
        low, high, share = _between(rows, row)
        left, right, part = _between(columns, column)
        upper, lower = seconds[low], seconds[high]
        first = upper[left] + (upper[right] - upper[left]) * part
        value = first + (lower[left] + (lower[right] - lower[left]) * part - first) * share
        if row > rows[-1]:
            value *= row / rows[-1]
        if column > columns[-1] > 0:
            value *= column / columns[-1]
        return value


def _between(points: tuple[int, ...], size: float) -> tuple[int, int, float]:
    """The points on both sides of a size, and how far it is from the first to the second."""
    high = bisect_right(points, size)
    if high == 0 or high == len(points):
        end = max(high - 1, 0)
        return end, end, 0.0
    low = high - 1
    return low, high, (size - points[low]) / (points[high] - points[low])


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
    measured_s: float = 0.0
    """How long measuring took."""

    @property
    def measured(self) -> bool:
        return not self.scaled_from
