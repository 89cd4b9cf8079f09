"""`mesh bench paper`: the evaluation of LLM-Mesh (§8) on virtual nodes, cell by cell.

Its load is a trace file, or without one the generator's. Every run is a virtual
cell with the live cell's cores; docs/evaluation.md says what the figures mean.
"""

from collections.abc import Sequence
from pathlib import Path

import click

from mesh.cli import output
from mesh.cli.options import (
    check_plotting,
    file_option,
    format_option,
    ideal_option,
    jobs_option,
    page_option,
)
from mesh.cli.output import Format, text_columns
from mesh.cli.progress import progress
from mesh.domain.errors import InvalidInput, MeshError
from mesh.evaluation.paper.cells import (
    ALL_CELLS,
    DURATION_S,
    LENGTHS,
    PaperCase,
    PaperJob,
    from_trace,
    generated,
    load,
    paper_case,
)
from mesh.evaluation.paper.charts import cell_charts, overview_charts, page, run_charts
from mesh.evaluation.paper.evaluation import EvaluatedRun, Evaluation, Reference, reference
from mesh.evaluation.paper.record import record
from mesh.evaluation.paper.tables import tables
from mesh.evaluation.runs import Done, Failed, run_all
from mesh.policy.registry import known_policies
from mesh.report.charts.chart import Chart
from mesh.runtime.policies import policy_of
from mesh.sim.cell_costs import cell_costs
from mesh.sim.slo_mix import read_mix
from mesh_workloads.published import AZURE_CONVERSATION
from mesh_workloads.trace import Trace

POLICIES = ("sllm", "sllm+cpu", "sllm+cpu+share", "llm-mesh")
"""The policies that the paper compares."""
ABLATIONS = tuple(f"llm-mesh-no-{part}" for part in ("cpu", "sharing", "defrag", "preemption"))
ABLATION_CELLS = (paper_case("7B/64"),)
"""Where the paper takes parts away."""


@click.command()
@file_option("--trace", "A trace in any format that mesh reads; default: a generated one.")
@click.option(
    "--lengths",
    metavar="NAME",
    type=click.Choice(list(LENGTHS)),
    help="Of prompts and answers of the generated load: "
    + ", ".join(LENGTHS)
    + f"; default: {AZURE_CONVERSATION.name}.",
)
@click.option(
    "--policy",
    "policies",
    metavar="NAME",
    multiple=True,
    help="May be repeated; default: all of the paper's.",
)
@click.option("--cells", metavar="NAMES", help="Such as 7B/128,3B/32; default: all nine.")
@click.option(
    "--ablations",
    is_flag=True,
    help=f"Take parts away from llm-mesh, too: in {ABLATION_CELLS[0].name}, or in --cells.",
)
@ideal_option
@click.option(
    "--check-refusals",
    is_flag=True,
    help="Look at each node at each refusal: whether its link was free, and the reason is true.",
)
@click.option(
    "--slo-mix",
    metavar="TPOT:SHARE,...",
    default="",
    help="SLO classes, and their shares of the requests: 0.1:0.3,0.25:0.4,1.0:0.3.",
)
@click.option(
    "--duration",
    "duration_s",
    metavar="SECONDS",
    type=click.FloatRange(min=1, max=DURATION_S),
    default=DURATION_S,
    show_default=True,
    help="Only the beginning of the load.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Of the generated load, and of what a trace lacks.",
)
@jobs_option("Runs")
@format_option
@page_option
@click.option(
    "--plots",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False, writable=True),
    help="Write the charts as PNG files; needs matplotlib.",
)
def paper(
    trace: Path | None,
    lengths: str | None,
    policies: tuple[str, ...],
    cells: str | None,
    ablations: bool,
    ideal: bool | None,
    check_refusals: bool,
    slo_mix: str,
    duration_s: float,
    seed: int,
    jobs: int,
    form: Format,
    html: Path | None,
    plots: Path | None,
) -> None:
    """The evaluation of the LLM-Mesh paper, on virtual nodes.

    Nine cells: models of 3B, 7B and 13B, each with 32, 64 and 128 functions, on four CPU and four
    GPU nodes for 30 minutes.
    """
    # Before minutes are spent on runs:
    if plots is not None:
        check_plotting("--plots")
    if slo_mix:
        read_mix(slo_mix)
    pairs = _pairs(policies, cells, ablations)
    source = _source(trace, lengths, seed)
    work = {cell: load(source, cell.functions, duration_s) for cell, _ in pairs}
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
    costs = cell_costs(ideal=bool(ideal))
    with progress("paper") as show:
        planned = [
            PaperJob(
                cell=cell,
                policy=name,
                work=work[cell],
                costs=costs,
                check_refusals=check_refusals,
                slo_mix=slo_mix,
            )
            for cell, name in pairs
        ]
        ends = run_all(planned, jobs, show)
    done = [end for end in ends if isinstance(end, Done)]
    made = Evaluation(
        workload=_words(source, trace, seed, ideal=bool(ideal)) + _mix_words(slo_mix),
        duration_s=duration_s,
        runs=tuple(_evaluated(one, measured=trace is not None and not slo_mix) for one in done),
    )
    if done:
        _tell(made, form, html, plots)
    _check(ends)


def _tell(made: Evaluation, form: Format, html: Path | None, plots: Path | None) -> None:
    _show(made, form)
    if html is not None:
        html.write_text(page(made), encoding="utf-8")
        output.message(f"written: {html}")
    if plots is not None:
        _draw(made, plots)


def _source(trace: Path | None, lengths: str | None, seed: int) -> Trace:
    """Raises InvalidInput where a trace is to have other lengths."""
    if trace is None:
        return generated(seed, lengths or AZURE_CONVERSATION.name)
    if lengths is not None:
        raise InvalidInput(
            f"the load is trace {trace.name}; --lengths are of a generated one",
            hint="leave one of the two options out",
        )
    return from_trace(trace, seed)


def _pairs(
    policies: tuple[str, ...], cells: str | None, ablations: bool
) -> list[tuple[PaperCase, str]]:
    """Which cell under which policy. Raises InvalidInput for what there is not."""
    chosen = ALL_CELLS if cells is None else tuple(paper_case(c.strip()) for c in cells.split(","))
    names = policies or tuple(name for name in POLICIES if name in known_policies())
    for name in names:
        policy_of(name)
    pairs = [(cell, name) for cell in chosen for name in names]
    if ablations:
        known = [name for name in ABLATIONS if name in known_policies()]
        if not known:
            raise InvalidInput("this mesh has no policies with a part taken away")
        where = ABLATION_CELLS if cells is None else chosen
        pairs += [(cell, name) for cell in where for name in known]
    order = {cell: n for n, cell in enumerate(chosen)}
    return sorted(dict.fromkeys(pairs), key=lambda pair: order[pair[0]])


def _words(source: Trace, trace: Path | None, seed: int, *, ideal: bool) -> str:
    load = f"trace {trace.name}" if trace else f"generated ({source.name}, seed {seed})"
    costs = "ideal costs" if ideal else "costs as measured"
    return f"{load}, {costs}"


def _mix_words(slo_mix: str) -> str:
    return f", SLO classes {slo_mix}" if slo_mix else ""


def _evaluated(done: Done[PaperJob], *, measured: bool) -> EvaluatedRun:
    """Others' figures hold for their trace, as a whole, alone."""
    made, cell = done.run, done.job.cell
    theirs = reference(cell.name, cell.functions, done.job.policy, made.numbers.requests)
    return EvaluatedRun(
        cell=cell.name,
        policy=done.job.policy,
        numbers=made.numbers,
        reference=theirs if measured else Reference(),
        nodes=made.nodes,
        seconds=done.seconds,
        refusals=made.refusals,
    )


def _check(ends: Sequence[Done[PaperJob] | Failed[PaperJob]]) -> None:
    """Raises MeshError when a run failed: partial success is failure."""
    failed = [end for end in ends if isinstance(end, Failed)]
    for end in failed[1:]:
        output.message(f"{end.job.name} failed: {end.why}")
    if failed:
        cell, policy = failed[0].job.cell.name, failed[0].job.policy
        raise MeshError(
            f"{len(failed)} of {len(ends)} runs failed; {cell} {policy}: {failed[0].why}",
            hint=f"`mesh --traceback bench paper --cells {cell} --policy {policy}` shows where",
        )


def _show(made: Evaluation, form: Format) -> None:
    if form is not Format.TABLE:
        output.structured(record(made), form)
        return
    output.message(f"load: {made.workload}, {made.duration_s:g} s")
    for number, table in enumerate(tables(made)):
        output.text(("\n" if number else "") + table.title)
        output.table(text_columns(table.headers, table.words), table.rows)


def _draw(made: Evaluation, folder: Path) -> None:
    from mesh.report.charts import png

    charts: list[tuple[str, Chart]] = [("", chart) for chart in overview_charts(made)]
    for cell in made.cells:
        charts += [(cell, chart) for chart in cell_charts(made, cell)]
        for run in made.of_cell(cell):
            charts += [(f"{cell} {run.policy}", chart) for chart in run_charts(run)]
    drawn = png.draw_all(charts, folder)
    output.message(f"drawn: {len(drawn)} files in {folder}")
