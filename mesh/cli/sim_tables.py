"""What `mesh sim` shows of a run: its numbers one a line, its nodes one a row."""

from mesh.cli.output import Column, number, word
from mesh.domain.reasons import DeviceKind, RefusalReason
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
    pairs += [
        ("output", f"{report.tokens_per_s:.1f} tokens/s"),
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
        ("TTFT p50", _seconds(made.ttft_s_p50)),
        ("TTFT p95", _seconds(made.ttft_s_p95)),
        ("TPOT mean", _seconds(made.tpot_s_mean)),
    ]
    pairs += [(_ended(end), _share(n, made.requests)) for end, n in made.refused]
    return pairs


def _ended(end: str) -> str:
    """Clients that went, and streams that broke, were not refused."""
    return f"refused, {end}" if end in _REFUSALS else end


def _share(count: int, of: int) -> str:
    return f"{count} ({100 * count / of:.1f} %)" if of else "0"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3f} s"
