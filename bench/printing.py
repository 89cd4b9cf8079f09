"""What every benchmark prints: how far it is, tables for people, and a last line for programs."""

import json
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

WIDTH = 100


def show_status(line: str) -> None:
    """On one line of a terminal that the next one takes the place of, and nowhere else: a phase has
    hundreds of lines. An empty one wipes the last.
    """
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def note(line: str) -> None:
    """On standard error, to stay."""
    print(line, file=sys.stderr)


def show_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", words: int = 1
) -> None:
    """Columns after the first `words` are numbers. Without headings there is no line of them."""
    table = Table(title=title or None, title_justify="left", box=None, show_header=any(headings))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < words else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=WIDTH).print(table)


def say(words: str) -> None:
    Console(width=WIDTH).print(words, soft_wrap=True)


def last_line(figures: Mapping[str, object]) -> None:
    """One JSON object."""
    print(json.dumps(figures))
