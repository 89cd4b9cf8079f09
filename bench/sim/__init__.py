"""How long the simulator takes, and how that grows with nodes and requests: `make bench-sim`."""
