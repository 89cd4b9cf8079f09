"""Weights of 8 and 4 bits beside each other: speed, bytes, quality: `python -m bench.weights`."""
