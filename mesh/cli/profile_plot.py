"""Draws profiles with matplotlib: prefill and decode times, logarithmic both ways, to a file.

`mesh profile --plot` imports this module when it is asked for, because matplotlib is an extra that
serving does without. Nothing opens a window.
"""

import logging
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from mesh.cli.profile_tables import origin
from mesh.domain.model import decodes
from mesh.domain.profile import CoresTimes, Grid, Profile
from mesh.domain.values import dataclass
from mesh.domain.views import ProfileView

WIDTH_INCHES = 11.0
HEIGHT_INCHES = 4.5
"""The height of each profile's row: its two pictures stand side by side."""
DOTS_PER_INCH = 120

Line = tuple[str, Sequence[int], Sequence[float]]
"""Its name, sizes, and the seconds at these."""


@dataclass(frozen=True, slots=True)
class _Picture:
    title: str
    sizes: str
    legend: str
    lines: Sequence[Line]


# Its remarks on fonts and caches are no messages of ours.
logging.getLogger("matplotlib").setLevel(logging.ERROR)


def draw(name: str, views: Sequence[ProfileView], path: Path, *, operators: bool = False) -> None:
    """Two pictures a profile, one of a model without decodes, and where operators are wanted theirs
    below; one profile under the other. The path's suffix names the format.

    Raises OSError.
    """
    pictures = [_pictures(view.profile, operators=operators) for view in views]
    rows = [-(-len(each) // 2) for each in pictures]
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES * sum(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    parts = figure.subfigures(len(views), 1, squeeze=False, height_ratios=rows)
    for part, view, each, high in zip(parts[:, 0], views, pictures, rows, strict=True):
        part.suptitle(title(name, view), fontsize="medium", parse_math=False)
        axes = part.subplots(high, min(len(each), 2), squeeze=False).flat
        for picture, on in zip_longest(each, axes):
            on.set_visible(picture is not None)
            if picture is not None:
                _lines(on, picture)
    figure.savefig(path, format=path.suffix[1:].lower(), dpi=DOTS_PER_INCH)


def title(name: str, view: ProfileView) -> str:
    """Model, hardware and where the times come from, in two lines."""
    profile = view.profile
    model = f"{name}, {profile.parameters / 1e6:.1f} M parameters ({profile.model_id})"
    return f"{model}\n{profile.hardware}, {profile.cores} cores, {origin(profile)}"


def _pictures(profile: Profile, *, operators: bool) -> list[_Picture]:
    """Those of whole iterations; then by operator prompts behind nothing and decodes at the largest
    context, and the largest of both by cores.
    """
    found = [_of_grid(profile.prefill, "prefill", "prompt tokens", "past tokens")]
    if both := decodes(profile.model_id):
        found.append(_of_grid(profile.decode, "decode", "batch", "mean context tokens"))
    if not operators or not profile.operators:
        return found
    every = (*profile.by_cores, CoresTimes(cores=profile.cores, operators=profile.operators))
    prompts = {of.cores: {each.name: each.prefill for each in of.operators} for of in every}
    found += _by_operator(prompts, profile.cores, "prefill", "prompt tokens", 0)
    if both:
        tokens = {of.cores: {each.name: each.decode for each in of.operators} for of in every}
        found += _by_operator(tokens, profile.cores, "decode", "batch", -1)
    return found


def _of_grid(grid: Grid, what: str, rows: str, columns: str) -> _Picture:
    """A line for each column of the grid."""
    sizes = grid.columns if len(grid.columns) > 1 else ("any",)
    lines = [
        (str(size), grid.rows, [taken_s[index] for taken_s in grid.seconds])
        for index, size in enumerate(sizes)
    ]
    return _Picture(f"{what}, one iteration", rows, columns, lines)


def _by_operator(
    by_cores: Mapping[int, Mapping[str, Grid]], cores: int, what: str, rows: str, column: int
) -> list[_Picture]:
    """A line for each operator over the rows of one column of its grid; where they are known with
    several numbers of cores, over these, too.
    """
    counted = by_cores[cores]
    some = next(iter(counted.values()))
    at = f"{what} by operator, {'past' if what == 'prefill' else 'context'} {some.columns[column]}"
    lines: list[Line] = [
        (name, grid.rows, [taken_s[column] for taken_s in grid.seconds])
        for name, grid in counted.items()
    ]
    found = [_Picture(at, rows, "operator", lines)]
    if len(by_cores) > 1:
        lines = []
        for name in counted:
            known = {of: grids[name] for of, grids in by_cores.items() if name in grids}
            taken_s = [grid.seconds[-1][column] for grid in known.values()]
            lines.append((name, list(known), taken_s))
        found.append(_Picture(f"{at}, {rows} {some.rows[-1]}", "cores", "operator", lines))
    return found


def _lines(axes: Axes, picture: _Picture) -> None:
    for label, sizes, taken_s in picture.lines:
        axes.plot(sizes, [each * 1e3 for each in taken_s], marker="o", markersize=3, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_title(picture.title)
    axes.set_xlabel(picture.sizes)
    axes.set_ylabel("time (ms)")
    axes.grid(visible=True, which="major", alpha=0.4)
    axes.legend(title=picture.legend, fontsize="small", title_fontsize="small")
