"""The options of `mesh replay` that say which calls are made of which trace, and their file form.

A `--config` file is TOML with an option's name a line (dashes are underscores); what the command
line says comes first. Before: `verbs.replay`. After: `mesh_workloads`.
"""

import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import click

from mesh.cli.options import decoded
from mesh.domain.errors import InvalidInput, NotFound, StorageError
from mesh.sim.scenario import read_scenario, trace_of
from mesh_workloads.asked import Asked
from mesh_workloads.formats import FORMATS, PLAIN_CSV
from mesh_workloads.generating import GENERATED_S, bursty, generate
from mesh_workloads.mapping import HASH, POPULARITY, read_table
from mesh_workloads.published import AZURE_CONVERSATION, PUBLISHED
from mesh_workloads.reading import read, recognise
from mesh_workloads.replay_plan import Replay
from mesh_workloads.sampling import KEPT, Sample, load_for
from mesh_workloads.scaling import SCALE_MAX, Scale
from mesh_workloads.trace import DURATION_S_MAX, TOKENS_MAX, Trace

Command = TypeVar("Command", bound=Callable[..., Any])

FORCED, MODEL = "forced", "model"
_SCALE = click.FloatRange(min=0, min_open=True, max=SCALE_MAX)


class ReplayOptions(TypedDict):
    """As the options give them."""

    format_name: str | None
    generate_per_s: float | None
    start_s: float
    duration_s: float | None
    time_scale: float
    rate_scale: float
    tokens_scale: float
    how: str | None
    deployments: str
    answers: str
    output_tokens_max: int | None
    functions: str | None
    lengths: str
    clip: bool
    seed: int


def _configured(ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
    if path is None:
        return
    try:
        given = tomllib.loads(decoded(path.read_bytes(), str(path)))
    except FileNotFoundError as error:
        raise NotFound(
            f"there is no file {path}", hint="give the path of a TOML file with options"
        ) from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"{path}: not TOML: {error}") from error
    names = {
        option.lstrip("-").replace("-", "_"): param.name
        for param in ctx.command.params
        if isinstance(param, click.Option) and param.name not in ("config", "form", "help")
        for option in param.opts
        if option.startswith("--")
    }
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise InvalidInput(
            f"{path}: there is no option {', '.join(unknown)}",
            hint=f"there are {', '.join(sorted(names))}",
        )
    ctx.default_map = {str(names[key]): value for key, value in given.items()}


_OPTIONS = (
    click.option(
        "--config",
        metavar="FILE",
        type=click.Path(path_type=Path, dir_okay=False),
        is_eager=True,
        expose_value=False,
        callback=_configured,
        help="Options from a TOML file, such as examples/load/mooncake.toml.",
    ),
    click.option(
        "--format",
        "format_name",
        metavar="NAME",
        help="Of the trace, where it is not to be told by its header: "
        + ", ".join(known.name for known in FORMATS)
        + ".",
    ),
    click.option(
        "--generate",
        "generate_per_s",
        metavar="RATE",
        type=float,
        help="Without a trace: so many calls a second in bursts, a function for each deployment, "
        f"for --duration ({GENERATED_S:g} s).",
    ),
    click.option(
        "--start",
        "start_s",
        metavar="S",
        type=click.FloatRange(min=0, max=DURATION_S_MAX),
        default=0.0,
        help="Into the trace.",
    ),
    click.option(
        "--duration",
        "duration_s",
        metavar="S",
        type=click.FloatRange(min=0, min_open=True, max=DURATION_S_MAX),
        help="Of the trace; all of it.",
    ),
    click.option(
        "--time-scale",
        metavar="X",
        type=_SCALE,
        default=1.0,
        help="0.5 plays it twice as quickly.",
    ),
    click.option(
        "--rate-scale",
        metavar="X",
        type=_SCALE,
        default=1.0,
        help="0.1 keeps a tenth of the calls, 3 sends three times as many.",
    ),
    click.option(
        "--tokens-scale",
        metavar="X",
        type=_SCALE,
        default=1.0,
        help="0.5 halves prompts and answers.",
    ),
    click.option(
        "--map",
        "how",
        metavar="HOW",
        help=f"How functions become deployments: {HASH} (the default), {POPULARITY} (that of "
        "--generate), or a CSV file with the columns function,deployment.",
    ),
    click.option(
        "--deployments",
        metavar="NAMES",
        default="",
        help="Only these, with commas between; the busiest function is the first.",
    ),
    click.option(
        "--answers",
        type=click.Choice([FORCED, MODEL]),
        default=FORCED,
        show_default=True,
        help="As long as the trace says, or as the model ends them before that.",
    ),
    click.option(
        "--output-tokens-max",
        metavar="N",
        type=click.IntRange(min=1, max=TOKENS_MAX),
        help="Longer answers are cut to it; with --answers model it takes the trace's place.",
    ),
    click.option(
        "--functions",
        type=click.Choice([str(models) for models in KEPT]),
        help="Only so many functions, busy and rare ones, sampled from the trace.",
    ),
    click.option(
        "--lengths",
        metavar="NAME",
        type=click.Choice(list(PUBLISHED)),
        default=AZURE_CONVERSATION.name,
        show_default=True,
        help="Of requests whose trace counts invocations only: " + ", ".join(PUBLISHED) + ".",
    ),
    click.option(
        "--clip/--no-clip",
        default=True,
        help="Cut requests to the context of their deployment, or let the cell refuse them.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(min=0),
        default=0,
        help="Of what is left out or drawn, and of prompts.",
    ),
)


def replay_options(command: Command) -> Command:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def asked_of(given: ReplayOptions) -> Replay:
    """Raises InvalidInput, NotFound or StorageError."""
    how = given["how"] or (HASH if given["generate_per_s"] is None else POPULARITY)
    return Replay(
        scale=Scale(
            time=given["time_scale"],
            rate=given["rate_scale"],
            tokens=given["tokens_scale"],
            seed=given["seed"],
        ),
        mapping=how if how in (HASH, POPULARITY) else read_table(Path(how)),
        deployments=tuple(name.strip() for name in given["deployments"].split(",") if name.strip()),
        forced=given["answers"] == FORCED,
        output_tokens_max=given["output_tokens_max"],
        clip=given["clip"],
    )


def trace_asked(path: Path | None, given: ReplayOptions, deployments: int) -> Trace:
    """The trace that is asked for: a file, a scenario's workload, or one that is generated for so
    many deployments.

    Raises InvalidInput, NotFound or StorageError.
    """
    rate_per_s, duration_s = given["generate_per_s"], given["duration_s"]
    if (path is None) == (rate_per_s is None):
        raise InvalidInput(
            "there is no trace" if path is None else "there are a trace and --generate",
            hint="mesh replay TRACE, or mesh replay --generate RATE",
        )
    made = rate_per_s is not None or (path is not None and path.suffix == ".toml")
    if made and (given["start_s"] or given["format_name"] or given["functions"]):
        raise InvalidInput(
            "what is generated has no --start, --format or --functions",
            hint="--duration says for how long; --seed draws another one",
        )
    asked = Asked(
        start_s=given["start_s"],
        duration_s=duration_s,
        lengths=PUBLISHED[given["lengths"]],
        seed=given["seed"],
    )
    if rate_per_s is not None:
        work = bursty(deployments, rate_per_s, duration_s or GENERATED_S)
        return generate(work, given["seed"])
    assert path is not None
    if path.suffix != ".toml":
        return _of_file(path, asked, given)
    scenario = read_scenario(path)
    if duration_s is not None:
        workload = replace(scenario.workload, duration_s=duration_s)
        scenario = replace(scenario, workload=workload)
    trace = trace_of(scenario)
    if trace is None:
        raise InvalidInput(f"{path}: its workload is drawn as it goes, and is no trace")
    return trace


def _of_file(path: Path, asked: Asked, given: ReplayOptions) -> Trace:
    """The functions of a plain file are taken to be numbered as a sample's."""
    name, functions = given["format_name"], given["functions"]
    if functions is None:
        return read(path, asked, format_name=name)
    if recognise(path, name) is not PLAIN_CSV:
        asked = replace(asked, sample=Sample())
    return load_for(read(path, asked, format_name=name), int(functions))
