"""What the books of a test's world have to keep to, beyond what those of any cell do."""

from mesh.core.controller.state.cell import Cell
from mesh.core.controller.state.node import NodeEntry
from mesh.memory.station import OVERTAKEN_MAX
from mesh.sim import books
from tests.core.world.engine import WorldEngine


def check_books(node: NodeEntry) -> None:
    """All of it added up anew."""
    books.check_books(node)
    assert all(h.overtaken <= OVERTAKEN_MAX for h in node.station._holdings.values())


def check_engine(cell: Cell, link_id: int | None, engine: WorldEngine) -> None:
    """What an engine has of the instances that are in the books is no more than what is tracked,
    and nobody's blocks are taken away.
    """
    node = cell.links.get(link_id) if link_id is not None else None
    if node is not None:
        books.check_engine(node, engine.memory())
