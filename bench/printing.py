"""What every benchmark prints: how far it is, tables for people, and a last line for programs."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from mesh.cli import output
from mesh.domain.errors import MeshError


def show_status(line: str) -> None:
    """On one line of a terminal that the next one takes the place of, and nowhere else: a phase has
    hundreds of lines. An empty one wipes the last.
    """
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


@contextmanager
def errors_told() -> Iterator[None]:
    """A MeshError ends the benchmark, told with its hint. The status line is wiped either way."""
    try:
        yield
    except MeshError as error:
        sys.exit(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""))
    finally:
        show_status("")


def show_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", words: int = 1
) -> None:
    """Columns after the first `words` are numbers."""
    output.text(title, end="\n" if title else "")
    output.table(output.text_columns(headings, words), rows)


def last_line(figures: Mapping[str, object]) -> None:
    """One JSON object."""
    print(json.dumps(figures))
