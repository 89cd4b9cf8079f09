"""What controller, gRPC and node agent add to the bare engine: `make bench-overhead`."""
