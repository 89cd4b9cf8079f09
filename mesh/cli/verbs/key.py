"""`mesh key`: the keys of a cell, and the limits of its tenants, on the controller's machine.

It writes to the controller's state folder, so that whoever may do that makes keys, and nobody does
over the network; a controller that runs obeys at once.
"""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import click

from mesh.cli import output
from mesh.cli.options import format_option, home_option, span_s
from mesh.cli.output import Column, Format, word
from mesh.cli.tables import limit_of, utc_minute
from mesh.controller.keys import KeyBook
from mesh.domain.access import Key, Role, TenantLimits, TenantName
from mesh.domain.errors import InvalidInput

_KEYS: tuple[Column[Key], ...] = (
    word("KEY", lambda k: k.key_id),
    word("ROLE", lambda k: k.role),
    word("TENANT", lambda k: k.tenant),
    word("STATE", lambda k: _state(k)),
    word("CREATED", lambda k: utc_minute(k.created_unix_s)),
    word("EXPIRES", lambda k: k.expires_unix_s and utc_minute(k.expires_unix_s)),
)
Limited = tuple[TenantName, TenantLimits]
_LIMITS: tuple[Column[Limited], ...] = (
    word("TENANT", lambda t: t[0]),
    word("REQUESTS_PER_S", lambda t: limit_of(t[1].requests_per_s)),
    word("TOKENS_PER_MIN", lambda t: limit_of(t[1].tokens_per_min)),
    word("RUNNING", lambda t: limit_of(t[1].running)),
    word("DEPLOYMENTS", lambda t: limit_of(t[1].deployments)),
)


@click.group()
def key() -> None:
    """Make, list and revoke keys of the cell whose controller has its state on this machine."""


@key.command()
@click.option(
    "--role",
    type=click.Choice([role.value for role in Role]),
    default=Role.TENANT.value,
    show_default=True,
    callback=lambda _, __, value: Role(value),
    help="What it opens.",
)
@click.option("--tenant", metavar="NAME", default="", help="Whose it is; of the role tenant.")
@click.option("--expires", metavar="AGE", help="30m, 24h, 90d; default: never.")
@home_option
def create(role: Role, tenant: str, expires: str | None, home: Path) -> None:
    """Make a key and write it to standard output, this once."""
    expires_unix_s = None if expires is None else time.time() + _age_s(expires)
    with _book(home) as book:
        secret, made = book.create(role, TenantName(tenant), expires_unix_s=expires_unix_s)
    output.text(secret)
    output.message(f"{made.key_id}: created; it is not shown again")


@key.command("list")
@format_option
@home_option
def list_keys(form: Format, home: Path) -> None:
    """List the keys; what they open by is not kept."""
    with _book(home) as book:
        output.answer(form, _KEYS, book.all_keys())


@key.command()
@click.argument("key_ids", metavar="KEY...", nargs=-1, required=True)
@home_option
def revoke(key_ids: tuple[str, ...], home: Path) -> None:
    """Have keys open nothing from now on. Calls under way go on."""
    with _book(home) as book:
        for key_id in key_ids:
            book.revoke(key_id)
            output.message(f"{key_id}: revoked")


@key.command()
@click.argument("tenant")
@click.option("--requests-per-s", type=click.FloatRange(min=0), help="Calls in a second.")
@click.option("--tokens-per-min", type=click.FloatRange(min=0), help="Prompt and output.")
@click.option("--running", type=click.IntRange(min=0), help="Calls at one time.")
@click.option("--deployments", type=click.IntRange(min=0))
@home_option
def limit(
    tenant: str,
    requests_per_s: float | None,
    tokens_per_min: float | None,
    running: int | None,
    deployments: int | None,
    home: Path,
) -> None:
    """Set all limits of a tenant: what is not given has none."""
    limits = TenantLimits(
        requests_per_s=requests_per_s,
        tokens_per_min=tokens_per_min,
        running=running,
        deployments=deployments,
    )
    with _book(home) as book:
        book.limit(TenantName(tenant), limits)
    output.message(f"{tenant}: limited")


@key.command()
@format_option
@home_option
def limits(form: Format, home: Path) -> None:
    """List the limits of tenants."""
    with _book(home) as book:
        found = book.limited()
    output.answer(form, _LIMITS, list(found.items()), found)


@contextmanager
def _book(home: Path) -> Iterator[KeyBook]:
    with closing(KeyBook(home / "controller")) as book:
        yield book


def _state(kept: Key) -> str:
    if kept.revoked_unix_s is not None:
        return "revoked"
    expired = kept.expires_unix_s is not None and kept.expires_unix_s <= time.time()
    return "expired" if expired else "valid"


def _age_s(text: str) -> float:
    """Raises InvalidInput."""
    age_s = span_s(text, "mhd")
    if age_s is None:
        raise InvalidInput(f"--expires {text!r} is no age", hint="write 30m, 24h or 90d")
    return age_s
