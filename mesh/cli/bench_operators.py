"""`mesh bench operators`: operator-level autoscaling, by the paper's formulas and executed.

docs/operators.md says what the figures mean.
"""

from pathlib import Path

import click

from mesh.cli import output
from mesh.cli.options import file_option, format_option, jobs_option, page_option
from mesh.cli.output import Format, text_columns
from mesh.cli.progress import progress
from mesh.domain.errors import MeshError
from mesh.evaluation.operator_page import HEADERS, page, rows
from mesh.evaluation.operators import FULL, QUICK, PointJob, oracle, points, record, throughput_gain
from mesh.evaluation.runs import Failed, run_all
from mesh.sim.operators.tables import DEVICES

GAINS = ("40", "20")
"""The points over rates at which the devices are held fixed."""


@click.command()
@file_option("--trace", "The lengths and the rate of a trace, in place of the paper's figures.")
@click.option("--figures", metavar="NAMES", help="Those whose names begin so; default: all.")
@click.option(
    "--device",
    type=click.Choice(DEVICES),
    default=DEVICES[0],
    show_default=True,
    help="The device that plans are made for.",
)
@click.option("--quick", is_flag=True, help="Fewer points, and shorter executions.")
@jobs_option("Points")
@format_option
@page_option
def operators(
    trace: Path | None,
    figures: str | None,
    device: str,
    quick: bool,
    jobs: int,
    form: Format,
    html: Path | None,
) -> None:
    """Operator-level autoscaling, in the paper's accounting and with device time conserved.

    Devices, replicas, memory and energy of four planners, and the share of the requests that kept
    their SLO when the plan was executed in simulation. No engine of mesh runs single operators.
    """
    every = points(trace, quick=quick, device=device)
    if figures is not None:
        begin = tuple(name.strip() for name in figures.split(","))
        every = [point for point in every if point.figure.startswith(begin)]
        if not every:
            raise click.UsageError(f"there is no figure {figures!r}")
    requests = QUICK if quick else FULL
    with progress("operators") as show:
        ends = run_all([PointJob(point=point, requests=requests) for point in every], jobs, show)
        tested = None if trace is not None else oracle(device=device)
        gains = [
            throughput_gain(point)
            for point in every
            if point.figure.startswith("qps") and point.name in GAINS
        ]
    found = {end.job.point: end.run for end in ends if not isinstance(end, Failed)}
    failed = [end for end in ends if isinstance(end, Failed)]
    if html is not None:
        html.write_text(page(found), encoding="utf-8")
        output.message(f"written: {html}")
    if form is not Format.TABLE:
        output.structured(record(found, tested, gains), form)
    else:
        output.table(text_columns(HEADERS, 4), rows(found))
    if failed:
        said = "; ".join(f"{end.job.name}: {end.why}" for end in failed)
        raise MeshError(f"{len(failed)} points failed: {said}", hint="run them alone")
