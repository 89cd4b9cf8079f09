"""A trace replayed against a live cell: its calls, what came of them, in numbers and on a page."""
