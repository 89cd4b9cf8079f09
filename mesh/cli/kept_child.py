"""A child of a local cell over all of its processes: started, looked at, started again.

It carries out what `restarts` decides and tells the terminal of it; the processes themselves are
`children`'s. All of it happens on the thread that looks, which must live as long as the cell:
`tied` has the kernel end a child with the thread that started it.
"""

from collections.abc import Callable

from mesh.cli import children, output
from mesh.cli.children import Child
from mesh.cli.restarts import RestartLimits, Restarts
from mesh.domain.errors import MeshError

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
