"""What `mesh sim` shows: the numbers of a run, one a line, its nodes; and of a journal that is
replayed,
what it holds and the first decision that comes out otherwise.
"""

from pathlib import Path

from mesh.cli import output
from mesh.cli.output import Column, Format, number, word
from mesh.cli.progress import progress
from mesh.cli.tables import energy_words
from mesh.domain.reasons import DeviceKind, RefusalReason
from mesh.evaluation.replaying import Difference, OtherDecision, ReplayReport, replay_journal
from mesh.evaluation.simulation_report import NodeUse, SimulationReport
from mesh.evaluation.summary import Summary

_REFUSALS = frozenset(reason.value for reason in RefusalReason)
NODES: tuple[Column[NodeUse], ...] = (
    word("NODE", lambda n: n.node_id),
    word("DEVICE", lambda n: n.device),
    number("IN USE %", lambda n: f"{100 * n.used_share:.1f}"),
    number("BUSY %", lambda n: f"{100 * n.busy_share:.1f}"),
    number("COMPUTING %", lambda n: f"{100 * n.computing_share:.1f}"),
)


def summary_fields(report: SimulationReport) -> list[tuple[str, str]]:
    pairs = [("policy", report.policy), ("seed", str(report.seed))]
    pairs += request_fields(report.requests)
    for device in DeviceKind:
        total = sum(node.device is device for node in report.nodes)
        if total:
            pairs.append((f"{device} nodes in use", f"{report.nodes_used(device):.2f} of {total}"))
    pairs += [(f"faults, {kind}", str(n)) for kind, n in report.faults]
    pairs += [(f"checked, {what}", str(n)) for what, n in report.checks]
    if (looked := report.refusals) is not None:
        agree = _share(looked.reasons_agreeing, looked.reasons_drawn)
        pairs.append(("refused or late beside a free link", str(looked.refused_beside_free_link)))
        pairs.append(("refusals with the reason that nodes give", agree))
    said = report.prefetches
    pairs.append(("loads", f"{said.loads} needed, {said.felt} felt; {said.begun} ahead"))
    if report.cold_felt_ratio is not None:
        pairs.append(("felt over without prefetches", f"{report.cold_felt_ratio:.3f}"))
    if report.bytes_ratio is not None:
        pairs.append(("bytes over without prefetches", f"{report.bytes_ratio:.3f}"))
    pairs += [
        ("output", f"{report.tokens_per_s:.1f} tokens/s"),
        ("energy", energy_words(report.energy)),
        ("virtual time", f"{report.virtual_s:.1f} s"),
        ("wall time", f"{report.wall_s:.1f} s"),
    ]
    return pairs


def request_fields(made: Summary) -> list[tuple[str, str]]:
    pairs = [
        ("requests", str(made.requests)),
        ("SLO met, every token", _share(made.met, made.requests)),
        ("SLO met, by the clock", _share(made.met_without_grace, made.requests)),
        ("SLO met, TTFT and mean TPOT", _share(made.met_in_the_mean, made.requests)),
        ("first token in time", _share(made.ttft_met, made.requests)),
        ("tokens in time", f"{100 * (made.tokens_in_time_share or 0.0):.1f} %"),
        ("TTFT p50", _seconds(made.ttft_s_p50)),
        ("TTFT p95", _seconds(made.ttft_s_p95)),
        ("TPOT mean", _seconds(made.tpot_s_mean)),
    ]
    pairs += [(_ended(end), _share(n, made.requests)) for end, n in made.refused]
    pairs += [(f"class {name}", _class_words(of)) for name, of in made.by_class.items()]
    return pairs


def _class_words(made: Summary) -> str:
    met = f"every token {_share(made.met, made.requests)}"
    mean = f"TTFT and mean TPOT {_share(made.met_in_the_mean, made.requests)}"
    refused = sum(n for end, n in made.refused if end in _REFUSALS)
    return f"{made.requests} requests; met: {met}, {mean}; refused {refused}"


def _ended(end: str) -> str:
    """Clients that went, and streams that broke, were not refused."""
    return f"refused, {end}" if end in _REFUSALS else end


def _share(count: int, of: int) -> str:
    return f"{count} ({100 * count / of:.1f} %)" if of else "0"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3f} s"


REPORT_EVERY = 256
"""Events between two looks at the bar."""
DIFFERENCE_COLUMNS: tuple[Column[Difference], ...] = (
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
        pairs += request_fields(report.requests)
        pairs.append(("without an end", str(report.open_requests)))
    if report.other is None:
        pairs.append(("decided", "as recorded"))
    else:
        pairs.append(("decided", f"otherwise, first in line {report.other.line}"))
    return pairs


def _show_other(other: OtherDecision) -> None:
    output.text("")
    output.text(f"line {other.line}, at {other.now_s:.6f} s: {other.event}")
    output.table(DIFFERENCE_COLUMNS, other.differences)
