"""Twice as much memory wanted as a node has: `make bench-overcommit`."""
