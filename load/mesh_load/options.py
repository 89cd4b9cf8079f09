"""What locust is told of a replay: the options of `mesh replay`, beside locust's own.

They are taken from that verb, and read by its rules; the trace is `--trace`, its `--config` is
`--replay-config` here, and the cell's controller is locust's `--host`. Before: locust's command
line. After: `session`, which prepares the run.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import click

from mesh.cli.options import DEFAULT_ADDRESS, checked_address, file_option
from mesh.cli.replay_options import ReplayOptions, replay_options
from mesh.domain.errors import InvalidInput
from mesh.wire.certificates import Part, read_tls
from mesh.wire.credentials import TLS_VARIABLE, read_credentials, show

LOOPBACK = "127.0.0.1"
_RENAMED = {"--config": "--replay-config"}
"""Locust has an option of the first name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one run."""

    address: str
    """The controller's, by which the run is planned and counted."""
    http: str | None
    """Where calls go by OpenAI's protocol, if they do."""
    trace: Path | None
    given: ReplayOptions
    record: Path | None
    report: Path | None


@click.command()
@file_option("--trace", "A file of a known format, or a scenario with a generated workload.")
@file_option("--record", "Write each call down as it ends.", written=True)
@file_option("--report", "Write an HTML page in the end.", written=True)
@replay_options
def _replay(
    trace: Path | None, record: Path | None, report: Path | None, **given: Unpack[ReplayOptions]
) -> tuple[Path | None, Path | None, Path | None, ReplayOptions]:
    return trace, record, report, given


def add_options(parser: argparse.ArgumentParser) -> None:
    """Locust's own ports are the loopback's, unless it is told otherwise."""
    parser.set_defaults(master_bind_host=LOOPBACK, web_host=LOOPBACK)

    def add(name: str, text: str, **more: Any) -> None:
        # What locust's parser takes beside argparse's: its page does not ask for it.
        parser.add_argument(name, help=text, include_in_web_ui=False, **more)

    for option in _options():
        for name in (*option.opts, *option.secondary_opts):
            more = {"action": "store_true"} if option.is_flag else {"metavar": option.metavar}
            add(
                _RENAMED.get(name, name),
                (option.help or "A trace file.").replace("%", "%%"),
                **more,
            )
    add("--http", "Call by OpenAI's protocol, here; else by gRPC.", metavar="HOST:PORT")
    add("--key-file", "A key for the cell; default: MESH_KEY.", metavar="FILE")
    add("--tls", "Certificates for the cell; default: MESH_TLS.", metavar="DIR")


def show_credentials(parsed: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """What this process shows the cell, as `mesh` does. Raises InvalidInput."""
    folder, key_file = parsed.tls or environ.get(TLS_VARIABLE), parsed.key_file
    tls = read_tls(Path(folder), Part.CLIENT) if folder else None
    show(read_credentials(environ, Path(key_file) if key_file else None, tls))


def read_options(parsed: argparse.Namespace) -> Options:
    """Raises InvalidInput for what `mesh replay` would not take."""
    words: list[str] = []
    for option in _options():
        for name in (*option.opts, *option.secondary_opts):
            value = getattr(parsed, _RENAMED.get(name, name).lstrip("-").replace("-", "_"))
            if value:
                words += [name] if option.is_flag else [name, str(value)]
    try:
        trace, record, report, given = _replay.main(words, standalone_mode=False)
        address = checked_address(parsed.host or DEFAULT_ADDRESS)
        http = checked_address(parsed.http) if parsed.http else None
    except click.UsageError as error:
        raise InvalidInput(error.format_message(), hint="see locust --help") from error
    return Options(
        address=address,
        http=http,
        trace=trace,
        given=given,
        record=record,
        report=report,
    )


def _options() -> list[click.Option]:
    return [param for param in _replay.params if isinstance(param, click.Option)]
