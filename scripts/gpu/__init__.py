"""Programs that measure and check on GPU nodes."""
