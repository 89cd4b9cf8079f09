"""`mesh usage`: tokens, requests and refusals by whom and when, for those who send bills."""

import time
from datetime import UTC, datetime

import click

from mesh.cli import output
from mesh.cli.options import controller_option, output_option, span_s
from mesh.cli.output import Column, Format, number, word
from mesh.cli.tables import utc_minute
from mesh.domain.errors import InvalidInput
from mesh.domain.usage import Usage, UsageBy
from mesh.wire.client import MeshClient

_COUNTS: tuple[Column[Usage], ...] = (
    number("REQUESTS", lambda u: u.requests),
    number("PROMPT_TOKENS", lambda u: u.prompt_tokens),
    number("OUTPUT_TOKENS", lambda u: u.output_tokens),
    number("REFUSED", lambda u: u.refused),
    number("ENERGY_J", lambda u: None if u.energy_j is None else f"{u.energy_j:.1f}"),
)
_HOUR: Column[Usage] = word("HOUR", lambda u: utc_minute(u.hour_unix_s))
_DEPLOYMENT: Column[Usage] = word("DEPLOYMENT", lambda u: u.deployment or "(unknown)")
_TENANT: Column[Usage] = word("TENANT", lambda u: u.tenant or "(none)")
_KEY: Column[Usage] = word("KEY", lambda u: u.key_id or "(none)")
_CLASS: Column[Usage] = word("CLASS", lambda u: u.slo_class or "(none)")
_COLUMNS = {
    UsageBy.DEPLOYMENT: (_DEPLOYMENT, *_COUNTS),
    UsageBy.HOUR: (_HOUR, *_COUNTS),
    UsageBy.BOTH: (_HOUR, _DEPLOYMENT, *_COUNTS),
    UsageBy.TENANT: (_TENANT, *_COUNTS),
    UsageBy.KEY: (_TENANT, _KEY, *_COUNTS),
    UsageBy.CLASS: (_DEPLOYMENT, _CLASS, *_COUNTS),
}


@click.command()
@click.option(
    "--by",
    type=click.Choice([by.value for by in UsageBy]),
    default=UsageBy.DEPLOYMENT.value,
    show_default=True,
    callback=lambda _, __, value: UsageBy(value),
    help="A line each.",
)
@click.option(
    "--since",
    metavar="WHEN",
    default="30d",
    show_default=True,
    help="24h, 7d, or a date or time such as 2026-11-01 or 2026-11-01T08:00 (UTC).",
)
@output_option(tuple(Format), "How the data is written.")
@controller_option
def usage(by: UsageBy, since: str, form: Format, address: str) -> None:
    """Show what was used: by deployment, hour, tenant, key or class. An hour is counted whole."""
    since_unix_s = _unix_s(since)
    with MeshClient(address) as client:
        found = client.usage(since_unix_s, by)
    if form is Format.CSV:
        output.comma_separated(_COLUMNS[by], found)
    else:
        output.answer(form, _COLUMNS[by], found)


def _unix_s(since: str) -> float:
    """Raises InvalidInput."""
    age_s = span_s(since, "hd")
    if age_s is not None:
        return time.time() - age_s
    try:
        at = datetime.fromisoformat(since)
    except ValueError:
        raise InvalidInput(
            f"--since {since!r} is no time", hint="write 24h, 7d, 2026-11-01 or 2026-11-01T08:00"
        ) from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
