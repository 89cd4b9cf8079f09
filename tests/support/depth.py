"""How far property tests and seeded walks search: `make faults` sets `MESH_DEEP`."""

import os

DEEP = "MESH_DEEP" in os.environ
