"""What callers of deployments at zero are told, and whether it holds: `make bench-late-starts`."""
