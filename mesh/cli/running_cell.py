"""A cell of this machine for as long as a command needs one: started, waited for, and stopped.

Before: `mesh demo`, `mesh bench`. After: `cell`, which owns the processes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mesh.cli.cell import LocalCell
from mesh.cli.cell_plan import CellPlan
from mesh.cli.stopping import Stopping


@contextmanager
def running_cell(
    plan: CellPlan, stopping: Stopping, on_ready: Callable[[str], None] = lambda line: None
) -> Iterator[LocalCell]:
    """Its nodes have joined; `on_ready` hears a line for each part.

    Raises KeyboardInterrupt when stopped before that, MeshError when a part does not start.
    """
    cell = LocalCell(plan)
    try:
        cell.start()
        if not cell.wait_ready(stopping.asked, on_ready):
            raise KeyboardInterrupt
        yield cell
    finally:
        cell.stop(stopping.asked_again)
