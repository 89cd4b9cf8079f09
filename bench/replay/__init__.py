"""Whether a replay sends each call of a trace, of its lengths, at its time."""
