"""What every benchmark prints: how far it is, tables for people, and a last line for programs."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

from mesh.cli import output
from mesh.cli.main import INTERRUPTED
from mesh.domain.errors import MeshError


def show_status(line: str) -> None:
    """On one line of a terminal that the next one takes the place of, and nowhere else: a phase has
    hundreds of lines. An empty one wipes the last.
    """
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


@contextmanager
def errors_told() -> Iterator[None]:
    """A MeshError ends the benchmark, told with its hint; Ctrl-C ends it as it ends `mesh`. The
    status line is wiped either way.
    """
    try:
        yield
    except MeshError as error:
        sys.exit(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        show_status("")


def show_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", words: int = 1
) -> None:
    """Columns after the first `words` are numbers."""
    output.text(title, end="\n" if title else "")
    output.table(output.text_columns(headings, words), rows)


def exit_by(targets: Mapping[str, bool]) -> NoReturn:
    """Code 1 where any is missed; those that are, by their names."""
    missed = [name for name, reached in targets.items() if not reached]
    output.message(f"missed: {', '.join(missed)}" if missed else "all targets reached")
    sys.exit(1 if missed else 0)


def last_line(figures: Mapping[str, object], *, surveyed: bool = False) -> None:
    """One JSON object. `surveyed`: whether `mesh profile` has measured a model of a cell of it; a
    cell as `mesh up` starts it has what comes by itself.
    """
    print(json.dumps({**figures, "surveyed": surveyed}))


def rounded(figure: float | None) -> float | None:
    """For `last_line`; None stays."""
    return None if figure is None else round(figure, 4)
