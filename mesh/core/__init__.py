"""The two decision machines: `handle(event, now_s)` returns actions, and reads nothing else."""
