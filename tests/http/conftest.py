"""A live cell, as tests of the controller have it, and what asks it by HTTP."""

import pytest

from tests.controller.conftest import cell, own, pytest_itemcollected, serving, shared
from tests.controller.live import LiveCell
from tests.http.edge import Edge

__all__ = ["cell", "http", "own", "pytest_itemcollected", "serving", "shared"]


@pytest.fixture
def http(cell: LiveCell) -> Edge:
    return Edge(cell)
