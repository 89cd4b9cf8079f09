"""The options of a program of the cell, declared once in a table.

From the controller's table and the node's derive the parsers of `python -m`, the options of the
command line's verbs, and the arguments with which one program starts another.
"""

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import platformdirs

from mesh.domain.errors import InvalidInput
from mesh.domain.values import dataclass

AUTO = "auto"
DEFAULT_ADDRESS = "127.0.0.1:7070"
GRACE_S_LARGEST = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option with its meaning. `environ` names the variable of its default."""

    flag: str
    help: str
    metavar: str | None = None
    kind: type[str] | type[int] | type[float] | type[bool] = str
    """The type of its value; `bool` stands for a flag without one. Programs read a float
    themselves, from its text.
    """
    least: float = 0
    """The least value that a number may have."""
    most: float | None = None
    choices: tuple[str, ...] = ()
    default: str | None = None
    environ: str | None = None
    repeatable: bool = False

    @property
    def name(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")


HOME = Option(
    flag="--home",
    metavar="DIR",
    default=platformdirs.user_data_dir("mesh"),
    environ="MESH_HOME",
    help="State folder; models are kept in its store/.",
)
"""The state folder, which every program has, and many verbs of the command line."""


def as_arguments(options: Iterable[Option], values: Mapping[str, object]) -> list[str]:
    """The command line of a program that has these values, by the options' names. None and `auto`
    are what it does that is told nothing.
    """
    arguments: list[str] = []
    for option in options:
        value = values.get(option.name)
        if option.kind is bool:
            arguments += [option.flag] if value else []
            continue
        for one in value if isinstance(value, tuple) else (value,):
            arguments += [] if one in (None, AUTO) else [option.flag, str(one)]
    return arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidInput(message, hint=f"`{self.prog} --help` shows what is accepted")


def parse(
    options: Iterable[Option],
    arguments: Sequence[str] | None,
    environ: Mapping[str, str],
    *,
    prog: str,
    description: str,
) -> argparse.Namespace:
    """The values by the options' names; `arguments` are those of the process unless given.

    Raises InvalidInput, which names the option; SystemExit(0) after --help.
    """
    parser = _Parser(prog=prog, description=description, allow_abbrev=False)
    for option in options:
        text = option.help.replace("%", "%%")
        if option.kind is bool:
            parser.add_argument(option.flag, action="store_true", help=text)
            continue
        default = environ.get(option.environ) if option.environ else None
        given: dict[str, Any] = {"action": "append", "default": []} if option.repeatable else {}
        parser.add_argument(
            option.flag,
            metavar=option.metavar,
            type=int if option.kind is int else str,
            choices=option.choices or None,
            help=text,
            **{"default": default or option.default, **given},
        )
    return parser.parse_args(arguments)


def read_number(option: str, text: str, units: str, most: float, hint: str) -> float:
    """Raises InvalidInput for what is none from 0 on."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0.0 <= number <= most:
        raise InvalidInput(
            f"{option}: {text!r} is no number of {units} from 0 to {most:g}", hint=hint
        )
    return number


def read_grace_s(text: str, hint: str) -> float:
    """Seconds of --grace-s. Raises InvalidInput for what is none."""
    return read_number("--grace-s", text, "seconds", GRACE_S_LARGEST, hint)
