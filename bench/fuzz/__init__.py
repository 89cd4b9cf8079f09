"""Wrong, odd and damaged calls to a cell, by HTTP and gRPC: `make fuzz`."""
