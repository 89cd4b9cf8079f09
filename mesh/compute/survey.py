"""A survey: what is measured of one loaded instance, and the profile tables that come of it.

The node core asks for the next shape whenever it has nothing else to compute, and notes the time
that it took. Shapes are visited in rounds, each once a round, so that a noisy second spoils one of
a shape's times and not all; the first round is not counted, since engines build their kernels when
they first see a shape. Of the others those count that are near the shortest: what else the machine
does only ever lengthens an iteration, on a shared one by half for seconds, and is the correction's
matter, not the profile's. A moment in which most shapes took longer than they ever did counts for
none: else one that met a neighbour each time would keep it. A shape is repeated until it has times
enough that do count.

An iteration of other sizes than the one before it takes longer (4 ms with OpenVINO on a CPU, whose
kernels are then set up anew). Decodes mostly follow their like and are timed so: the second of two.
Chunks of prompts mostly do not, and no two of one length follow each other here.
"""

from collections.abc import Sequence
from dataclasses import field
from statistics import median

from mesh.compute.shapes import Axes, survey_axes
from mesh.compute.tables import table
from mesh.domain.errors import EngineError
from mesh.domain.profile import Grid, IterationShape
from mesh.domain.values import dataclass

REPEATS_MIN, REPEATS_MAX = 3, 9
"""Counted times of a shape; always an odd number."""
REPEATS_DISTURBED_MAX = 25
"""How often a shape is repeated at most when other work ran beside it most of the time."""
MOMENT_VISITS = 6
"""Before a visit to a shape and after it, by which is told whether the machine was slow then."""
ENOUGH_S = 0.3
"""In total, of a shape that was measured REPEATS_MIN times."""
AGREEMENT = 0.15
"""By which undisturbed times of a shape differ at most. REPEATS_MIN times must be so near to the
shortest: two stalls in three times look like the rule and the quick one like the exception.
"""


@dataclass(slots=True, kw_only=True, eq=False)
class _GridPoint:
    row: int
    column: int
    shape: IterationShape
    enough_s: float
    warm: bool = False
    repeats_itself: bool = False
    """In use it mostly follows an iteration of its own sizes."""
    primed: bool = False
    """It was the last to be computed."""
    skipped: bool = False
    times_s: list[float] = field(default_factory=list)
    calm_s: list[float] = field(default_factory=list)
    """Those of them that were taken while nothing else slowed the machine, as it looks by now."""

    @property
    def wanted(self) -> bool:
        """Whether it is to be computed again."""
        if self.skipped:
            return False
        repeats = len(self.times_s)
        if repeats < REPEATS_MIN or repeats % 2 == 0:
            return True
        if repeats >= REPEATS_DISTURBED_MAX:
            return False
        near = len(_near(self.calm_s, min(self.times_s)))
        if repeats >= REPEATS_MAX:
            return len(self.calm_s) < REPEATS_MIN
        return near < REPEATS_MIN or sum(self.times_s) < self.enough_s

    @property
    def visits_left(self) -> int:
        """How many more, as it looks."""
        if not self.wanted:
            return 0
        calls = 2 if self.repeats_itself else 1
        if not self.times_s:
            most = REPEATS_MAX if self.enough_s else REPEATS_MIN
            return most * calls + (not self.warm)
        mean_s = sum(self.times_s) / len(self.times_s)
        repeats = REPEATS_MIN
        while repeats < REPEATS_MAX and repeats * mean_s < self.enough_s:
            repeats += 2
        return max(repeats - len(self.times_s), 1) * calls

    @property
    def seconds(self) -> float | None:
        """None if it could not be measured. A shape that was skipped after some rounds counts with
        the times that it has.
        """
        if len(self.times_s) < REPEATS_MIN:
            return None
        return undisturbed_s(self.calm_s if len(self.calm_s) >= REPEATS_MIN else self.times_s)


class Survey:
    """The survey of an instance with these bounds; `kv_tokens` is what its KV cache holds. A
    `coarse` one times few sizes, and these as seldom as it can. `decodes`, `pasts`: whether the
    instance ever has such iterations.
    """

    __slots__ = (
        "_axes",
        "_decode",
        "_decodes",
        "_log",
        "_next",
        "_prefill",
        "_round",
        "_share",
        "_visits",
        "measured_s",
    )

    def __init__(
        self,
        *,
        context_tokens_max: int,
        batch_max: int,
        kv_tokens: int,
        prefill_tokens_max: int,
        coarse: bool = False,
        decodes: bool = True,
        pasts: bool = True,
    ) -> None:
        self._decodes = decodes
        self._axes: Axes = survey_axes(
            context_tokens_max=context_tokens_max,
            batch_max=batch_max,
            kv_tokens=kv_tokens,
            prefill_tokens_max=prefill_tokens_max,
            coarse=coarse,
            decodes=decodes,
            pasts=pasts,
        )
        enough_s = 0.0 if coarse else ENOUGH_S
        self._prefill = [
            _GridPoint(row=i, column=j, shape=shape, enough_s=enough_s)
            for i, j, shape in self._axes.prefill_shapes()
        ]
        self._decode = [
            _GridPoint(row=i, column=j, shape=shape, enough_s=enough_s, repeats_itself=True)
            for i, j, shape in self._axes.decode_shapes()
        ]
        self._round = [*self._prefill, *self._decode]
        self._log: list[tuple[_GridPoint, float]] = []
        """Counted times in their order."""
        self._next = 0
        self._visits = 0
        self._share = 0.0
        self.measured_s = 0.0
        """All seconds noted so far, those of the first round included."""

    def next_shape(self) -> IterationShape | None:
        """What to compute now, the same until it is noted or skipped; None when all is done."""
        return self._round[self._next].shape if self._round else None

    def note(self, elapsed_s: float) -> None:
        """The shape that was asked for took so long."""
        point = self._round[self._next]
        self.measured_s += elapsed_s
        if point.warm and point.repeats_itself and not point.primed:
            point.primed = True
            return
        if point.warm:
            point.times_s.append(elapsed_s)
            self._log.append((point, elapsed_s))
        point.warm, point.primed = True, False
        self._advance()

    def skip(self) -> None:
        """The shape that was asked for could not be computed; it is not asked for again."""
        self._round[self._next].skipped = True
        self._advance()

    def note_too_long(self, elapsed_s: float) -> None:
        """The shape that was asked for took longer than it may: it is not asked for again."""
        self.measured_s += elapsed_s
        self.skip()

    @property
    def phase(self) -> str:
        """What is under way, in words. All of a round belongs to one phase: reports that follow
        each other within a second would only flicker.
        """
        warm = all(point.warm or point.skipped for point in self._round)
        return "measure prefill and decode" if warm else "warm up"

    @property
    def share(self) -> float:
        """The share of the expected visits to shapes that are done, 0 to 1; it never falls."""
        left = sum(point.visits_left for point in self._round)
        done = self._visits / (self._visits + left) if left else 1.0
        self._share = max(self._share, done)
        return self._share

    def grids(self) -> tuple[Grid, Grid]:
        """Prefill and decode, as they are known by now; an instance without decodes has the time of
        one token in their place. EngineError when one is not at all.
        """
        axes = self._axes
        prefill = _grid(axes.prefill_rows, axes.prefill_columns, self._prefill)
        decode = _grid(axes.decode_rows, axes.decode_columns, self._decode)
        if prefill is not None and not self._decodes:
            decode = Grid(rows=(1,), columns=(0,), seconds=((prefill.at(1, 0),),))
        if prefill is None or decode is None:
            missing = "prefill" if prefill is None else "decode"
            raise EngineError(
                f"no {missing} iteration could be measured {REPEATS_MIN} times",
                hint="a KV cache of a few hundred tokens is the least that a profile needs",
            )
        return prefill, decode

    def _advance(self) -> None:
        self._visits += 1
        self._next += 1
        if self._next == len(self._round):
            self._tell_calm()
            self._round = [point for point in (*self._prefill, *self._decode) if point.wanted]
            self._next = 0

    def _tell_calm(self) -> None:
        """Which times were taken in calm moments: most of the shapes around then took hardly longer
        than they ever did. A shape that has met a neighbour each time is found out by the others.
        """
        slowed = [elapsed_s / min(point.times_s) for point, elapsed_s in self._log]
        for point in (*self._prefill, *self._decode):
            point.calm_s = []
        for at, (point, elapsed_s) in enumerate(self._log):
            around = slowed[max(at - MOMENT_VISITS, 0) : at + MOMENT_VISITS + 1]
            if median(around) <= 1.0 + AGREEMENT:
                point.calm_s.append(elapsed_s)


def undisturbed_s(times_s: Sequence[float]) -> float:
    """The median of the shortest REPEATS_MIN or more of these times that agree with each other; of
    all of them when so many do not. A single time that is shorter by far is chance.
    """
    for shortest_s in sorted(times_s):
        agreeing = _near(times_s, shortest_s)
        if len(agreeing) >= REPEATS_MIN:
            return median(agreeing)
    return median(times_s)


def _near(times_s: Sequence[float], shortest_s: float) -> list[float]:
    return [t for t in times_s if shortest_s <= t <= shortest_s * (1.0 + AGREEMENT)]


def _grid(rows: tuple[int, ...], columns: tuple[int, ...], points: list[_GridPoint]) -> Grid | None:
    measured: list[list[float | None]] = [[None] * len(columns) for _ in rows]
    for point in points:
        measured[point.row][point.column] = point.seconds
    return table(rows, columns, measured)
