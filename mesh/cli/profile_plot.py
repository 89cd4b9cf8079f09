"""Draws profiles with matplotlib: prefill and decode times, logarithmic both ways, to a file.

`mesh profile --plot` imports this module when it is asked for, because matplotlib is an extra that
serving does without. Nothing opens a window.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from mesh.cli.profile_tables import origin
from mesh.domain.model import decodes
from mesh.domain.profile import Grid
from mesh.domain.views import ProfileView

WIDTH_INCHES = 11.0
HEIGHT_INCHES = 4.5
"""The height of each profile's row: its two pictures stand side by side."""
DOTS_PER_INCH = 120

# Its remarks on fonts and caches are no messages of ours.
logging.getLogger("matplotlib").setLevel(logging.ERROR)


def draw(name: str, views: Sequence[ProfileView], path: Path) -> None:
    """Two pictures a profile, one of a model without decodes, one profile under the other; the
    path's suffix names the format.

    Raises OSError.
    """
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES * len(views)), layout="constrained")
    FigureCanvasAgg(figure)
    parts = figure.subfigures(len(views), 1, squeeze=False)
    for part, view in zip(parts[:, 0], views, strict=True):
        part.suptitle(title(name, view), fontsize="medium", parse_math=False)
        both = decodes(view.profile.model_id)
        pictures = part.subplots(1, 1 + both, squeeze=False)[0]
        _lines(pictures[0], view.profile.prefill, "prefill", "prompt tokens", "past tokens")
        if both:
            _lines(pictures[1], view.profile.decode, "decode", "batch", "mean context tokens")
    figure.savefig(path, format=path.suffix[1:].lower(), dpi=DOTS_PER_INCH)


def title(name: str, view: ProfileView) -> str:
    """Model, hardware and where the times come from, in two lines."""
    profile = view.profile
    model = f"{name}, {profile.parameters / 1e6:.1f} M parameters ({profile.model_id})"
    return f"{model}\n{profile.hardware}, {profile.cores} cores, {origin(profile)}"


def _lines(axes: Axes, grid: Grid, what: str, rows: str, columns: str) -> None:
    """A line for each column of the grid."""
    for index, size in enumerate(grid.columns):
        times_ms = [spans_s[index] * 1e3 for spans_s in grid.seconds]
        label = str(size) if len(grid.columns) > 1 else "any"
        axes.plot(grid.rows, times_ms, marker="o", markersize=3, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_title(f"{what}, one iteration")
    axes.set_xlabel(rows)
    axes.set_ylabel("time (ms)")
    axes.grid(visible=True, which="major", alpha=0.4)
    axes.legend(title=columns, fontsize="small", title_fontsize="small")
