"""One call for each of several names: each is tried, and one that fails makes the verb fail."""

from collections.abc import Callable, Sequence

import click

from mesh.cli import output
from mesh.domain.errors import InvalidInput, MeshError, Unavailable


def each(
    ctx: click.Context, names: Sequence[str], call: Callable[[str], object], done: str
) -> None:
    """Say `done` of each name that `call` did not fail on. Raises Unavailable at once."""
    failures: list[MeshError] = []
    for name in names:
        try:
            call(name)
        except Unavailable:
            raise
        except MeshError as error:
            failures.append(error)
            output.error(error)
        else:
            output.message(f"{name}: {done}")
    if failures:
        only_usage = len(failures) == len(names) and all(
            isinstance(error, InvalidInput) for error in failures
        )
        ctx.exit(2 if only_usage else 1)
