"""The evaluation as one HTML page: no script, no link to anywhere, light or dark as the reader is.

Layout and colours are in `page.html`. Before: `tables`, `drawing`, `svg`.
After: a file.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from mesh.evaluation.charts.chart import Chart
from mesh.evaluation.charts.svg import SERIES_MAX, names, svg
from mesh.evaluation.paper.drawing import cell_charts, file_name, overview_charts, run_charts
from mesh.evaluation.paper.evaluation import Evaluation
from mesh.evaluation.paper.tables import Table, tables

TITLE = "The evaluation of LLM-Mesh on virtual nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    title: str
    names: list[str]
    svg: Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    title: str
    notes: tuple[str, ...] = ()
    table: Table | None = None
    wide: tuple[_Drawn, ...] = ()
    charts: tuple[_Drawn, ...] = ()
    folded: tuple[tuple[str, tuple[_Drawn, ...]], ...] = ()

    @property
    def anchor(self) -> str:
        return file_name(self.title).replace(" ", "-")


def page(made: Evaluation) -> str:
    """The whole text of the page."""
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    source = resources.files("mesh.evaluation.paper").joinpath("page.html").read_text("utf-8")
    return environment.from_string(source).render(
        title=TITLE, about=_about(made), sections=list(_sections(made)), series=SERIES_MAX
    )


def _about(made: Evaluation) -> list[str]:
    load = f"Load: {made.workload}, {made.duration_s / 60:g} minutes."
    nodes = "Nodes: four Xeon 6462C (32 cores) and four A100-80GB, by their measured tables."
    if any(run.reference.met is not None for run in made.runs):
        return [
            load,
            nodes,
            "Marks across bars: the authors' scheduler under a virtual clock, measured by us.",
        ]
    return [load, nodes, "Nobody else's figures hold for this load."]


def _sections(made: Evaluation) -> Iterator[_Section]:
    yield _Section(title="Overview", wide=_drawn(overview_charts(made)))
    for table in tables(made):
        yield _Section(title=table.title, notes=(table.note,), table=table)
    for cell in made.cells:
        yield _Section(
            title=cell,
            notes=("A line for each policy; upright lines are SLOs.",),
            charts=_drawn(cell_charts(made, cell)),
            folded=tuple((run.policy, _drawn(run_charts(run))) for run in made.of_cell(cell)),
        )


def _drawn(charts: Iterable[Chart]) -> tuple[_Drawn, ...]:
    return tuple(
        _Drawn(title=chart.title, names=names(chart), svg=Markup(svg(chart))) for chart in charts
    )
