"""Clients that leave, a thousand at once: `make bench-leaving`."""
