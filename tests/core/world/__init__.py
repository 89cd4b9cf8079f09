"""A whole cell in one process, under a clock that the test moves; see `cell`."""
