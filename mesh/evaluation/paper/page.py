"""The evaluation as one HTML page. Before: `tables`, `charts`. After: `charts.page`."""

from collections.abc import Iterator

from mesh.evaluation.paper.charts import cell_charts, overview_charts, run_charts
from mesh.evaluation.paper.evaluation import Evaluation
from mesh.evaluation.paper.tables import tables
from mesh.report.charts.page import Section, drawn, of_table, render

TITLE = "The evaluation of LLM-Mesh on virtual nodes"


def page(made: Evaluation) -> str:
    """The whole text of the page."""
    return render(TITLE, _about(made), list(_sections(made)))


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


def _sections(made: Evaluation) -> Iterator[Section]:
    yield Section(title="Overview", wide=drawn(overview_charts(made)))
    yield from map(of_table, tables(made))
    for cell in made.cells:
        yield Section(
            title=cell,
            notes=("A line for each policy; upright lines are SLOs.",),
            charts=drawn(cell_charts(made, cell)),
            folded=tuple(
                (f"{run.policy}: each node over time", drawn(run_charts(run)))
                for run in made.of_cell(cell)
            ),
        )
