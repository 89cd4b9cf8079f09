"""The evaluation as tables, one for each figure of the paper; text, aligned by whoever shows it.

Numbers of others stand beside ours with a ratio, ours over theirs, where they hold for the load.
Before: `evaluation`. After: the command line, and the HTML page.
"""

from collections.abc import Callable, Sequence

from mesh.evaluation.paper.evaluation import EvaluatedRun, Evaluation, ablated, ratio
from mesh.report.charts.page import NONE, Table, figure


def tables(made: Evaluation) -> tuple[Table, ...]:
    """All that have rows."""
    every = (
        *(slo_met(made), slo_met_by_class(made), nodes_used(made), energy(made)),
        *(latencies(made), endings(made), checked_refusals(made), ablations(made)),
    )
    return tuple(table for table in every if table.rows)


def slo_met(made: Evaluation) -> Table:
    def row(run: EvaluatedRun) -> tuple[str, ...]:
        n, theirs = run.numbers, run.reference.met
        return (
            str(n.requests),
            str(n.met),
            _percent(n.met, n.requests),
            _percent(n.met_with_grace, n.requests),
            _percent(n.met_every_token, n.requests),
            _percent(n.met_every_token_with_grace, n.requests),
            figure(theirs, 0),
            _ratio(n.met, theirs),
        )

    return Table(
        title="SLO met",
        note="MET: TTFT and mean TPOT in time by the clock, refused requests missed. "
        "EVERY_TOKEN: each token by arrival + TTFT limit + index * TPOT. GRACE: as late as told "
        "is granted. REFERENCE: the authors' scheduler under a "
        "virtual clock, measured by us.",
        headers=_headers(
            *("REQUESTS", "MET", "MET_%", "GRACE_%", "EVERY_TOKEN_%", "EVERY_TOKEN_GRACE_%"),
            *("REFERENCE", "RATIO"),
        ),
        rows=_rows(made, row),
    )


def slo_met_by_class(made: Evaluation) -> Table:
    """The table of the runs whose requests have SLO classes."""
    rows = tuple(
        (
            *(run.cell, run.policy, name, str(of.requests), str(of.met)),
            *(_percent(of.met, of.requests), _percent(of.met_every_token, of.requests)),
            str(sum(count for _, count in of.refused)),
        )
        for run in made.runs
        for name, of in run.numbers.by_class.items()
    )
    return Table(
        title="SLO met, by class",
        note="As above, each request by the limits of its class. REFUSED: all that did not finish.",
        headers=_headers("CLASS", "REQUESTS", "MET", "MET_%", "EVERY_TOKEN_%", "REFUSED"),
        rows=rows,
        words=3,
    )


def nodes_used(made: Evaluation) -> Table:
    def row(run: EvaluatedRun) -> tuple[str, ...]:
        n, theirs = run.numbers, run.reference.gpu_nodes
        decoding = dict(n.decode_tokens_per_s)
        return (
            f"{n.cpu_nodes:.2f}",
            f"{n.gpu_nodes:.2f}",
            f"{n.cpu_nodes_busy:.2f}",
            f"{n.gpu_nodes_busy:.2f}",
            figure(theirs, 2),
            _ratio(n.gpu_nodes_busy, theirs),
            figure(decoding.get("cpu"), 0),
            figure(decoding.get("gpu"), 0),
        )

    return Table(
        title="Nodes in use",
        note="Mean over the load's time. BUSY, as the reference counts: a node has requests or a "
        "call under way, a GPU for 1 s after. A node with resident weights is in use as well, but "
        "not with ideal costs. DECODE: tokens a second of one node while it is busy.",
        headers=_headers(
            *("CPU_NODES", "GPU_NODES", "CPU_BUSY", "GPU_BUSY", "REFERENCE_GPU", "RATIO"),
            *("CPU_DECODE_TOKENS_PER_S", "GPU_DECODE_TOKENS_PER_S"),
        ),
        rows=_rows(made, row),
    )


def energy(made: Evaluation) -> Table:
    def row(run: EvaluatedRun) -> tuple[str, ...]:
        taken = run.numbers.energy
        return (
            figure(taken.busy_j and taken.busy_j / 1e3, 1),
            figure(taken.idle_j and taken.idle_j / 1e3, 1),
            figure(taken.j_per_request, 1),
            figure(taken.j_per_output_token, 3),
        )

    return Table(
        title="Energy",
        note="By guessed watts. Of a request and an output token: what nodes take while they "
        "compute. IDLE: what all nodes take while they do not, those included that are not in use.",
        headers=_headers("COMPUTING_KJ", "IDLE_KJ", "J_PER_REQUEST", "J_PER_OUTPUT_TOKEN"),
        rows=_rows(made, row),
    )


def latencies(made: Evaluation) -> Table:
    percents = (50, 90, 95, 99)

    def row(run: EvaluatedRun) -> tuple[str, ...]:
        n = run.numbers
        return (
            _percent(n.ttft.count, n.requests),
            *(figure(n.ttft.at(p), 2) for p in percents),
            *(figure(n.tpot.at(p), 3) for p in percents),
        )

    return Table(
        title="TTFT and TPOT",
        note="Percentiles of the requests that were started; TPOT is the mean of a request.",
        headers=_headers(
            "STARTED_%",
            *(f"TTFT_P{p}_S" for p in percents),
            *(f"TPOT_P{p}_S" for p in percents),
        ),
        rows=_rows(made, row),
    )


def endings(made: Evaluation) -> Table:
    """Cold starts, and refusals by reason: a column for each reason that was met."""
    reasons = sorted({reason for run in made.runs for reason, _ in run.numbers.refused})

    def row(run: EvaluatedRun) -> tuple[str, ...]:
        n, refused = run.numbers, dict(run.numbers.refused)
        counts = (n.finished, n.loads, n.cold_requests, *(refused.get(r, 0) for r in reasons))
        return tuple(str(count) for count in counts)

    return Table(
        title="Cold starts and refusals",
        note="LOADS of instances; COLD_REQUESTS started one by their admission.",
        headers=_headers("FINISHED", "LOADS", "COLD_REQUESTS", *(r.upper() for r in reasons)),
        rows=_rows(made, row),
    )


def checked_refusals(made: Evaluation) -> Table:
    """The table of the runs that were asked to look at their refusals."""
    rows = tuple(
        (
            *(run.cell, run.policy, str(found.refused_beside_free_link)),
            *(str(found.reasons_drawn), _percent(found.reasons_agreeing, found.reasons_drawn)),
        )
        for run in made.runs
        if (found := run.refusals) is not None
    )
    return Table(
        title="Refusals, checked",
        note="BESIDE_FREE_LINK: refused, or late, while a GPU without a load had memory for the "
        "model. AGREE: of DRAWN refusals those with the reason that a look at each node gives.",
        headers=_headers("BESIDE_FREE_LINK", "DRAWN", "AGREE_%"),
        rows=rows,
    )


def ablations(made: Evaluation) -> Table:
    rows = []
    for run, whole in ablated(made.runs):
        theirs = run.reference
        rows.append(
            (
                run.cell,
                run.policy,
                str(run.numbers.met),
                f"{run.numbers.met - whole.numbers.met:+d}",
                figure(theirs.met, 0),
                f"{run.numbers.gpu_nodes_busy:.2f}",
                f"{run.numbers.gpu_nodes_busy - whole.numbers.gpu_nodes_busy:+.2f}",
                figure(theirs.gpu_nodes, 2),
            )
        )
    return Table(
        title="Ablations",
        note="…_CHANGE: against the whole policy in the same cell.",
        headers=_headers(
            *("MET", "MET_CHANGE", "REFERENCE"),
            *("GPU_BUSY", "GPU_BUSY_CHANGE", "REFERENCE_GPU"),
        ),
        rows=tuple(rows),
    )


def _headers(*numbers: str) -> tuple[str, ...]:
    return ("CELL", "POLICY", *numbers)


def _rows(
    made: Evaluation, row: Callable[[EvaluatedRun], Sequence[str]]
) -> tuple[tuple[str, ...], ...]:
    return tuple((run.cell, run.policy, *row(run)) for run in made.runs)


def _percent(count: int, of: int) -> str:
    return f"{100 * count / of:.1f}" if of else NONE


def _ratio(ours: float, theirs: float | None) -> str:
    return figure(ratio(ours, theirs), 3)
