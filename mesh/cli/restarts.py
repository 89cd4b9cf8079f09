"""Decides when a child of `mesh up` that ended is started again, and when no more.

Pure, one `Restarts` per child: what was seen of the child and the time go in, a decision comes out.
`kept_child` looks at the process, tells what it saw and carries the decision out. A pause grows
with every restart in a row; the count is forgiven once the child has served for a while.
"""

from mesh.domain.values import dataclass

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
class Restart:
    """Start it again at `at_s`, `pause_s` from now: the restart of this number in a row."""

    at_s: float
    pause_s: float
    number: int


class Restarts:
    """Counts the restarts of one child, over all of its processes."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self.in_a_row = 0
        self._serves_since_s: float | None = None

    def serves(self, now_s: float) -> None:
        """The controller answers, or the cell has the node; `now_s` is monotonic."""
        if self._serves_since_s is None:
            self._serves_since_s = now_s

    def ended(self, exit_code: int, now_s: float) -> Restart | None:
        """What follows the end of a process; None: the child is given up. `exit_code` is below 0
        for a signal, as subprocess has it.
        """
        since_s, self._serves_since_s = self._serves_since_s, None
        if since_s is not None and now_s - since_s >= self._limits.well_s:
            self.in_a_row = 0
        if exit_code == USAGE or self.in_a_row >= self._limits.in_a_row_max:
            return None
        pause_s = min(self._limits.pause_s_max, self._limits.pause_s_min * 2.0**self.in_a_row)
        self.in_a_row += 1
        return Restart(at_s=now_s + pause_s, pause_s=pause_s, number=self.in_a_row)
