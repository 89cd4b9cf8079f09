"""What holds of every cell, spelled once: for the simulator's fault runs and for all tests.

Pure functions look at a core between two events and raise RuleBroken: `check_cell` at a controller
core, `check_node_core` at a node core, `check_engine` at a node's books against what its engine
really has, `check_blocks` at that engine's KV blocks, `check_rest` at a cell in which nothing is
under way. `Watch` sees what takes more than one look. Production imports none of it.
"""

from mesh.sim.invariants.cell import check_cell as check_cell
from mesh.sim.invariants.cell import check_rest as check_rest
from mesh.sim.invariants.memory import check_books as check_books
from mesh.sim.invariants.memory import check_engine as check_engine
from mesh.sim.invariants.node import check_blocks as check_blocks
from mesh.sim.invariants.node import check_node_core as check_node_core
from mesh.sim.invariants.rule import RuleBroken as RuleBroken
from mesh.sim.invariants.rule import hold as hold
from mesh.sim.invariants.watch import Watch as Watch
