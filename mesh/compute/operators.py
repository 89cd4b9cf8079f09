"""Operator profiles: which iterations are counted, and the tables that come of it.

An engine's counters tell how long each operator of an iteration took. Sizes are few, as those of a
survey; the least times come first, since what counters tell of one iteration is the less exact the
more an engine has counted before. Before: `mesh.core.node.measuring`, ahead of a survey of whole
iterations. After: `Profile.operators`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from statistics import fmean

from mesh.compute.shapes import BLOCK_TOKENS, STEP_ROWS, Axes
from mesh.compute.tables import table
from mesh.domain.errors import EngineError
from mesh.domain.operators import Role
from mesh.domain.profile import REST, Grid, IterationShape, OperatorTimes
from mesh.domain.values import dataclass

PREFILL_TOKENS = (1, 2, 4, STEP_ROWS, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Sizes between those that double, too: there products have other kernels, or other blocks."""
BATCHES = (1, 2, 4, STEP_ROWS, 8, 16)
PAST_TOKENS_MAX = 1024
CONTEXT_TOKENS = (128, 512, 1024)
REPEATS_MIN, REPEATS_MAX = 3, 15
ENOUGH_S = 0.3
"""Seconds after which a shape that was counted REPEATS_MIN times has been counted often enough."""
DISTURBED = 0.15
"""An iteration counts that took no longer than this beyond the shortest of its shape."""
LEAST_S = 1e-9
"""What an operator has at a size at which its counters tell of nothing: a table has no zeros."""


@dataclass(slots=True, eq=False)
class _Point:
    row: int
    column: int
    shape: IterationShape
    warm: bool = False
    skipped: bool = False
    counted: list[tuple[float, dict[str, float]]] = field(default_factory=list)

    @property
    def wanted(self) -> bool:
        """Whether it is to be counted again."""
        repeats, taken_s = len(self.counted), sum(elapsed_s for elapsed_s, _ in self.counted)
        enough = taken_s >= ENOUGH_S or repeats >= REPEATS_MAX
        return not (self.skipped or (repeats >= REPEATS_MIN and enough))

    def calm(self) -> list[tuple[float, dict[str, float]]]:
        """Its undisturbed iterations."""
        least_s = min(elapsed_s for elapsed_s, _ in self.counted)
        return [each for each in self.counted if each[0] <= least_s * (1.0 + DISTURBED)]

    def elapsed_s(self) -> float:
        """The mean seconds of its undisturbed iterations."""
        return fmean(elapsed_s for elapsed_s, _ in self.calm())

    def share(self, name: str) -> float:
        """The share of an operator, or of REST, in its undisturbed iterations."""
        calm = self.calm()
        whole_s = sum(elapsed_s for elapsed_s, _ in calm)
        if name == REST:
            return 1.0 - sum(sum(by.values()) for _, by in calm) / whole_s
        return sum(by.get(name, 0.0) for _, by in calm) / whole_s


class OperatorSurvey:
    """Asks for shape after shape of an instance with these bounds, as `Survey` does, but for each
    until it has been counted often enough. `expected_s` says which take longer than others.
    `cores`: so many of the node's count it; `None` stands for all.
    """

    __slots__ = ("_axes", "_decode", "_last", "_order", "_prefill", "begun", "cores")

    def __init__(
        self,
        *,
        context_tokens_max: int,
        batch_max: int,
        kv_tokens: int,
        prefill_tokens_max: int,
        expected_s: Callable[[IterationShape], float],
        cores: int | None = None,
    ) -> None:
        self.cores = cores
        reach = min(context_tokens_max, kv_tokens)
        rows = _up_to(PREFILL_TOKENS, min(prefill_tokens_max, reach))
        self._axes = axes = Axes(
            prefill_rows=rows,
            prefill_columns=tuple(sorted({0, min(PAST_TOKENS_MAX, reach - rows[-1])})),
            decode_rows=_up_to(BATCHES, batch_max),
            decode_columns=_up_to(CONTEXT_TOKENS, reach) or (reach,),
            reach_tokens=reach,
            kv_blocks=kv_tokens // BLOCK_TOKENS,
        )
        self._prefill = [_Point(*of) for of in axes.prefill_shapes()]
        self._decode = [_Point(*of) for of in axes.decode_shapes()]
        self._order = sorted(
            [*self._prefill, *self._decode], key=lambda point: expected_s(point.shape)
        )
        self._last: _Point | None = None
        self.begun = False
        """Whether anything has been counted."""

    def next_shape(self) -> IterationShape | None:
        """What to count now, the same until it is noted or skipped; None when all is done."""
        point = self._next()
        return None if point is None else point.shape

    def note(self, elapsed_s: float, operators: Iterable[tuple[str, float]]) -> None:
        """The shape that was asked for took so long, its operators so much of it. The first time
        does not count: kernels are built in it.
        """
        point = self._last = self._next()
        self.begun = True
        if point is None:
            return
        if point.warm:
            point.counted.append((elapsed_s, dict(operators)))
        point.warm = True

    def skip(self) -> None:
        """The shape that was asked for could not be counted; it is not asked for again."""
        if (point := self._next()) is not None:
            point.skipped = True

    @property
    def share(self) -> float:
        """The share of the shapes that are done, 0 to 1."""
        return sum(not point.wanted for point in self._order) / len(self._order)

    def grids(self, taken_s: Callable[[IterationShape], float] | None = None) -> tuple[Grid, Grid]:
        """Prefill and decode as the counted iterations took, for cores without a profile, or as
        `taken_s` says of their sizes. EngineError when either was not counted.
        """
        return self._grids(_Point.elapsed_s if taken_s is None else lambda of: taken_s(of.shape))

    def operators(self, prefill: Grid, decode: Grid) -> tuple[OperatorTimes, ...]:
        """Each operator that took any time, and REST: what its share in the counted iterations
        makes of whole iterations, of which these are the profile's grids. EngineError when prefill,
        or decode, was not counted.
        """
        found = []
        for name in (*Role, REST):

            def taken_s(of: _Point, name: str = name) -> float:
                return max(of.share(name) * iteration_s(prefill, decode, of.shape), LEAST_S)

            rows, batches = self._grids(taken_s)
            if max(rows.seconds[-1][-1], batches.seconds[-1][-1]) > LEAST_S:
                found.append(OperatorTimes(name=name, prefill=rows, decode=batches))
        return tuple(found)

    def _grids(self, seconds: Callable[[_Point], float]) -> tuple[Grid, Grid]:
        axes = self._axes
        return (
            _grid(axes.prefill_rows, axes.prefill_columns, self._prefill, seconds),
            _grid(axes.decode_rows, axes.decode_columns, self._decode, seconds),
        )

    def _next(self) -> _Point | None:
        """The first that is wanted; of prompts one of the first two, for in use they rarely follow
        one of their length, which costs an engine time that no operator has.
        """
        wanted = [point for point in self._order if point.wanted]
        first = next(iter(wanted), None)
        if first is None or first.shape.decode_batch:
            return first
        prompts = [point for point in wanted if not point.shape.decode_batch]
        return next((point for point in prompts[:2] if point is not self._last), first)


def iteration_s(prefill: Grid, decode: Grid, shape: IterationShape) -> float:
    """Seconds of an iteration of prompts alone, or of decodes, by these tables."""
    if shape.decode_batch:
        return decode.at(shape.decode_batch, shape.decode_context_tokens)
    return prefill.at(shape.prefill_tokens, shape.prefill_past_tokens)


def _up_to(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    return tuple(size for size in sizes if size <= most)


def _grid(
    rows: tuple[int, ...],
    columns: tuple[int, ...],
    points: Iterable[_Point],
    taken_s: Callable[[_Point], float],
) -> Grid:
    """Cells as they were counted, so that all operators add up to the whole; they are smoothed only
    where some have to be filled in. Raises EngineError.
    """
    cells = {(point.row, point.column): taken_s(point) for point in points if point.counted}
    counted = [[cells.get((i, j)) for j in range(len(columns))] for i in range(len(rows))]
    if len(cells) == len(rows) * len(columns):
        seconds = tuple(tuple(cells[i, j] for j in range(len(columns))) for i in range(len(rows)))
        return Grid(rows=rows, columns=columns, seconds=seconds)
    grid = table(rows, columns, counted)
    if grid is None:
        raise EngineError("no iteration could be counted", hint="ask again with a larger KV cache")
    return grid
