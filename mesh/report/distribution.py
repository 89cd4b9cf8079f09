"""A distribution of times in a hundred and one numbers, and where a curve of it runs; pure.

The one way in which mesh takes percentiles. Before: outcomes. After: `summary`, `cell_numbers`,
charts and benchmarks.
"""

from collections.abc import Iterable

from mesh.domain.values import dataclass

STEPS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """`seconds[p]` is what p % of the values do not exceed (nearest rank); empty for no values."""

    count: int
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Distribution":
        """The distribution of those that are not `None`."""
        ordered = sorted(value for value in values if value is not None)
        n = len(ordered)
        ranks = [max(0, -(-n * percent // STEPS) - 1) for percent in range(STEPS + 1)] if n else []
        return cls(count=n, seconds=tuple(ordered[rank] for rank in ranks))

    def at(self, percent: int) -> float | None:
        """A percentile from 0 to 100; None without values."""
        return self.seconds[percent] if self.seconds else None

    def curve(self, of: int) -> list[tuple[float, float]]:
        """(seconds, share of `of` that took no longer), ascending: with `of` above `count` the
        curve ends below 1, by those that have no value.
        """
        share = self.count / of if of else 0.0
        return [(value, share * step / STEPS) for step, value in enumerate(self.seconds)]
