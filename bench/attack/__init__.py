"""What a tenant with a key can do to a cell, and what the others notice of it: `make attack`."""
