"""`mesh replay`: send a trace's calls to a running cell, each at its time, and say what came of
them.

It is an open loop: however slow the cell is, the calls come when the trace says. What was sent is
told also when the replay is stopped or the cell goes away. Before: a trace. After: tables, a record
that is a trace again, a page.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Unpack

import click

from mesh.cli import output
from mesh.cli.options import controller_option, file_option, format_option, timeout_option
from mesh.cli.output import Format
from mesh.cli.progress import progress
from mesh.cli.replay_options import ReplayOptions, asked_of, replay_options, trace_asked
from mesh.cli.replay_report import judge, show
from mesh.cli.replay_view import ReplayView
from mesh.cli.stopping import Stopping
from mesh.domain.errors import Unavailable
from mesh.domain.views import DeploymentSnapshot
from mesh.evaluation.load_client import CALL_S_MAX, OPEN_MAX
from mesh.evaluation.replay.cell import (
    CellCounts,
    Counted,
    contexts_of,
    counted,
    counts,
    deployed,
    prompts_of,
)
from mesh.evaluation.replay.numbers import numbers
from mesh.evaluation.replay.page import write_page
from mesh.evaluation.replay.record import Record
from mesh.evaluation.replay.report import ReplayReport
from mesh.evaluation.replay.results import CallResult
from mesh.evaluation.replay.running import Replaying
from mesh.evaluation.replay.simulating import cell_plan, look, simulate
from mesh.sim.cluster import CellPlan
from mesh.wire.client import MeshClient
from mesh_workloads.replay_plan import ReplayPlan, plan_replay
from mesh_workloads.trace import Trace


@click.command()
@click.argument("trace", type=click.Path(path_type=Path, dir_okay=False), required=False)
@replay_options
@file_option("--record", "Write each call down as it ends.", written=True)
@file_option("--report", "Write an HTML page in the end.", written=True)
@click.option("--simulate", "beside", is_flag=True, help="Then simulate the same calls.")
@click.option(
    "--open-max",
    metavar="N",
    type=click.IntRange(min=1),
    default=OPEN_MAX,
    show_default=True,
    help="Calls at once; further ones are not sent, and counted.",
)
@timeout_option(CALL_S_MAX, "Leave a call that takes longer.")
@format_option
@controller_option
@click.pass_context
def replay(
    ctx: click.Context,
    trace: Path | None,
    record: Path | None,
    report: Path | None,
    beside: bool,
    open_max: int,
    timeout_s: float,
    form: Format,
    address: str,
    **given: Unpack[ReplayOptions],
) -> None:
    """Send the calls of TRACE to the cell's deployments, each at its time.

    TRACE is a file of a known format, or a scenario (.toml) with a workload that is generated.
    """
    asked = asked_of(given)
    with MeshClient(address) as client, ExitStack() as opened:
        found = deployed(client)
        read = trace_asked(trace, given, max(len(asked.deployments or found), 1))
        plan = plan_replay(read, asked, contexts_of(found))
        _tell(read, plan)
        called = {call.deployment for call in plan.calls}
        views = {name: found[name] for name in plan.deployments if name in called}
        cell = cell_plan(look(client, views)) if beside else None
        view = ReplayView(plan)
        written = opened.enter_context(Record(record)) if record is not None else None

        def ended(result: CallResult) -> None:
            view.ended(result)
            if written is not None:
                written.write(result)

        prompts = prompts_of(client, views.values(), seed=given["seed"])
        replaying = Replaying(plan, views, prompts, ended)
        before = counts(client)
        stopped = _run(replaying, view, address, timeout_s, open_max)
        made = _report(client, plan, views, replaying, before, stopped, cell)
    show(made, form)
    if report is not None:
        write_page(made, report)
        output.message(f"the report is in {report}")
    if written is not None and written.failure is not None:
        raise written.failure
    if stopped:
        raise KeyboardInterrupt
    judge(made)


def _tell(trace: Trace, plan: ReplayPlan) -> None:
    output.message(
        f"{plan.name}: {len(plan.calls)} calls of {plan.functions} functions within "
        f"{plan.duration_s:.0f} s"
    )
    if trace.out_of_order:
        output.message(f"{trace.out_of_order} rows came after a later one; they are sorted")


def _run(
    replaying: Replaying, view: ReplayView, address: str, timeout_s: float, open_max: int
) -> bool:
    """Whether it was stopped before its end."""
    with Stopping() as stopping, view.shown():

        def watch(at_s: float) -> None:
            if stopping.asked():
                raise KeyboardInterrupt
            view.at(at_s)

        try:
            replaying.run(address, call_s_max=timeout_s, open_max=open_max, watch=watch)
        except KeyboardInterrupt:
            return True
    return False


def _report(
    client: MeshClient,
    plan: ReplayPlan,
    views: dict[str, DeploymentSnapshot],
    replaying: Replaying,
    before: CellCounts,
    stopped: bool,
    cell: CellPlan | None,
) -> ReplayReport:
    results = tuple(replaying.results)
    simulated: tuple[CallResult, ...] = ()
    if cell is not None and not stopped:
        with progress("replay") as show:
            show("simulate", 0.0)
            simulated = simulate(cell, plan)
    return ReplayReport(
        plan=plan,
        results=results,
        numbers=numbers(results, views),
        simulated=numbers(simulated, views) if simulated else (),
        simulated_results=simulated,
        counted=_counted(client, before, results, views),
        stopped=stopped,
    )


def _counted(
    client: MeshClient,
    before: CellCounts,
    results: tuple[CallResult, ...],
    views: dict[str, DeploymentSnapshot],
) -> Counted | None:
    try:
        return counted(before, counts(client), results, sorted(views))
    except Unavailable as error:
        output.message(f"the controller's own counts are not to be had: {error.message}")
        return None
