"""Which requests meet their SLO on a node with too much to do: `make bench-slo`."""
