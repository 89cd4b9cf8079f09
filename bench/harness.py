"""What every benchmark shares: its options, rounds in turn, what it shows, and how it ends.

A benchmark is a module with a function `run` that measures and returns a `Report`. The parameters
of `run` are its options, with their types and defaults. `python -m bench NAME` reads them from the
command line, prints the report and ends with an exit code.
"""

import argparse
import inspect
import json
import math
import operator
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from mesh.cli import output
from mesh.cli.main import INTERRUPTED
from mesh.domain.errors import MeshError

T = TypeVar("T")
Run = Callable[..., "Report"]

HELP = {
    "beside": "another checkout, which is measured as well",
    "callers": "callers, each of which asks again and again",
    "deployments": "deployments",
    "join_ms": "how long the controller joins tokens, as --join-ms of mesh controller",
    "journal": "keep the controller's journal in this file",
    "models": "the models that are measured",
    "peers": "measure mesh alone",
    "quick": "the smallest run, to see that it works",
    "requests": "requests that are to finish",
    "rounds": "rounds, each with all contenders",
    "seconds": "for how long calls are sent",
    "seed": "the seed of all random choices",
    "scenario": "the scenario, a TOML file",
    "survey": "survey the model first",
    "threads": "cores that an engine computes on",
    "trace": "a trace file, in place of what is generated",
    "traces": "trace files of any known format",
    "workers": "clients, each of which asks again and again",
}
"""What options that several benchmarks share mean."""
SEEDS = ("first", "seed")
"""Numbers that may be 0 although their default is not."""
_COMPARISONS: Mapping[str, Callable[[Any, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    ">": operator.gt,
}
IF_ANY = " if any"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table for people. Columns after the first `words` hold numbers."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    words: int = 1

    def markdown(self) -> str:
        cells = [self.headings, ["---"] * len(self.headings), *self.rows]
        return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """The seconds that it takes, and what it returns."""
    start_s = time.perf_counter()
    result = call()
    return time.perf_counter() - start_s, result


def spread_table(taken_s: Mapping[str, Sequence[float]], first: str, title: str) -> Table:
    """The median, the least and the most seconds of each step."""
    return Table(
        headings=(first, "median s", "least s", "most s"),
        rows=[(n, *(f"{of(s):.3f}" for of in (median, min, max))) for n, s in taken_s.items()],
        title=title,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a benchmark has found."""

    figures: Mapping[str, object]
    """The JSON object of the last line."""
    shown: Sequence[Table | str] = ()
    """Tables and lines for people, in their order."""
    targets: Mapping[str, str | bool | Sequence[str]] = field(default_factory=dict)
    """By figure what it has to be, or by any name whether it is reached: `<= 2`, `>= 1 and <= 2`,
    `== calls`, which is another figure. A figure that is a list or a mapping has to reach it
    everywhere, or each its own where there are several. One that is None has missed it, unless the
    target ends in ` if any`.
    """
    surveyed: bool = False
    """Whether `mesh profile` has measured a model of a cell of the benchmark."""

    def missed(self) -> list[str]:
        """The targets that were missed, in words."""
        found = []
        for name, target in self.targets.items():
            if isinstance(target, bool):
                found += [] if target else [name]
            elif not self._reached(self.figures[name], target):
                said = target if isinstance(target, str) else ", ".join(target)
                found.append(f"{name} is {self.figures[name]}, not {said}")
        return found

    def _reached(self, value: Any, target: str | Sequence[str]) -> bool:
        values = list(value.values()) if isinstance(value, Mapping) else value
        values = values if isinstance(values, list) else [values]
        each = [target] * len(values) if isinstance(target, str) else target
        return all(self._meets(*pair, n) for n, pair in enumerate(zip(values, each, strict=False)))

    def _meets(self, value: Any, target: str, number: int) -> bool:
        """`number` is its place in a list."""
        wanted = target.removesuffix(IF_ANY)
        if value is None:
            return wanted != target
        for clause in wanted.split(" and "):
            sign, limit = clause.split()
            least: Any = self.figures.get(limit, limit)
            least = least[number] if isinstance(least, list) else least
            if not _COMPARISONS[sign](value, float(least)):
                return False
        return True

    def end(self, *, markdown: bool = False) -> int:
        """Print the report; the exit code is 1 when a target was missed."""
        show_status("")
        for part in self.shown:
            if isinstance(part, str):
                output.text(part)
            elif markdown:
                output.text(f"\n{part.title}\n\n{part.markdown()}\n")
            else:
                output.text(part.title, end="\n" if part.title else "")
                output.table(output.text_columns(part.headings, part.words), part.rows)
        missed = self.missed()
        if self.targets:
            output.message(f"missed: {'; '.join(missed)}" if missed else "all targets reached")
        print(json.dumps({**self.figures, "surveyed": self.surveyed}))
        return 1 if missed else 0


def rounded(figure: float | None, digits: int = 4) -> float | None:
    """A figure for the last line; None stays."""
    return None if figure is None else round(figure, digits)


def in_turn(
    contenders: Mapping[str, T], rounds: int, *, warm_ups: int = 0
) -> Iterator[tuple[int, str, T]]:
    """The number of a round, a contender's name and the contender: all contenders in each round.

    Every other round has them in the reverse order (A B B A), so that what changes on the machine
    meets all of them alike. Rounds that warm up come first and have numbers below 1.
    """
    for number in range(1 - warm_ups, rounds + 1):
        for name in list(contenders)[:: 1 if number % 2 else -1]:
            show_status(f"round {number} of {rounds}: {name}")
            yield number, name, contenders[name]


def show_status(line: str) -> None:
    """Show how far the benchmark is: on a terminal only, in the place of the line before it. An
    empty line wipes that one.
    """
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


@contextmanager
def errors_told() -> Iterator[None]:
    """A MeshError ends the program with its message and hint, Ctrl-C as it ends `mesh`. The status
    line is wiped either way.
    """
    try:
        yield
    except MeshError as error:
        sys.exit(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        show_status("")


def performed(
    name: str,
    run: Run,
    about: str,
    arguments: Sequence[str],
    options_of: Callable[..., object] | None = None,
) -> int:
    """Run a benchmark with these arguments, print its report and return its exit code. Its options
    are its parameters, unless it has those of something else.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m bench {name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--markdown", action="store_true", help="tables as the documents have them")
    several = _add_options(parser, options_of or run)
    options = vars(parser.parse_args(arguments))
    options = {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}
    markdown: bool = options.pop("markdown")
    values = options.pop(several) if several else ()
    with errors_told():
        report = run(*values, **options)
    return report.end(markdown=markdown)


def _add_options(parser: argparse.ArgumentParser, run: Callable[..., object]) -> str:
    """An option for every parameter. Returns the name of the parameter that takes all arguments
    without a name, if there is one.
    """
    hints, several = get_type_hints(run, include_extras=True), ""
    for name, parameter in inspect.signature(run).parameters.items():
        kind, said = hints[name], HELP.get(name, "")
        if get_origin(kind) is Annotated:
            kind, said = get_args(kind)
        flag, default = f"--{name.replace('_', '-')}", parameter.default
        kind = (
            next((k for k in get_args(kind) if k is not NoneType), kind)
            if (NoneType in get_args(kind))
            else kind
        )
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            parser.add_argument(name, type=_reader(name, kind, None), nargs="+", help=said)
            several = name
        elif kind is bool and default:
            no = f"--no-{flag.removeprefix('--')}"
            parser.add_argument(no, dest=name, action="store_false", help=said)
        elif kind is bool:
            parser.add_argument(flag, action="store_true", help=said)
        else:
            nargs = "+" if get_origin(kind) is tuple else None
            kind = get_args(kind)[0] if nargs else kind
            parser.add_argument(
                flag,
                type=_reader(name, kind, default),
                default=default,
                nargs=nargs,
                choices=get_args(kind) if get_origin(kind) is Literal else None,
                help=said if default in (None, ()) else f"{said} (%(default)s)",
            )
    return several


def _reader(name: str, kind: Any, default: object) -> Callable[[str], Any]:
    """What reads an option. Numbers are finite and above 0, or may be 0 where their default is."""
    if get_origin(kind) is Literal:
        return str
    if kind not in (int, float):
        reader: Callable[[str], Any] = kind
        return reader
    least = "0 or more" if default == 0 or name in SEEDS else "above 0"

    def number(text: str) -> Any:
        value = kind(text)
        if not math.isfinite(value) or value < 0 or (value == 0 and least == "above 0"):
            raise argparse.ArgumentTypeError(f"{text} is not {least}")
        return value

    number.__name__ = kind.__name__  # argparse names it when the text is no number
    return number


def all_of(folder: Path) -> dict[str, Path]:
    """The module of every benchmark in this folder, or its scenario, by the benchmark's name."""
    found = {path.stem: path for path in sorted((folder / "scenarios").glob("*.toml"))}
    for path in sorted(folder.glob("*.py")):
        text = path.read_text()
        if "\ndef run(" in text and "-> Report:" in text:
            name = "import" if path.stem == "importing" else path.stem.replace("_", "-")
            found[name] = path
    return found
