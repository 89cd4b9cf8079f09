"""Options that several verbs share, and what their values mean.

Environment variables are read here, as defaults of options, and nowhere else in the command line.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import click
import platformdirs

from mesh.cli.output import Format
from mesh.domain.errors import InvalidInput, MeshError
from mesh.runtime.options import DEFAULT_ADDRESS as DEFAULT_ADDRESS
from mesh.runtime.options import HOME, Option
from mesh.wire.channel import parse_address


def check_plotting(option: str) -> None:
    """Raises MeshError when the extra is not installed; `option` is what asks for it."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise MeshError(
            f"{option} needs matplotlib, which is not installed",
            hint="pip install 'mesh-serve[plot]'",
        ) from error


Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_HTTP = "127.0.0.1:8070"
JOBS_MAX = 256
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


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
        help="The cell's controller; several with commas between, of which one leads.",
    )(command)


def format_option(command: Command) -> Command:
    """`-o table|json|yaml`, given to the command as `form`."""
    return output_option((Format.TABLE, Format.JSON, Format.YAML), "How the data is written.")(
        command
    )


def program_options(options: Iterable[Option]) -> Callable[[Command], Command]:
    """The options of a program, given to the command by their names. `--http` is on by default
    here, and `--home` is `home_option`.
    """

    def decorated(command: Command) -> Command:
        # Decorators apply from the last one to the first.
        for option in reversed(tuple(options)):
            if option is HOME:
                command = home_option(command)
                continue
            default = DEFAULT_HTTP if option.name == "http" else option.default
            command = click.option(
                option.flag,
                metavar=option.metavar,
                type=_kind(option),
                is_flag=option.kind is bool,
                default=False if option.kind is bool else default and str(default),
                envvar=option.environ,
                multiple=option.repeatable,
                show_default=default is not None,
                show_envvar=True,
                help=option.help,
            )(command)
        return command

    return decorated


def _kind(option: Option) -> Any:
    if option.choices:
        return click.Choice([*map(str, option.choices)])
    if option.kind is int:
        return click.IntRange(min=int(option.least))
    if option.kind is float:
        return click.FloatRange(min=option.least, max=option.most)
    return option.kind


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


def file_option(
    name: str,
    help_text: str,
    metavar: str = "FILE",
    *,
    required: bool = False,
    written: bool = False,
) -> Callable[[Command], Command]:
    """A Path that may not exist yet, but is no folder. The folder of one that is `written` must
    exist, because it may be written only after long work.
    """
    return click.option(
        name,
        metavar=metavar,
        type=click.Path(path_type=Path, dir_okay=False, writable=written),
        callback=in_folder if written else None,
        required=required,
        help=help_text,
    )


def page_option(command: Command) -> Command:
    """`--html FILE`, given to the command as `html`."""
    words = "Write tables and charts as one page that needs nothing else."
    return file_option("--html", words, written=True)(command)


def in_folder(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    """The path. Raises click.BadParameter where its folder is missing."""
    if path is not None and not path.parent.is_dir():
        raise click.BadParameter(f"there is no folder {str(path.parent)!r}: make it first")
    return path


def jobs_option(what: str) -> Callable[[Command], Command]:
    """`--jobs N`, given to the command as `jobs`: how many of these are computed at a time."""
    return click.option(
        "--jobs",
        type=click.IntRange(min=1, max=JOBS_MAX),
        default=lambda: min(os.cpu_count() or 1, JOBS_MAX),
        show_default="the machine's cores",
        help=f"{what} at a time.",
    )


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


def span_s(text: str, units: str) -> float | None:
    """The seconds of a text such as 90s, 15m, 24h or 7d, whose unit is one of `units`; `None` where
    it is no such text.
    """
    span = re.fullmatch(rf"(\d{{1,6}})([{units}])", text)
    return None if span is None else int(span[1]) * _UNITS_S[span[2]]


def checked_address(address: str) -> str:
    """The address, or several with commas between, as they are. Raises InvalidInput when one cannot
    be connected to.
    """
    for one in address.split(","):
        _, port = parse_address(one)
        if port == 0:
            raise InvalidInput(
                f"{one!r} is nothing to connect to",
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


class Sampling(TypedDict):
    """Fields of an Invocation, as the options give them."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    ignore_eos: bool
    stop: tuple[str, ...]
    slo_ttft_s: float | None
    slo_tpot_s: float | None
    slo_class: str
    cache_salt: str


def _stops(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(checked_text(value, "a stop string") for value in values)


_SAMPLING = (
    click.option("--max-tokens", type=int, help="Output tokens at most."),
    click.option("--temperature", type=float, help="0 (the default): the likeliest token."),
    click.option("--top-p", type=float, help="Only the likeliest tokens of this summed share."),
    click.option("--top-k", type=int, help="Only this many likeliest tokens; 0: all."),
    click.option("--min-p", type=float, help="Only tokens above this share of the likeliest's."),
    click.option("--seed", type=int, help="The same seed draws the same tokens."),
    click.option("--repetition-penalty", type=float, help="Above 1: what is there comes less."),
    click.option("--presence-penalty", type=float, help="Off what the answer has; -2 to 2."),
    click.option("--frequency-penalty", type=float, help="The same for each time; -2 to 2."),
    click.option("--ignore-eos", is_flag=True, help="Go on after the model would end."),
    click.option("--slo-ttft", "slo_ttft_s", type=float, help="Seconds to its first token."),
    click.option("--slo-tpot", "slo_tpot_s", type=float, help="Seconds for each further one."),
    click.option("--class", "slo_class", default="", help="The SLO class, if not the default."),
    click.option("--cache-salt", default="", help="Share cached prompts with the same one only."),
    click.option(
        "--stop", metavar="TEXT", multiple=True, callback=_stops, help="End before it. Repeatable."
    ),
)


def sampling_options(command: Command) -> Command:
    for option in reversed(_SAMPLING):
        command = option(command)
    return command
