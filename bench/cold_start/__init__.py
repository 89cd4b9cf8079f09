"""From a request to its first token, by where the model's weights are: `make bench-cold-start`."""
