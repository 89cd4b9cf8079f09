"""How well a measured profile predicts real iterations: `make bench-profile`."""
