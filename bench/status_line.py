"""How far a benchmark has come, on one line of a terminal that the next one takes the place of."""

import sys


def show_status(line: str) -> None:
    """On standard error, and only where that is a terminal: a phase has hundreds of lines. An empty
    one wipes the last.
    """
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
