"""`mesh sim`: run a scenario under a virtual clock, and say what came of its requests.

The cell that it simulates decides with the same cores as a live one. Nothing is started and no
controller is asked; the numbers follow from the scenario and its seed alone.
"""

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import click

from mesh.cli import output
from mesh.cli import sim_tables as tables
from mesh.cli.options import format_option
from mesh.cli.output import Format
from mesh.cli.plain import plain
from mesh.cli.progress import progress
from mesh.report.outcomes import summarize
from mesh.runtime.host import Recorder
from mesh.runtime.journal import open_journal
from mesh.sim.cluster import CellPlan, VirtualCell
from mesh.sim.report import SimulationReport, node_uses
from mesh.sim.scenario import Scenario, arrivals, read_scenario
from mesh.sim.scenario import plan as plan_of

REPORT_EVERY = 16
"""Arrivals between two looks at the bar."""


@click.command()
@click.argument("scenario", type=click.Path(path_type=Path))
@click.option("--policy", metavar="NAME", help="In place of the scenario's.")
@click.option("--seed", type=click.IntRange(min=0), help="In place of the scenario's.")
@click.option(
    "--journal",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write down every decision of the controller.",
)
@format_option
def sim(
    scenario: Path, policy: str | None, seed: int | None, journal: Path | None, form: Format
) -> None:
    """Run a scenario under a virtual clock."""
    read = read_scenario(scenario)
    read = replace(
        read,
        policy=read.policy if policy is None else policy,
        seed=read.seed if seed is None else seed,
    )
    report = _simulate(read, plan_of(read), scenario.stem, journal)
    if form is not Format.TABLE:
        output.structured(plain(report), form)
        return
    output.fields(tables.summary_fields(report))
    output.text("")
    output.table(tables.NODE_COLUMNS, tables.node_rows(report))


def _simulate(
    scenario: Scenario, cell_plan: CellPlan, title: str, journal: Path | None
) -> SimulationReport:
    began_s = time.perf_counter()
    with ExitStack() as opened:
        recorders: tuple[Recorder, ...] = ()
        if journal is not None:
            written = open_journal(journal, cell_plan.start())
            opened.callback(written.close)
            recorders = (written,)
        cell = VirtualCell(cell_plan, recorders=recorders)
        show = opened.enter_context(progress(title))
        arrived = 0

        def told(at_s: float) -> None:
            nonlocal arrived
            arrived += 1
            if arrived % REPORT_EVERY == 1:
                show("requests arrive", at_s / scenario.workload.duration_s)

        outcomes = cell.run(arrivals(scenario), told)
    virtual_s = cell.clock.now_s() - cell.started_s
    return SimulationReport(
        policy=cell_plan.policy,
        seed=scenario.seed,
        requests=summarize(outcomes),
        nodes=node_uses(cell.nodes, virtual_s),
        virtual_s=virtual_s,
        wall_s=time.perf_counter() - began_s,
    )
