"""The charts of the evaluation, over all cells, for a cell and for a run; and its HTML page.

Before: `evaluation`. After: `svg`, `png`, and `charts.page`, which lays them out.
"""

from collections.abc import Callable, Iterator, Sequence

from mesh.domain.reasons import DeviceKind
from mesh.evaluation.cell_numbers import RankGroup
from mesh.evaluation.paper.evaluation import EvaluatedRun, Evaluation, ablated, is_ablation
from mesh.evaluation.paper.tables import tables
from mesh.evaluation.series import NodeSeries, binned, nodes_in_use
from mesh.report.charts.chart import BarChart, Bars, Chart, Line, LineChart, Points
from mesh.report.charts.page import Section, drawn, file_name, of_table, render

BINS = 120
"""Points of a line over time."""
TTFT_S = 2.0
TPOT_S = 0.25
"""SLOs of the evaluation; the TTFT of a prompt above 1,024 tokens is longer."""


def overview_charts(made: Evaluation) -> tuple[BarChart, ...]:
    """SLO met, and busy nodes, of every cell and policy; then the same of ablations, if any."""
    whole = [policy for policy in made.policies if not is_ablation(policy)]
    charts = _bar_charts(made, made.cells, whole, "", "")
    pairs = ablated(made.runs)
    if not pairs:
        return charts
    cells = tuple(dict.fromkeys(part.cell for part, _ in pairs))
    names = dict.fromkeys(run.policy for pair in pairs for run in reversed(pair))
    return charts + _bar_charts(made, cells, list(names), "ablations-", "Ablations: ")


def cell_charts(made: Evaluation, cell: str) -> tuple[Chart, ...]:
    """A line for each policy."""
    runs, name = made.of_cell(cell), file_name(cell)
    return (
        LineChart(
            name=f"{name}-ttft",
            title="TTFT, share of all requests",
            x_label="seconds",
            y_label="%",
            lines=_lines(runs, lambda run: _percents(run.numbers.ttft.curve(run.numbers.requests))),
            log_x=True,
            y_most=100.0,
            x_limit=TTFT_S,
        ),
        LineChart(
            name=f"{name}-tpot",
            title="Mean TPOT, share of all requests",
            x_label="seconds",
            y_label="%",
            lines=_lines(runs, lambda run: _percents(run.numbers.tpot.curve(run.numbers.requests))),
            y_most=100.0,
            x_limit=TPOT_S,
        ),
        _in_use(runs, name, DeviceKind.GPU),
        _in_use(runs, name, DeviceKind.CPU),
        _ranks(runs, f"{name}-ranks", "SLO met by a function's rank in requests", lambda g: g.met),
        _ranks(
            runs,
            f"{name}-unserved-ranks",
            "Refused or cut short, by a function's rank in requests",
            lambda g: g.not_finished,
        ),
    )


def run_charts(run: EvaluatedRun) -> tuple[Chart, ...]:
    """A line for each node."""
    name = f"{file_name(run.cell)}-{file_name(run.policy)}"
    return (
        LineChart(
            name=f"{name}-decode",
            title="Decode throughput of each node",
            x_label="minutes",
            y_label="tokens/s",
            lines=_nodes(run, lambda node: node.decoded_tokens),
        ),
        LineChart(
            name=f"{name}-memory",
            title="Weights and KV caches on each node",
            x_label="minutes",
            y_label="GB",
            lines=_nodes(
                run,
                lambda node: [
                    (weights + kv) / 1e9
                    for weights, kv in zip(node.weights_bytes, node.kv_held_bytes, strict=True)
                ],
            ),
        ),
        LineChart(
            name=f"{name}-loads",
            title="Loads of instances on all nodes",
            x_label="minutes",
            y_label="loads/s",
            lines=_nodes(run, lambda node: node.loads),
        ),
    )


def over_time(values: Sequence[float]) -> Points:
    """(minutes, mean) of values by second."""
    return tuple((begin / 60, value) for begin, value in binned(values, BINS))


def _bar_charts(
    made: Evaluation, cells: tuple[str, ...], policies: Sequence[str], name: str, title: str
) -> tuple[BarChart, ...]:
    def bars(
        value: Callable[[EvaluatedRun], float], mark: Callable[[EvaluatedRun], float | None]
    ) -> tuple[Bars, ...]:
        found = []
        for policy in policies:
            runs = [made.run(cell, policy) for cell in cells]
            values = tuple(None if run is None else value(run) for run in runs)
            marks = tuple(None if run is None else mark(run) for run in runs)
            found.append(Bars(name=policy, values=values, marks=marks))
        return tuple(found)

    return (
        BarChart(
            name=f"{name}slo-met",
            title=f"{title}SLO met",
            y_label="% of requests",
            groups=cells,
            bars=bars(
                lambda run: 100 * run.numbers.met / max(run.numbers.requests, 1),
                _their_met_percent,
            ),
            y_most=100.0,
        ),
        BarChart(
            name=f"{name}gpu-nodes",
            title=f"{title}GPU nodes busy, mean over time",
            y_label="nodes",
            groups=cells,
            bars=bars(lambda run: run.numbers.gpu_nodes_busy, lambda run: run.reference.gpu_nodes),
        ),
        BarChart(
            name=f"{name}cpu-nodes",
            title=f"{title}CPU nodes busy, mean over time",
            y_label="nodes",
            groups=cells,
            bars=bars(lambda run: run.numbers.cpu_nodes_busy, lambda run: None),
        ),
    )


def _their_met_percent(run: EvaluatedRun) -> float | None:
    theirs = run.reference.met
    return None if theirs is None else 100 * theirs / max(run.numbers.requests, 1)


def _in_use(runs: Sequence[EvaluatedRun], name: str, device: DeviceKind) -> LineChart:
    return LineChart(
        name=f"{name}-{device}-nodes",
        title=f"{device.upper()} nodes in use",
        x_label="minutes",
        y_label="nodes",
        lines=_lines(runs, lambda run: over_time(nodes_in_use(run.nodes, device))),
        y_most=float(max(1, *(sum(node.device is device for node in run.nodes) for run in runs))),
    )


def _ranks(
    runs: Sequence[EvaluatedRun], name: str, title: str, count: Callable[[RankGroup], int]
) -> LineChart:
    """Shares of the requests of each group of ranks, at the group's middle."""

    def points(run: EvaluatedRun) -> Points:
        groups = run.numbers.by_rank
        return tuple(
            ((g.first_rank + g.last_rank) / 2, 100 * count(g) / g.requests) for g in groups
        )

    return LineChart(
        name=name,
        title=title,
        x_label="rank",
        y_label="%",
        lines=_lines(runs, points),
        y_most=100.0,
    )


def _lines(
    runs: Sequence[EvaluatedRun], points: Callable[[EvaluatedRun], Points]
) -> tuple[Line, ...]:
    return tuple(Line(name=run.policy, points=points(run)) for run in runs)


def _nodes(run: EvaluatedRun, values: Callable[[NodeSeries], Sequence[float]]) -> tuple[Line, ...]:
    return tuple(Line(name=node.node_id, points=over_time(values(node))) for node in run.nodes)


def _percents(curve: Sequence[tuple[float, float]]) -> Points:
    return tuple((x, 100 * share) for x, share in curve)


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
