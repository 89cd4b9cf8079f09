"""`mesh sim`: run a scenario under a virtual clock, and say what came of its requests; or decide
again what a journal holds.

The cell that it simulates decides with the same cores as a live one. Nothing is started and no
controller is asked; the numbers follow from the scenario and its seed alone.
"""

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import click

from mesh.cli import output
from mesh.cli import sim_tables as tables
from mesh.cli.options import file_option, format_option, ideal_option
from mesh.cli.output import Format
from mesh.cli.progress import Report, progress
from mesh.cli.report_file import read_report, write_report
from mesh.cli.sim_tables import show_replay
from mesh.domain.errors import InvalidInput, MeshError
from mesh.evaluation.simulation_report import (
    LoadCounts,
    SimulationReport,
    VirtualReport,
    beside_none,
    node_uses,
)
from mesh.evaluation.summary import summarize
from mesh.runtime.host import Recorder
from mesh.runtime.journal import ControllerStart, open_journal
from mesh.sim.checking import FaultyRun
from mesh.sim.refusals import RefusalChecks
from mesh.sim.scenario import (
    Scenario,
    arrivals,
    faults,
    fitted,
    read_scenario,
    trace_of,
    without_prefetch,
)
from mesh.sim.scenario import plan as plan_of
from mesh.sim.workload import TraceFile, WorkloadKind
from mesh_workloads.sampling import KEPT
from mesh_workloads.trace import DURATION_S_MAX


def command_of(ctx: click.Context, seed: int) -> str:
    """The command that this one is, with the seed that it runs."""
    words = ["mesh", "sim", str(ctx.params["scenario"])]
    for name in ("policy", "trace", "functions", "duration", "output_tokens_max"):
        value = ctx.params[name]
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    words += [f"--{name}" for name in ("ideal", "check") if ctx.params[name]]
    return shlex.join([*words, "--seed", str(seed)])


@contextmanager
def replayable(command: str) -> Iterator[None]:
    """What is no error of the caller's is a fault of mesh, and comes again with the command.

    Raises MeshError with the command as its hint.
    """
    try:
        yield
    except MeshError:
        raise
    except Exception as error:
        raise MeshError(
            f"{type(error).__name__}: {error}", hint=f"this is a fault of mesh; again: {command}"
        ) from error


class Journals:
    """FILE for the first controller of a cell, FILE-2 and so on for those that follow it."""

    def __init__(self, path: Path | None, opened: ExitStack) -> None:
        self._path = path
        self._opened = opened
        self._begun = 0
        """How many have begun."""

    def started(self, start: ControllerStart) -> Sequence[Recorder]:
        """Raises StorageError when the file cannot be written."""
        if self._path is None:
            return ()
        self._begun += 1
        name = self._path.stem + (f"-{self._begun}" if self._begun > 1 else "")
        journal = open_journal(self._path.with_name(name + self._path.suffix), start)
        self._opened.callback(journal.close)
        return (journal,)


REPORT_EVERY = 16
"""Arrivals between two looks at the bar."""


@click.command()
@click.argument("scenario", type=click.Path(path_type=Path), required=False)
@click.option("--policy", metavar="NAME|FILE.py", help="In place of the scenario's.")
@click.option("--seed", type=click.IntRange(min=0), help="In place of the scenario's.")
@file_option(
    "--trace",
    "Arrivals of this file, in place of the scenario's. Its only group of deployments becomes "
    "as large as the trace has functions, also with --functions.",
)
@click.option(
    "--functions",
    type=click.Choice([str(models) for models in KEPT]),
    help="The load of so many functions, sampled from the trace.",
)
@click.option(
    "--duration",
    metavar="S",
    type=click.FloatRange(min=0, min_open=True, max=DURATION_S_MAX),
    help="Seconds of arrivals, in place of the scenario's.",
)
@click.option(
    "--output-tokens-max",
    metavar="N",
    type=click.IntRange(min=1),
    help="That callers take, in place of the scenario's; by default what the context leaves.",
)
@click.option(
    "--slo-mix",
    metavar="TPOT:SHARE,...",
    help="SLO classes of all deployments, and their shares: 0.1:0.3,0.25:0.4,best:0.3.",
)
@ideal_option
@file_option("--html", "Write a report as one page that needs nothing else.", written=True)
@file_option("--beside", "Show another run beside it in that page: a report as JSON.")
@file_option("--journal", "Write down every decision of the controller.", written=True)
@click.option(
    "--check",
    is_flag=True,
    default=None,
    help="Hold the cell to all that must hold of any, after every decision and at the end.",
)
@click.option(
    "--check-refusals",
    is_flag=True,
    default=None,
    help="Look at each node at each refusal: whether its link was free, and the reason is true.",
)
@file_option(
    "--replay",
    "Decide again what this journal of a controller or a node holds, without a scenario; 1 "
    "when something comes out otherwise.",
    "JOURNAL",
)
@format_option
@click.pass_context
def sim(
    ctx: click.Context,
    scenario: Path | None,
    policy: str | None,
    seed: int | None,
    trace: Path | None,
    functions: str | None,
    duration: float | None,
    output_tokens_max: int | None,
    slo_mix: str | None,
    ideal: bool | None,
    html: Path | None,
    beside: Path | None,
    journal: Path | None,
    check: bool | None,
    check_refusals: bool | None,
    replay: Path | None,
    form: Format,
) -> None:
    """Run a scenario under a virtual clock, or decide again what a journal holds."""
    if replay is not None:
        if any(v is not None for k, v in ctx.params.items() if k not in ("replay", "form")):
            raise InvalidInput(
                "--replay takes neither a scenario nor options of one",
                hint="mesh sim --replay JOURNAL",
            )
        ctx.exit(show_replay(replay, form))
    if scenario is None:
        raise InvalidInput(
            "a scenario is missing",
            hint="mesh sim SCENARIO, as workloads/llm_mesh_cell.toml is one; or --replay JOURNAL",
        )
    read = read_scenario(scenario)
    models = None if functions is None else int(functions)
    read = replace(
        read,
        policy=read.policy if policy is None else policy,
        seed=read.seed if seed is None else seed,
        workload=_workload(read.workload, trace, models, duration),
        slo_mix=read.slo_mix if slo_mix is None else slo_mix,
        ideal=read.ideal or bool(ideal),
        output_tokens_max=output_tokens_max or read.output_tokens_max,
    )
    fit = trace is not None or models is not None
    other = read_report(beside)
    with progress(scenario.stem) as show, replayable(command_of(ctx, read.seed)):
        looks = RefusalChecks(seed=read.seed) if check_refusals else None
        report = _simulate(
            read,
            journal,
            show,
            fit=fit,
            check=bool(check),
            looks=looks,
            named=scenario.stem if html else None,
        )
        if read.prefetch_compared_from_s is not None:
            plain = without_prefetch(read)
            other_run = _simulate(plain, None, show, fit=fit, check=False, looks=None, named=None)
            report = beside_none(report, other_run)
    if html is not None and report.report is not None:
        write_report(html, report.report, other)
    if form is not Format.TABLE:
        output.structured(report, form)
        return
    output.fields(tables.summary_fields(report))
    output.next_table(tables.NODES, report.nodes)


def _workload(
    work: WorkloadKind, trace: Path | None, functions: int | None, duration_s: float | None
) -> WorkloadKind:
    """The scenario's, but for what was asked. Raises InvalidInput when that cannot be."""
    if trace is not None:
        work = TraceFile(file=trace)
    if functions is not None:
        if not isinstance(work, TraceFile):
            raise InvalidInput(
                "--functions samples a trace, and the scenario has none",
                hint="give the trace: --trace FILE",
            )
        work = replace(work, functions=functions)
    return work if duration_s is None else replace(work, duration_s=duration_s)


def _simulate(
    scenario: Scenario,
    journal: Path | None,
    show: Report,
    *,
    fit: bool,
    check: bool,
    looks: RefusalChecks | None,
    named: str | None,
) -> SimulationReport:
    """`fit`: the deployments follow the trace. `check`: hold the cell to its invariants. `looks`:
    at its refusals. `named`: the name of its report, where there is to be one.
    """
    began_s = time.perf_counter()
    if isinstance(scenario.workload, TraceFile):
        show("the trace is read", 0.0)
    trace = trace_of(scenario)
    if trace is not None and trace.left_out:
        output.message(f"{trace.left_out} requests without a prompt or an answer are left out")
    if trace is not None and trace.out_of_order:
        output.message(f"{trace.out_of_order} rows came after a later one; they are sorted")
    if fit and trace is not None:
        scenario = fitted(scenario, trace)
    coming, cell_plan = arrivals(scenario, trace), plan_of(scenario)
    duration_s = (trace or scenario.workload).duration_s
    assert duration_s is not None, "only the trace of a file may have no duration before it is read"
    with ExitStack() as opened:
        journals = Journals(journal, opened)
        told = None if named is None else VirtualReport(cell_plan, duration_s)
        run = FaultyRun(
            cell_plan,
            faults(scenario, cell_plan),
            check=check,
            started=lambda start: [
                *journals.started(start),
                *([looks] if looks else ()),
                *(told.recorders if told else ()),
            ],
        )
        if told is not None:
            told.attach(run.cell)
        if looks is not None:
            looks.attach(run.cell)
        loads = LoadCounts(run.cell, scenario.prefetch_compared_from_s or 0.0)
        outcomes = run.run(coming, _Shown(show, duration_s).arrived)
    counts, (cold_felt, loaded_bytes) = run.counts(), loads.since()
    return SimulationReport(
        policy=cell_plan.policy,
        seed=scenario.seed,
        requests=summarize(outcomes, [of.spec for of in cell_plan.deployments]),
        nodes=node_uses(run.cell.nodes, run.virtual_s),
        virtual_s=run.virtual_s,
        wall_s=time.perf_counter() - began_s,
        faults=counts.faults,
        checks=counts.checks,
        refusals=None if looks is None else looks.counts(outcomes),
        prefetches=run.cell.core.cell.prefetches.view,
        energy=run.cell.core.cell.energy,
        cold_felt=cold_felt,
        loaded_bytes=loaded_bytes,
        report=None if told is None else told.report(named or "", outcomes),
    )


class _Shown:
    """The bar: how much of the workload's time is over."""

    def __init__(self, show: Report, duration_s: float) -> None:
        self._show = show
        self._duration_s = duration_s
        self._arrivals = 0

    def arrived(self, at_s: float) -> None:
        if self._arrivals % REPORT_EVERY == 0:
            self._show("requests arrive", at_s / self._duration_s)
        self._arrivals += 1
