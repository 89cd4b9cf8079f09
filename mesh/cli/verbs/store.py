"""`mesh store`: what this machine's model store holds, whether it is whole, and what may go.

Works on the disk alone; `gc --originals` and `rm` ask the cell, if it answers, what it needs.
"""

from pathlib import Path
from typing import NamedTuple

import click

from mesh.cli import output, tables
from mesh.cli.options import controller_option, format_option, home_option
from mesh.cli.output import Column, Format, number, word
from mesh.cli.progress import progress
from mesh.domain.errors import InvalidInput, StorageError, Unavailable
from mesh.domain.model import ModelInfo, stored_id
from mesh.domain.units import format_bytes
from mesh.report.plain import plain_fields
from mesh.wire.client import MeshClient
from mesh_loader.digests import Damage
from mesh_loader.disk import tree_bytes
from mesh_loader.store import ModelStore, StoredModel
from mesh_loader.upkeep import Leftover, collect, stored_damages

_PREPARING_ENGINE = "openvino"
"""The one that loads models without their original weights."""


class _Listed(NamedTuple):
    info: ModelInfo
    stored_bytes: int
    """With what engines derived."""
    in_use: bool


_LS: tuple[Column[_Listed], ...] = (
    word("MODEL", lambda m: m.info.model_id),
    word("ARCHITECTURE", lambda m: m.info.architecture),
    number("PARAMETERS_M", lambda m: f"{m.info.parameters / 1e6:.1f}"),
    number("STORED_MIB", lambda m: tables.mebibytes(m.stored_bytes)),
    word("IN_USE", lambda m: "yes" if m.in_use else "no"),
    word("SOURCE", lambda m: m.info.source),
)
_DAMAGES: tuple[Column[Damage], ...] = (
    word("DAMAGED", lambda d: d.path),
    word("HOW", lambda d: d.what),
)
_LEFTOVERS: tuple[Column[Leftover], ...] = (
    word("REMOVED", lambda f: f.path),
    number("SIZE_MIB", lambda f: tables.mebibytes(f.size_bytes)),
    word("WHY", lambda f: f.why),
)


@click.group()
def store() -> None:
    """List, check and clear this machine's model store. `mesh pull` imports into it."""


@store.command()
@format_option
@home_option
def ls(form: Format, home: Path) -> None:
    """List the stored models, and whether a node of this machine has them loaded."""
    models = ModelStore(home / "store")
    found = [_listed(models, stored) for stored in models.models()]
    whole = [
        {**plain_fields(m.info), "stored_bytes": m.stored_bytes, "in_use": m.in_use} for m in found
    ]
    output.answer(form, _LS, found, whole)
    damaged = models.damaged()
    for error in damaged[:-1]:
        output.error(error)
    if damaged:
        raise damaged[-1]


@store.command()
@format_option
@home_option
def verify(form: Format, home: Path) -> None:
    """Read all that is stored, and name what is damaged: then the exit code is 1."""
    models = ModelStore(home / "store")
    with progress("store", quiet_unless_terminal=True) as report:
        report("read", 0.0)
        found = list(stored_damages(models))
    whole = [{"path": str(d.path), "damage": d.what} for d in found]
    output.answer(form, _DAMAGES, found, whole)
    if found:
        raise StorageError(
            f"{len(found)} damaged in {models.root}",
            hint="`mesh store rm MODEL` and import it again; what lies in prepared/ or compiled/ "
            "may be deleted: nodes make it anew",
        )


@store.command()
@click.option(
    "--originals",
    is_flag=True,
    help="Also original weights, where a CPU node's prepared ones are there and whole.",
)
@format_option
@controller_option
@home_option
def gc(originals: bool, form: Format, address: str, home: Path) -> None:
    """Remove what killed processes left, and compiled shapes that no stored model has."""
    if originals:
        _require_no_other_engine(address)
    found = list(collect(ModelStore(home / "store"), originals=originals))
    whole = [{"path": str(f.path), "size_bytes": f.size_bytes, "why": f.why} for f in found]
    output.answer(form, _LEFTOVERS, found, whole)
    output.message(f"{format_bytes(sum(f.size_bytes for f in found))} removed")


@store.command()
@click.argument("model_ids", metavar="MODEL…", nargs=-1, required=True)
@controller_option
@home_option
def rm(model_ids: tuple[str, ...], address: str, home: Path) -> None:
    """Remove models, unless they are deployed or loaded."""
    models, users = ModelStore(home / "store"), _users(address)
    for model_id in model_ids:
        if model_id in users:
            raise Unavailable(
                f"{model_id} is deployed as {', '.join(users[model_id])}",
                hint=f"mesh delete {' '.join(users[model_id])}",
            )
    for model_id in model_ids:
        models.remove(model_id)
        output.message(f"{model_id}: removed")


def _listed(models: ModelStore, stored: StoredModel) -> _Listed:
    size_bytes = tree_bytes(stored.path)
    with models.unused(stored.info.model_id) as free:
        return _Listed(stored.info, size_bytes, not free)


def _users(address: str) -> dict[str, list[str]]:
    """The names of each stored model's deployments."""
    users: dict[str, list[str]] = {}
    try:
        with MeshClient(address) as client:
            for deployment in client.list():
                if deployment.model is not None:
                    model_id = stored_id(deployment.model.model_id)
                    users.setdefault(model_id, []).append(deployment.spec.name)
    except Unavailable:
        output.message(f"no controller answers at {address}: deployments are not looked at")
    return users


def _require_no_other_engine(address: str) -> None:
    try:
        with MeshClient(address) as client:
            others = [node for node in client.nodes() if node.engine != _PREPARING_ENGINE]
    except Unavailable:
        output.message(f"no controller answers at {address}: its nodes are not looked at")
        return
    if others:
        raise InvalidInput(
            f"{others[0].node_id} computes with {others[0].engine}, which needs original weights",
            hint="leave out --originals",
        )
