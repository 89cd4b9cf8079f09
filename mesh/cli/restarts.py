"""Decides when a child of `mesh up` that ended is started again, and when no more.

Pure, one `Restarts` per child: what was seen of the child and the time go in, a decision comes out.
`cell` looks at the processes, tells what it saw and carries the decision out. A pause grows with
every restart in a row; the count is forgiven once the child has served for a while.
"""

from dataclasses import dataclass

USAGE = 2
"""The exit code of a child that was told something that cannot be meant: it will say so again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    in_a_row_max: int = 5
    """Restarts of a child, none of which served for `well_s`."""
    pause_s_min: float = 0.5
    """Before the first restart; doubled for each further one in a row."""
    pause_s_max: float = 8.0
    well_s: float = 10.0
    """A child that has served for so long is well: what was before does not count any more."""


NO_RESTARTS = RestartLimits(in_a_row_max=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serves:
    """The controller answers, or the cell has the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """`exit_code` is below 0 for a signal, as subprocess has it."""

    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Start it again at `at_s`, `pause_s` from now: the restart of this number in a row."""

    at_s: float
    pause_s: float
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """It is not started again, after so many restarts in a row."""

    restarts: int


class Restarts:
    """Counts the restarts of one child, over all of its processes."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._in_a_row = 0
        self._serves_since_s: float | None = None

    def handle(self, seen: Serves | Ended, now_s: float) -> Restart | GiveUp | None:
        """`now_s` is monotonic. None: there is nothing to do."""
        if isinstance(seen, Serves):
            if self._serves_since_s is None:
                self._serves_since_s = now_s
            return None
        since_s, self._serves_since_s = self._serves_since_s, None
        if since_s is not None and now_s - since_s >= self._limits.well_s:
            self._in_a_row = 0
        if seen.exit_code == USAGE or self._in_a_row >= self._limits.in_a_row_max:
            return GiveUp(restarts=self._in_a_row)
        pause_s = min(self._limits.pause_s_max, self._limits.pause_s_min * 2.0**self._in_a_row)
        self._in_a_row += 1
        return Restart(at_s=now_s + pause_s, pause_s=pause_s, number=self._in_a_row)
