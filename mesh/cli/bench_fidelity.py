"""`mesh bench fidelity`: how true the simulator is, measured against a live cell of this machine.

It starts a controller and a node with the real engine, offers them bursts through the public API,
and lets the simulator run the same arrivals on a virtual node that the node's profile and the first
part of the run have calibrated.
"""

from contextlib import AbstractContextManager
from pathlib import Path

import click

from mesh.cli import fidelity_tables as tables
from mesh.cli import output
from mesh.cli.cell import LocalCell, running_cell
from mesh.cli.cell_plan import CellPlan, plan_nodes
from mesh.cli.options import format_option, home_option
from mesh.cli.output import Format
from mesh.cli.progress import progress
from mesh.cli.stopping import Stopping
from mesh.cli.verbs.demo import SOURCE
from mesh.domain.units import parse_bytes
from mesh.evaluation.fidelity.live import LiveSide, Wanted
from mesh.evaluation.fidelity.report import SIMULATIONS, report_on

POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command()
@click.option("--seconds", type=POSITIVE, default=300.0, show_default=True, help="Compared.")
@click.option(
    "--calibrate",
    type=POSITIVE,
    default=60.0,
    show_default=True,
    help="Seconds before them that calibrate the simulator.",
)
@click.option(
    "--load",
    type=POSITIVE,
    default=1.5,
    show_default=True,
    help="Offered, over what the node could compute.",
)
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True)
@click.option(
    "--simulations",
    type=click.IntRange(min=1, max=100),
    default=SIMULATIONS,
    show_default=True,
    help="Of each kind, with other draws of how long single iterations take.",
)
@click.option("--source", default=SOURCE, help="Another model than the demo's.")
@click.option("--remeasure", is_flag=True, help="Measure the profile even if a fresh one is there.")
@click.option("--memory", metavar="SIZE", help="Limit of the node's process, such as 1GiB.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads that the node computes with.")
@format_option
@home_option
def fidelity(
    seconds: float,
    calibrate: float,
    load: float,
    seed: int,
    simulations: int,
    source: str,
    remeasure: bool,
    memory: str | None,
    threads: int | None,
    form: Format,
    home: Path,
) -> None:
    """Compare a live cell of this machine with a simulation of it."""
    wanted = Wanted(
        source=source,
        calibrate_s=calibrate,
        compare_s=seconds,
        load=load,
        seed=seed,
        remeasure=remeasure,
    )
    memory_bytes = None if memory is None else parse_bytes(memory)
    with Stopping() as stopping, progress("fidelity") as report:

        def start(home: Path, journals: Path) -> AbstractContextManager[LocalCell]:
            plan = CellPlan(
                listen="127.0.0.1:0",
                home=home,
                nodes=plan_nodes(["cpu"]),
                threads=threads,
                memory_bytes=memory_bytes,
                node_journals=journals,
            )
            return running_cell(plan, stopping)

        def told(phase: str, share: float) -> None:
            if stopping.asked():
                raise KeyboardInterrupt
            report(phase, share)

        live = LiveSide(wanted, home, start, told).run()
        report("simulate", 1.0)
        found = report_on(live, simulations=simulations)
    if form is not Format.TABLE:
        output.structured(tables.summary(found), form)
        return
    output.table(tables.COLUMNS, tables.rows(found))
    output.text("")
    output.fields(tables.fields(found))
