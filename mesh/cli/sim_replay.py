"""`mesh sim --replay`: what a journal holds, and the first decision that comes out otherwise."""

from pathlib import Path

from mesh.cli import output
from mesh.cli import sim_tables as tables
from mesh.cli.output import Column, Format, word
from mesh.cli.progress import progress
from mesh.evaluation.replaying import Difference, OtherDecision, ReplayReport, replay_journal

REPORT_EVERY = 256
"""Events between two looks at the bar."""
DIFFERENCES: tuple[Column[Difference], ...] = (
    word("WHERE", lambda d: d.where),
    word("RECORDED", lambda d: d.recorded),
    word("DECIDED", lambda d: d.decided),
)


def show_replay(journal: Path, form: Format) -> int:
    """The exit code: 1 when a decision differs. Raises InvalidInput for what is no journal."""
    with progress(journal.name) as show:
        lines = _lines(journal)

        def told(events: int) -> None:
            if events % REPORT_EVERY == 1:
                show("decisions are made again", events / lines)

        report = replay_journal(journal, told)
    if form is Format.TABLE:
        output.fields(replay_fields(report))
        if report.other is not None:
            _show_other(report.other)
    else:
        output.structured(report, form)
    return 0 if report.other is None else 1


def _lines(path: Path) -> int:
    """At least 1; also of a file that cannot be read, which `read_journal` will say."""
    try:
        with path.open("rb") as file:
            return max(1, sum(1 for _ in file))
    except OSError:
        return 1


def replay_fields(report: ReplayReport) -> list[tuple[str, str]]:
    pairs = [
        ("journal of a", f"{report.core}, mesh {report.version}"),
        ("events", str(report.events)),
        ("time", f"{report.span_s:.1f} s"),
    ]
    if report.requests is not None:
        pairs += tables.request_fields(report.requests)
        pairs.append(("without an end", str(report.open_requests)))
    if report.other is None:
        pairs.append(("decided", "as recorded"))
    else:
        pairs.append(("decided", f"otherwise, first in line {report.other.line}"))
    return pairs


def _show_other(other: OtherDecision) -> None:
    output.text("")
    output.text(f"line {other.line}, at {other.now_s:.6f} s: {other.event}")
    output.table(DIFFERENCES, other.differences)
