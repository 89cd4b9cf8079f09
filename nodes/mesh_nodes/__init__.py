"""The node agent: what a machine runs to serve models for a cell. `main` is its root."""
