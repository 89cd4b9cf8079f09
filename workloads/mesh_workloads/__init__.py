"""Workloads: traces that are read from public files, and traces that are generated without any.

A trace is a list of arrivals: when, which function, how many tokens in and out. `reading` reads one
from a file, `generating` draws one from named parameters; both are deterministic by their seed.
"""
