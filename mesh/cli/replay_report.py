"""What the command line says of a replay: tables, figures for programs, and whether it failed.

Before: `verbs.replay`, or another sender of a plan's calls. After: the terminal.
"""

from mesh.cli import output
from mesh.cli.output import Format
from mesh.domain.errors import MeshError
from mesh.evaluation.replay.cell import COUNTS_DIFFERENCE_MAX
from mesh.evaluation.replay.report import ReplayReport, remarks
from mesh.evaluation.replay.tables import tables
from mesh.report.plain import Plain, plain


def show(made: ReplayReport, form: Format) -> None:
    if form is not Format.TABLE:
        output.structured(figures_of(made), form)
        return
    for number, table in enumerate(tables(made)):
        if number:
            output.text(f"\n{table.title}. {table.note}")
        output.table(output.text_columns(table.headers, table.words), table.rows)
    for line in _notes(made):
        output.message(line)


def _notes(made: ReplayReport) -> list[str]:
    said = remarks(made)
    # Calls that were left when it was stopped end as the cell pleases.
    counted = None if made.stopped else made.counted
    if counted is not None and counted.difference > COUNTS_DIFFERENCE_MAX:
        said.append(
            f"The controller's counts differ by {100 * counted.difference:.1f} % of the "
            "calls: somebody else calls the deployments, or calls were lost on the way."
        )
    return said


def figures_of(made: ReplayReport) -> Plain:
    """For programs."""
    whole, counted = made.whole, made.counted
    return {
        "trace": made.plan.name,
        "planned": len(made.plan.calls),
        "duration_s": made.plan.duration_s,
        "stopped": made.stopped,
        "attainment": whole.attainment,
        "attainment_in_the_mean": whole.attainment_in_the_mean,
        "met_of_admitted": whole.met_of_admitted,
        "met_of_admitted_in_the_mean": whole.met_of_admitted_in_the_mean,
        "errors": made.broke / max(whole.calls, 1),
        "ttft_s_p95": whole.ttft_s_p95,
        "late_ms_p99": whole.late_ms_p99,
        "counts_difference": None if counted is None or counted.restarted else counted.difference,
        "numbers": plain(made.numbers),
        "simulated": plain(made.simulated),
        "counted": plain(counted),
        "workers": plain(made.workers),
        "remarks": plain(_notes(made)),
    }


def judge(made: ReplayReport) -> None:
    """Raises MeshError when calls have failed: partial success is failure."""
    if not made.broke:
        return
    why = ", ".join(f"{status} {count}" for status, count in made.whole.failed)
    raise MeshError(
        f"{made.broke} of {made.whole.calls} calls failed: {why}",
        hint="`mesh logs` says what the cell did; not_sent: raise --open-max; deadline_exceeded: "
        "raise --timeout; unavailable: the cell was away",
    )
