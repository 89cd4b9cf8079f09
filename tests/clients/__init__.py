"""Clients that nobody here wrote, unchanged: `make test-clients`."""
