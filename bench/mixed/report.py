"""What a run on a mixed cell came to: a table by phase and node, and its figures."""

from collections.abc import Sequence
from statistics import median

from bench.mixed.cell import FIRST, SECOND
from bench.mixed.running import QUIET_AFTER, Run
from bench.printing import last_line, show_table
from mesh.evaluation.judging import Judged

TARGET = 0.99
"""The share of the tokens of admitted requests that is to be in time."""
HEADINGS = ("PHASE", "NODE", "REQUESTS", "TOKENS", "IN TIME", "TTFT_P50_S", "TOKENS/S")


def report(made: Run) -> None:
    sizes, judged = made.sizes, made.judged
    print(
        f"TTFT {sizes.slo.ttft_s:g} s, TPOT {sizes.slo.tpot_s:.3f} s: by its profile {FIRST} keeps "
        f"that for {sizes.first_batch} requests at once, {SECOND} for {sizes.second_batch}; "
        f"{sizes.burst} in a burst, of {sizes.prompt_tokens} and {sizes.output_tokens} tokens"
    )
    show_table(HEADINGS, rows(made), words=2)
    print(
        f"{judged.met_tokens_share:.2%} of the tokens in time (≥ {TARGET:.0%}), the tightest with "
        f"{judged.spare_s_least:.2f} s to spare; {made.spilled} requests spilled over; "
        f"{made.returned} of {made.phases[QUIET_AFTER].requests} came back"
    )
    last_line(figures(made), surveyed=True)


def rows(made: Run) -> list[tuple[str, ...]]:
    """By phase, in their order, and node; last those of a phase that were refused."""
    found = []
    for phase, judged in made.phases.items():
        nodes = sorted({each.answer.node_id for each in judged.all}, key=lambda n: (not n, n))
        for node_id in nodes:
            mine = [each for each in judged.all if each.answer.node_id == node_id]
            found.append((phase, node_id or "refused", *_numbers(mine)))
    return found


def _numbers(of: Sequence[Judged]) -> tuple[str, ...]:
    """How quickly tokens followed a request's first one is told in the median."""
    came = [each.answer.tokens_s for each in of if each.answer.tokens_s]
    tokens = sum(map(len, came))
    if not tokens:
        return (str(len(of)), "0", "-", "-", "-")
    paces = [(len(s) - 1) / (s[-1] - s[0]) for s in came if s[-1] > s[0]]
    return (
        str(len(of)),
        str(tokens),
        f"{sum(each.met_tokens for each in of) / tokens:.1%}",
        f"{median(s[0] for s in came):.2f}",
        f"{median(paces) if paces else 0.0:.1f}",
    )


def figures(made: Run) -> dict[str, object]:
    judged, slo = made.judged, made.sizes.slo
    return {
        "requests": judged.requests,
        "admitted": len(judged.admitted),
        "refused": len(judged.refused),
        "refused_by_reason": judged.refused_by_reason,
        "torn": len(judged.torn),
        "met_share": round(judged.met_tokens_share, 4),
        "spare_s_least": round(judged.spare_s_least, 3),
        "spilled": made.spilled,
        "returned": made.returned,
        "after_bursts": made.phases[QUIET_AFTER].requests,
        "ttft_slo_s": slo.ttft_s,
        "tpot_slo_s": round(slo.tpot_s, 4),
    }
