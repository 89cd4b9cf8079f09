"""What `mesh sim` does when things go wrong: the command that replays a failure, and a journal for
each of a cell's controllers.
"""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click

from mesh.domain.errors import MeshError
from mesh.runtime.host import Recorder
from mesh.runtime.journal import ControllerStart, open_journal


def command_of(ctx: click.Context, seed: int) -> str:
    """The command that this one is, with the seed that it runs."""
    words = ["mesh", "sim", str(ctx.params["scenario"])]
    for name in ("policy", "trace", "functions", "duration", "output_tokens_max"):
        value = ctx.params[name]
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    words += [f"--{name}" for name in ("ideal", "check") if ctx.params[name]]
    return shlex.join([*words, "--seed", str(seed)])


@contextmanager
def replayable(command: str) -> Iterator[None]:
    """What is no error of the caller's is a fault of mesh, and comes again with the command.

    Raises MeshError with the command as its hint.
    """
    try:
        yield
    except MeshError:
        raise
    except Exception as error:
        raise MeshError(
            f"{type(error).__name__}: {error}", hint=f"this is a fault of mesh; again: {command}"
        ) from error


class Journals:
    """FILE for the first controller of a cell, FILE-2 and so on for those that follow it."""

    def __init__(self, path: Path | None, opened: ExitStack) -> None:
        self._path = path
        self._opened = opened

    def started(self, start: ControllerStart) -> Sequence[Recorder]:
        """Raises StorageError when the file cannot be written."""
        if self._path is None:
            return ()
        name = self._path.stem + (f"-{start.epoch}" if start.epoch > 1 else "")
        journal = open_journal(self._path.with_name(name + self._path.suffix), start)
        self._opened.callback(journal.close)
        return (journal,)
