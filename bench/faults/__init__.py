"""Many seeds of one scenario of faults, all rules held: `python -m bench.faults`."""
