"""What loads do to who computes beside them: `make bench-beside-load`."""
