"""Many models on one small node, beside what a person would set up by hand: `make bench-fleet`."""
