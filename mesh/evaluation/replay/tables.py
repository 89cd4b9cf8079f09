"""A replay as tables of text, for the terminal and for the page alike.

Before: `report`. After: the command line, `page`.
"""

from collections.abc import Sequence

from mesh.evaluation.replay.numbers import ReplayNumbers, WorkerNumbers
from mesh.evaluation.replay.report import ReplayReport
from mesh.report.charts.page import Table, figure

HEADERS = (
    *("DEPLOYMENT", "CALLS", "FINISHED", "REFUSED", "FAILED", "TTFT_S_P50", "TTFT_S_P95"),
    *("TPOT_MS_P50", "TPOT_MS_P95", "WHOLE_S_P50", "WHOLE_S_P95", "TOKENS_PER_S"),
    *("SLO_%", "SLO_MEAN_%", "LATE_MS_P50", "LATE_MS_P99"),
)


def tables(report: ReplayReport) -> tuple[Table, ...]:
    """All that have rows."""
    every = (
        deployments(report.numbers),
        promises(report.numbers),
        endings(report.numbers),
        workers(report.workers),
        simulated(report),
        controller_counts(report),
    )
    return tuple(table for table in every if table.rows)


def deployments(numbers: Sequence[ReplayNumbers]) -> Table:
    return Table(
        title="Deployments",
        note="SLO_%: every token in time. SLO_MEAN_%: TTFT and mean TPOT in time. Who was told to "
        "be late may be, by so much; refused calls have missed. LATE: the sender, after the "
        "trace's times.",
        headers=HEADERS,
        rows=tuple(_row(each) for each in numbers if each.calls),
        words=1,
    )


def promises(numbers: Sequence[ReplayNumbers]) -> Table:
    return Table(
        title="Promises",
        note="What admitted calls were told. KEPT_%: every token in time, of those promised to be; "
        "KEPT_MEAN_%: TTFT and mean TPOT. TOLD_LATE: for the sake of a load; LATE_OVER_TOLD: by "
        "how much their first token was late, over what they were told.",
        headers=(
            *("DEPLOYMENT", "IN_TIME", "KEPT_%", "KEPT_MEAN_%"),
            *("TOLD_LATE", "LATE_OVER_TOLD_P50", "LATE_OVER_TOLD_P95"),
        ),
        rows=tuple(
            (
                *(each.deployment, str(each.promised)),
                figure(each.met_of_admitted, 1, 100),
                figure(each.met_of_admitted_in_the_mean, 1, 100),
                str(each.told_late),
                *(figure(each.late_over_told_p50, 2), figure(each.late_over_told_p95, 2)),
            )
            for each in numbers
            if each.promised or each.told_late
        ),
        words=1,
    )


def endings(numbers: Sequence[ReplayNumbers]) -> Table:
    rows = [
        (each.deployment, kind, reason, str(count))
        for each in numbers
        for kind, pairs in (("refused", each.refused), ("failed", each.failed))
        for reason, count in pairs
    ]
    return Table(
        title="Refused and failed",
        note="By reason, and by status.",
        headers=("DEPLOYMENT", "END", "WHY", "CALLS"),
        rows=tuple(rows),
        words=3,
    )


def workers(each: Sequence[WorkerNumbers]) -> Table:
    return Table(
        title="Workers",
        note="The processes that sent the calls: how late, after the trace's times.",
        headers=("WORKER", "CALLS", "ENDED", "LATE_MS_P50", "LATE_MS_P99", "LATE_MS_MAX"),
        rows=tuple(
            (
                *(one.worker, str(one.calls), str(one.ended), f"{one.late_ms_p50:.1f}"),
                *(f"{one.late_ms_p99:.1f}", f"{one.late_ms_max:.1f}"),
            )
            for one in each
        ),
        words=1,
    )


def simulated(report: ReplayReport) -> Table:
    """Both sides of all calls, where there is a simulation."""
    rows: tuple[tuple[str, ...], ...] = ()
    if report.simulated:
        live, virtual = report.whole, report.simulated[0]
        pairs = zip(_row(live)[1:-2], _row(virtual)[1:-2], strict=True)
        rows = tuple((name, *pair) for name, pair in zip(HEADERS[1:-2], pairs, strict=True))
    return Table(
        title="Beside a simulation",
        note="The same calls in a simulated cell of the same nodes, by the profiles that the "
        "controller knows.",
        headers=("FIGURE", "LIVE", "SIMULATED"),
        rows=rows,
        words=1,
    )


def controller_counts(report: ReplayReport) -> Table:
    pairs = () if report.counted is None or report.counted.restarted else report.counted.pairs
    return Table(
        title="The controller's own counts",
        note="What the controller counted while the replay ran, beside what its caller did; what "
        "the prefix cache had of the prompts.",
        headers=(
            *("DEPLOYMENT", "SERVED", "FINISHED", "REFUSED", "REFUSED_SEEN", "DIFFERENCE"),
            "CACHED_%",
        ),
        rows=tuple(
            (
                *(p.deployment, str(p.served), str(p.finished), str(p.refused)),
                *(str(p.refused_seen), str(p.difference), figure(p.cached_share, 1, 100)),
            )
            for p in pairs
        ),
        words=1,
    )


def _row(each: ReplayNumbers) -> tuple[str, ...]:
    return (
        each.deployment,
        str(each.calls),
        str(each.finished),
        str(sum(count for _, count in each.refused)),
        str(sum(count for _, count in each.failed)),
        figure(each.ttft_s_p50, 3),
        figure(each.ttft_s_p95, 3),
        figure(each.tpot_s_p50, 1, 1000),
        figure(each.tpot_s_p95, 1, 1000),
        figure(each.whole_s_p50, 3),
        figure(each.whole_s_p95, 3),
        f"{each.tokens_per_s:.1f}",
        f"{100 * each.attainment:.1f}",
        f"{100 * each.attainment_in_the_mean:.1f}",
        f"{each.late_ms_p50:.1f}",
        f"{each.late_ms_p99:.1f}",
    )
