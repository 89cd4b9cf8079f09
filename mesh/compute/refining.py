"""What iterations tell of a measured profile, point by point, beside the factor of neighbours.

A survey times each point a few times, and `correction` stretches the whole table; what is left is
where the table is off more than elsewhere. Each iteration of prompts or of decodes alone moves the
points around its size: in proportion to how far off it was, as long as that is little, and no
further (Huber's M-estimator), so that a third of them may be held up by whatever and move a point
by 5 %. What they tell is taken beside the factor, which knows of neighbours. A factor above 1 goes
into the whole table slowly, one below 1 at once, since no neighbour explains it. Before: a survey's
profile. After: the node, which predicts by the refined one and tells the controller.
"""

from collections.abc import Iterator, Sequence
from math import exp, log

from mesh.compute.correction import bounded
from mesh.compute.scaling import lengthened
from mesh.compute.tables import monotone
from mesh.domain.profile import Grid, IterationShape, Profile
from mesh.domain.reasons import ProfileSource
from mesh.domain.values import replace

NEAR = 0.1
"""By how much (a logarithm) an iteration may be off and count in full."""
GUESSED_RATE = 0.5
"""As RATE, of an estimate: it may be off by half or more, and there is no survey to spoil."""
GUESSED_S = 2.0
"""After iterations of this many seconds, an estimate is known well enough to be told."""
RATE = 0.05
"""A second of iterations that are off moves the points around them by so much."""
SLOWER_RATE = 0.002
"""The same of a whole grid, by what the factor explains: a neighbour of a minute moves it by a
tenth.
"""
QUICKER_RATE = 0.1
"""The same where the factor is below what the grid has been moved by. No neighbour makes iterations
quicker: the survey has met one, or one that the grid has taken up is gone.
"""
SHIFT_MAX = log(2.0)
"""Between two tellings, a point moves by a factor of two at most: this is its logarithm."""
LOOK_S = 10.0
TOLD_SHARE = 0.04
"""A point that has moved by more is worth telling: iterations vary by as much, a few of them long
and most a little shorter than in the mean.
"""


class Refinement:
    """The refinement of one instance's profile. An estimate is refined once, and counts as measured
    from then on.
    """

    __slots__ = ("_decode", "_looked_s", "_noted_s", "_prefill", "_profile")

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._looked_s: float | None = None
        self._noted_s = 0.0
        guessed = not profile.measured
        self._prefill = _Shifts(profile.prefill, guessed=guessed)
        self._decode = _Shifts(profile.decode, guessed=guessed)

    def note(self, shape: IterationShape, measured_s: float, factor: float) -> None:
        """An iteration has ended; `factor` is what the profile was stretched by. One of both kinds
        does not say which of them was off.
        """
        batch, tokens = shape.decode_batch, shape.prefill_tokens
        self._noted_s += measured_s
        if batch and not tokens:
            self._decode.observe(batch, shape.decode_context_tokens, measured_s, factor)
        elif tokens and not batch:
            self._prefill.observe(tokens, shape.prefill_past_tokens, measured_s, factor)

    def refined(self, now_s: float, factor: float = 1.0) -> Profile | None:
        """The profile as it should be, now and then, if that is worth telling: never at first,
        while the factor has yet to find out what neighbours do. What corrects an estimate, `factor`
        as of now, goes into it whole.
        """
        if self._looked_s is None:
            self._looked_s = now_s
        if now_s < self._looked_s + LOOK_S:
            return None
        self._looked_s = now_s
        if not self._profile.measured:
            return self._confirmed(factor) if self._noted_s >= GUESSED_S else None
        if self._prefill.moved <= TOLD_SHARE and self._decode.moved <= TOLD_SHARE:
            return None
        return replace(self._profile, prefill=self._prefill.grid(), decode=self._decode.grid())

    def _confirmed(self, factor: float) -> Profile:
        profile = replace(
            self._profile,
            prefill=self._prefill.grid(),
            decode=self._decode.grid(),
            scaled_from="",
            source=ProfileSource.ITERATIONS,
        )
        return lengthened(profile, factor)


def taken_up(kept: Profile, before: Profile, told: Profile) -> Profile:
    """What is kept for a kind of node once one of them, which predicted by the profile `before`,
    has told a refined one: that, but where others have moved a point by more than is worth telling,
    and this one has not. Rows and columns stay in order, as those of any table.
    """
    if kept == before:
        return told
    prefill = _taken_up(kept.prefill, before.prefill, told.prefill)
    decode = _taken_up(kept.decode, before.decode, told.decode)
    return replace(told, prefill=prefill, decode=decode)


def _taken_up(kept: Grid, before: Grid, told: Grid) -> Grid:
    if any((of.rows, of.columns) != (told.rows, told.columns) for of in (kept, before)):
        return told
    seconds = [
        [
            new_s if _moved(new_s, old_s) or not _moved(kept_s, old_s) else kept_s
            for kept_s, old_s, new_s in zip(*rows, strict=True)
        ]
        for rows in zip(kept.seconds, before.seconds, told.seconds, strict=True)
    ]
    return replace(told, seconds=monotone(seconds))


def _moved(seconds: float, before_s: float) -> bool:
    return abs(seconds - before_s) > TOLD_SHARE * before_s


class _Shifts:
    """By how much each point of a grid is off, as a logarithm: all together, as the factor has
    told, and beside it.
    """

    __slots__ = ("_common", "_grid", "_guessed", "_shifts")

    def __init__(self, grid: Grid, *, guessed: bool) -> None:
        self._grid = grid
        self._guessed = guessed
        self._common = 0.0
        self._shifts = [[0.0] * len(grid.columns) for _ in grid.rows]

    @property
    def moved(self) -> float:
        """The most that any of them has."""
        return max(abs(self._common + shift) for row in self._shifts for shift in row)

    def observe(self, row: int, column: int, measured_s: float, factor: float) -> None:
        profiled_s = self._grid.at(row, column)
        if profiled_s <= 0.0:
            return
        around = list(_around(self._grid, row, column))
        shift = sum(self._shifts[i][j] * weight for i, j, weight in around)
        explained, computed_s = log(factor), min(profiled_s, 1.0)
        rate = GUESSED_RATE if self._guessed else RATE
        step = rate * _held(log(bounded(measured_s / profiled_s)) - explained - shift) * computed_s
        for i, j, weight in around:
            self._shifts[i][j] = _bounded(self._shifts[i][j] + step * weight)
        if self._guessed:
            return  # what corrects an estimate is no neighbour, and goes into it whole
        lasting = _held(explained - self._common)
        rate = SLOWER_RATE if lasting > 0.0 else QUICKER_RATE
        self._common = _bounded(self._common + rate * lasting * computed_s)

    def grid(self) -> Grid:
        """Monotone, as every table is."""
        seconds = [
            [
                point_s * exp(_bounded(self._common + shift))
                for point_s, shift in zip(times, shifts, strict=True)
            ]
            for times, shifts in zip(self._grid.seconds, self._shifts, strict=True)
        ]
        return replace(self._grid, seconds=monotone(seconds))


def _bounded(shift: float) -> float:
    return min(max(shift, -SHIFT_MAX), SHIFT_MAX)


def _held(off: float) -> float:
    return min(max(off / NEAR, -1.0), 1.0)


def _around(grid: Grid, row: float, column: float) -> Iterator[tuple[int, int, float]]:
    """The points that the grid answers from at these sizes, each with its weight."""
    columns = tuple(_between(grid.columns, column))
    for i, part in _between(grid.rows, row):
        for j, share in columns:
            yield i, j, part * share


def _between(sizes: Sequence[int], size: float) -> Iterator[tuple[int, float]]:
    high = next((n for n, each in enumerate(sizes) if each >= size), len(sizes) - 1)
    if high == 0 or sizes[high] <= size:
        yield high, 1.0
        return
    part = (size - sizes[high - 1]) / (sizes[high] - sizes[high - 1])
    yield high - 1, 1.0 - part
    yield high, part
