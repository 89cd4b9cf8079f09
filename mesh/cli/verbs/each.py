"""The verbs that do one thing to each of several names: `load`, `unload`, `delete`, `cancel`.

Each name is tried, and one that fails makes the verb fail.
"""

from collections.abc import Callable

import click

from mesh.cli import output
from mesh.cli.options import controller_option
from mesh.domain.errors import InvalidInput, MeshError, Unavailable
from mesh.domain.ids import DeploymentName, RequestId
from mesh.wire.client import MeshClient


def _each(
    call: Callable[[MeshClient, str], object], done: str, address: str, names: tuple[str, ...]
) -> None:
    """Say `done` of each name that `call` did not fail on. Raises Unavailable at once."""
    failures: list[MeshError] = []
    with MeshClient(address) as client:
        for name in names:
            try:
                call(client, name)
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
        raise click.exceptions.Exit(2 if only_usage else 1)


_NAMES = click.argument("names", metavar="NAME...", nargs=-1, required=True)


@click.command()
@_NAMES
@controller_option
def load(names: tuple[str, ...], address: str) -> None:
    """Begin to load an instance of each deployment, unless it has one; `mesh wait` waits for it."""
    _each(lambda c, name: c.load(DeploymentName(name)), "loading, or loaded", address, names)


@click.command()
@_NAMES
@controller_option
def unload(names: tuple[str, ...], address: str) -> None:
    """Have the instances of deployments go: idle ones now, the others with their last request."""
    _each(lambda c, name: c.unload(DeploymentName(name)), "unloading", address, names)


@click.command()
@_NAMES
@controller_option
def delete(names: tuple[str, ...], address: str) -> None:
    """Delete deployments. Every one is tried; one that fails makes the command fail."""
    _each(lambda c, name: c.delete(DeploymentName(name)), "deleted", address, names)


@click.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@controller_option
def cancel(ids: tuple[str, ...], address: str) -> None:
    """End requests, which `mesh requests` lists; their clients are told. Every one is tried."""
    _each(lambda c, one: c.cancel(RequestId(one)), "cancelled", address, ids)
