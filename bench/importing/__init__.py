"""What bringing a model into a store takes, step by step: `make bench-import`."""
