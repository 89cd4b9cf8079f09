"""A child of a local cell over all of its processes: started, looked at, started again.

`Restarts` decides when a child that ended is started again, and when no more: a pause grows with
every restart in a row, and the count is forgiven once the child has served for a while. `KeptChild`
carries that out and tells the terminal of it; the processes themselves are `children`'s. All of it
happens on the thread that looks, which must live as long as the cell: `tied` has the kernel end a
child with the thread that started it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mesh.cli import children, output
from mesh.cli.children import Child
from mesh.domain.errors import MeshError

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


LET_GO_S_MAX = 15.0
"""For the cell to let go of a node that has ended; above a node's lease."""


class KeptChild:
    """`begin` starts a process of it, told whether there was one before in this run. `node`: as the
    cell names it; None for the controller.
    """

    def __init__(
        self, name: str, begin: Callable[[bool], Child], limits: RestartLimits, node: str | None
    ) -> None:
        self.name = name
        self.node = node
        self.serving = False
        self.process: Child | None = begin(False)
        """None from its end to its restart."""
        self._begin = begin
        self._limits = limits
        self._restarts = Restarts(limits)
        self._restart_at_s = 0.0
        self._restarted = False

    def look(self, now_s: float) -> None:
        """See whether it has ended. Raises MeshError when it is not to be started again."""
        if self.process is not None and not self.process.running:
            self._end(self.process, now_s)

    def follow(self, now_s: float, *, answers: bool) -> None:
        """For one that did not serve at the last look: start it again when that is due, and see
        whether it serves. `answers`: the controller answers, or the cell has the node.

        A node is not started before the cell has let go of the process before: it would be sent
        away for its name. Raises StorageError without a log.
        """
        if self.process is not None:
            if answers:
                self._restarts.serves(now_s)
                self.serving = True
                if self._restarted:
                    output.message(f"{self.name} is back")
        elif now_s >= self._restart_at_s + (LET_GO_S_MAX if answers else 0.0):
            self.process = self._begin(True)
            self._restarted = True

    def _end(self, process: Child, now_s: float) -> None:
        children.clear(process)
        self.process, self.serving = None, False
        for line in process.log_tail():
            output.message(f"  {line}")
        what, most = f"{self.name} {process.fate()}", self._limits.in_a_row_max
        restart = self._restarts.ended(process.process.returncode, now_s)
        if restart is None:
            restarts = self._restarts.in_a_row
            after = f" after restart {restarts} of {most} in a row" if restarts else ""
            raise MeshError(f"{what}{after}", hint=f"its whole log is {process.log_path}")
        self._restart_at_s = restart.at_s
        output.message(f"{what}; restart {restart.number} of {most} in {restart.pause_s:g} s")
