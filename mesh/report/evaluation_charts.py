"""Which charts the evaluation is drawn in: over all cells, for a cell, for a run; pure.

Before: `evaluation`. After: `svg`, `png`, and the page, which lays them out.
"""

from collections.abc import Callable, Sequence

from mesh.domain.reasons import DeviceKind
from mesh.report.charts import BarChart, Bars, Chart, Line, LineChart, Points
from mesh.report.evaluation import EvaluatedRun, Evaluation
from mesh.report.series import NodeSeries, binned, nodes_in_use

BINS = 120
"""Points of a line over time."""
TTFT_S = 2.0
TPOT_S = 0.25
"""SLOs of the evaluation; the TTFT of a prompt above 1,024 tokens is longer."""


def overview_charts(made: Evaluation) -> tuple[Chart, ...]:
    """SLO met, and nodes in use, of every cell and policy."""
    return (
        _bars(
            made,
            name="slo-met",
            title="SLO met",
            y_label="% of requests",
            value=lambda run: 100 * run.numbers.met / max(run.numbers.requests, 1),
            mark=_met_percent,
            y_most=100.0,
        ),
        _bars(
            made,
            name="gpu-nodes",
            title="GPU nodes in use, mean over time",
            y_label="nodes",
            value=lambda run: run.numbers.gpu_nodes,
            mark=lambda run: run.reference.gpu_nodes,
        ),
        _bars(
            made,
            name="cpu-nodes",
            title="CPU nodes in use, mean over time",
            y_label="nodes",
            value=lambda run: run.numbers.cpu_nodes,
            mark=lambda run: None,
        ),
    )


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
        LineChart(
            name=f"{name}-ranks",
            title="SLO met by a function's rank in requests",
            x_label="rank",
            y_label="%",
            lines=_lines(
                runs,
                lambda run: tuple(
                    ((g.first_rank + g.last_rank) / 2, 100 * g.met / g.requests)
                    for g in run.numbers.by_rank
                ),
            ),
            y_most=100.0,
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


def file_name(words: str) -> str:
    """7B/128 is 7b-128, sllm+cpu is sllm-cpu."""
    return words.lower().replace("/", "-").replace("+", "-")


def over_time(values: Sequence[float]) -> Points:
    """(minutes, mean) of values by second."""
    return tuple((begin / 60, value) for begin, value in binned(values, BINS))


def _bars(
    made: Evaluation,
    *,
    name: str,
    title: str,
    y_label: str,
    value: Callable[[EvaluatedRun], float],
    mark: Callable[[EvaluatedRun], float | None],
    y_most: float | None = None,
) -> BarChart:
    bars = []
    for policy in made.policies:
        runs = [made.run(cell, policy) for cell in made.cells]
        bars.append(
            Bars(
                name=policy,
                values=tuple(None if run is None else value(run) for run in runs),
                marks=tuple(None if run is None else mark(run) for run in runs),
            )
        )
    return BarChart(
        name=name,
        title=title,
        y_label=y_label,
        groups=made.cells,
        bars=tuple(bars),
        y_most=y_most,
    )


def _met_percent(run: EvaluatedRun) -> float | None:
    theirs = run.reference.met
    return None if theirs is None else 100 * theirs / max(run.numbers.requests, 1)


def _in_use(runs: Sequence[EvaluatedRun], name: str, device: DeviceKind) -> LineChart:
    return LineChart(
        name=f"{name}-{device}-nodes",
        title=f"{device.upper()} nodes in use",
        x_label="minutes",
        y_label="nodes",
        lines=_lines(runs, lambda run: over_time(nodes_in_use(run.nodes, device))),
        y_most=float(max(sum(node.device is device for node in run.nodes) for run in runs)),
    )


def _lines(
    runs: Sequence[EvaluatedRun], points: Callable[[EvaluatedRun], Points]
) -> tuple[Line, ...]:
    return tuple(Line(name=run.policy, points=points(run)) for run in runs)


def _nodes(run: EvaluatedRun, values: Callable[[NodeSeries], Sequence[float]]) -> tuple[Line, ...]:
    return tuple(Line(name=node.node_id, points=over_time(values(node))) for node in run.nodes)


def _percents(curve: Sequence[tuple[float, float]]) -> Points:
    return tuple((x, 100 * share) for x, share in curve)
