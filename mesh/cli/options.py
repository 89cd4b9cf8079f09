"""Options that several verbs share, and what their values mean.

Environment variables are read here, as defaults of options, and nowhere else in the command line.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import platformdirs

from mesh.cli.output import Format
from mesh.domain.errors import InvalidInput
from mesh.domain.source_rules import read_source_rules
from mesh.wire.channel import parse_address
from mesh_nodes.options import AUTO as AUTO
from mesh_nodes.options import DEFAULT_ADDRESS as DEFAULT_ADDRESS
from mesh_nodes.options import OPTIONS

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_HTTP = "127.0.0.1:8070"
HTTP_OFF = "off"
POLICY_HELP = "How requests are placed and take turns: llm-mesh (the default) or fcfs."


def controller_option(command: Command) -> Command:
    """`--controller HOST:PORT`, given to the command as `address`."""
    return click.option(
        "--controller",
        "address",
        metavar="HOST:PORT",
        envvar="MESH_CONTROLLER",
        default=DEFAULT_ADDRESS,
        show_default=True,
        show_envvar=True,
        callback=lambda _, __, value: checked_address(value),
        help="The cell's controller.",
    )(command)


def format_option(command: Command) -> Command:
    """`-o table|json|yaml`, given to the command as `form`."""
    return output_option((Format.TABLE, Format.JSON, Format.YAML), "How the data is written.")(
        command
    )


def policy_option(command: Command) -> Command:
    """`--policy`, given to the command as `policy`: None for the controller's default."""
    return click.option("--policy", metavar="NAME|FILE.py", help=POLICY_HELP)(command)


def node_options(*names: str) -> Callable[[Command], Command]:
    """The options of a node that have these names, given to the command as it takes them."""

    def decorated(command: Command) -> Command:
        # Decorators apply from the last one to the first.
        for option in [option for option in reversed(OPTIONS) if option.name in names]:
            kind = click.IntRange(min=option.least) if option.number else str
            command = click.option(
                option.flag,
                metavar=option.metavar,
                type=click.Choice([*map(str, option.choices)]) if option.choices else kind,
                default=option.default and str(option.default),
                envvar=option.environ,
                multiple=option.repeatable,
                show_default=option.default is not None,
                show_envvar=True,
                help=option.help,
            )(command)
        return command

    return decorated


def http_option(command: Command) -> Command:
    """`--http HOST:PORT`, given to the command as `http`: an address, or HTTP_OFF."""
    return click.option(
        "--http",
        metavar="HOST:PORT",
        default=DEFAULT_HTTP,
        show_default=True,
        help="Where clients of OpenAI's protocol reach it; off: nowhere.",
    )(command)


def http_hosts_option(command: Command) -> Command:
    """`--http-host-allowed NAME`, given to the command as `http_hosts`."""
    return click.option(
        "--http-host-allowed",
        "http_hosts",
        metavar="NAME",
        multiple=True,
        help="A name by which HTTP may be asked without keys, beside this machine's; repeatable.",
    )(command)


def http_cors_option(command: Command) -> Command:
    """`--http-cors ORIGIN`, given to the command as `http_origins`."""
    return click.option(
        "--http-cors",
        "http_origins",
        metavar="ORIGIN",
        multiple=True,
        help="Whose pages may ask by HTTP, like https://chat.example; * for all; repeatable.",
    )(command)


def no_page_option(command: Command) -> Command:
    """`--no-page`, given to the command as `no_page`."""
    return click.option(
        "--no-page", is_flag=True, help="Serve no page to browsers at the HTTP address."
    )(command)


def sources_option(command: Command) -> Command:
    """`--sources ROLE=RULE,…`, given to the command as `sources`: texts that read_source_rules
    takes."""
    return click.option(
        "--sources",
        "sources",
        metavar="ROLE=RULE,…",
        multiple=True,
        callback=lambda _, __, values: read_source_rules(values) and values,
        help="What a role, tenant or admin, may deploy from: all, pkg, file, hf, https, …, or the "
        "beginning of a source, like http://HOST, which may then be private; repeatable.",
    )(command)


def join_option(command: Command) -> Command:
    """`--join-ms MS`, given to the command as `join_ms`."""
    return click.option(
        "--join-ms",
        metavar="MS",
        type=click.FloatRange(min=0, max=1000),
        default=0.0,
        help="An answer's tokens that come within so long go out together, none after it is due.",
    )(command)


def output_option(forms: Sequence[Format], help_text: str) -> Callable[[Command], Command]:
    """`-o` with these forms, the first of them the default; given to the command as `form`."""
    return click.option(
        "-o",
        "--output",
        "form",
        type=click.Choice([form.value for form in forms]),
        default=forms[0].value,
        show_default=True,
        callback=lambda _, __, value: Format(value),
        help=help_text,
    )


def home_option(command: Command) -> Command:
    """`--home DIR`, given to the command as `home`: an absolute Path that may not exist yet."""
    return click.option(
        "--home",
        metavar="DIR",
        envvar="MESH_HOME",
        show_envvar=True,
        default=lambda: platformdirs.user_data_dir("mesh"),
        show_default="the platform's data directory for mesh",
        callback=lambda _, __, value: Path(value).expanduser().absolute(),
        help="State: registry, model store, logs.",
    )(command)


def file_option(name: str, help_text: str, metavar: str = "FILE") -> Callable[[Command], Command]:
    """A Path that may not exist yet, but is no folder."""
    kind = click.Path(path_type=Path, dir_okay=False)
    return click.option(name, metavar=metavar, type=kind, help=help_text)


def ideal_option(command: Command) -> Command:
    """`--ideal`, of simulations."""
    return click.option(
        "--ideal",
        is_flag=True,
        default=None,
        help="Nothing but the tables counts: callers tell the lengths of answers, engines do not "
        "jitter and map KV caches, loads slow nobody, a fixed number of engines has memory set "
        "aside, resident weights are no use of a node.",
    )(command)


def timeout_option(default_s: float, help_text: str) -> Callable[[Command], Command]:
    """`--timeout SECONDS`, given to the command as `timeout_s`."""
    return click.option(
        "--timeout",
        "timeout_s",
        metavar="SECONDS",
        type=click.FloatRange(min=0, min_open=True),
        default=default_s,
        show_default=True,
        help=help_text,
    )


def checked_address(address: str) -> str:
    """The address as it is. Raises InvalidInput when it cannot be one to connect to."""
    _, port = parse_address(address)
    if port == 0:
        raise InvalidInput(
            f"{address!r} is nothing to connect to",
            hint="write HOST:PORT, such as 127.0.0.1:7070",
        )
    return address


def checked_text(value: str, what: str) -> str:
    """A command line argument. Raises InvalidInput, with the byte, when it is not UTF-8."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        # Python keeps bytes that it could not decode as lone surrogates; fsencode restores them.
        raise invalid_utf8(what, len(os.fsencode(value[: error.start]))) from error
    return value


def decoded(raw: bytes, what: str) -> str:
    """What came from a file or standard input. Raises InvalidInput, with the byte."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid_utf8(what, error.start) from error


def invalid_utf8(what: str, offset: int) -> InvalidInput:
    return InvalidInput(
        f"{what} is not valid UTF-8: byte {offset} begins no character",
        hint="write it as UTF-8; `iconv -t UTF-8` converts other encodings",
    )
