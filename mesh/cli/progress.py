"""Draws long work on stderr: a live bar on a terminal, a few plain lines elsewhere.

`deploy`, `pull`, `demo` and `invoke` report a phase in words and the share that is done; this
module decides how often that is worth a line.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from mesh.cli import output
from mesh.runtime.engine import same_phase

PLAIN_INTERVAL_S = 10.0
"""Without a terminal a phase that goes on and on says so this often."""

Report = Callable[[str, float], None]


@contextmanager
def progress(title: str, *, quiet_unless_terminal: bool = False) -> Iterator[Report]:
    """Yields what is to be called with a phase and the share done, 0 to 1."""
    if sys.stderr.isatty():
        yield from _bar(title)
    elif quiet_unless_terminal:
        yield lambda phase, share: None
    else:
        yield _lines(title)


def _bar(title: str) -> Iterator[Report]:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=output.console(sys.stderr), transient=True) as bar:
        task = bar.add_task(title, total=1.0)

        def report(phase: str, share: float) -> None:
            shown = output.harmless(f"{title}: {phase}" if phase else title)
            bar.update(task, description=shown, completed=share)

        yield report


def _lines(title: str) -> Report:
    said_phase = ""
    said_at_s = 0.0

    def report(phase: str, share: float) -> None:
        nonlocal said_phase, said_at_s
        now_s = time.monotonic()
        again = same_phase(phase, said_phase)
        if again and now_s - said_at_s < PLAIN_INTERVAL_S:
            return
        done = f" ({share:.0%})" if again else ""
        said_phase, said_at_s = phase, now_s
        output.message(f"{title}: {phase}{done}")

    return report
