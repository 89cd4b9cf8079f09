"""Medians over rounds, the ratio to the better peer, a table for people, a line for programs."""

from statistics import median

from bench.engine.contenders import ENTRIES
from bench.engine.workload import CONCURRENCIES, OUTPUT_TOKENS, PROMPT_TOKENS, THREADS
from bench.printing import last_line, show_table

OURS = "mesh"
TARGETS = {1: 0.9, 8: 1.0, 16: 1.0}

Rates = dict[str, dict[int, list[float]]]
"""Output tokens per second: by engine, by requests at once, one a round."""


def ratios(rates: Rates) -> dict[int, float]:
    """mesh's median over that of the best peer; nothing where no peer was measured."""
    peers = [name for name in rates if name != OURS]
    if OURS not in rates or not peers:
        return {}
    return {
        count: median(rates[OURS][count]) / max(median(rates[peer][count]) for peer in peers)
        for count in CONCURRENCIES
    }


def print_report(
    rates: Rates, idle_share: float, missing: list[str], precisions: dict[str, object]
) -> None:
    """`idle_share`: the most CPU, as a share of one core, that a waiting engine used."""
    rounds = max(len(times) for by_count in rates.values() for times in by_count.values())
    rows = []
    for entry in ENTRIES:
        if entry.name in rates:
            cells = (_cell(rates[entry.name][count]) for count in CONCURRENCIES)
            rows.append((entry.name, entry.runs, *cells))
        else:
            rows.append((entry.name, "not installed", *("" for _ in CONCURRENCIES)))
    ratio = ratios(rates)
    if ratio:
        cells = (f"{ratio[count]:.2f} (≥ {TARGETS[count]:.1f})" for count in CONCURRENCIES)
        rows.append(("mesh / best peer", "", *cells))
    show_table(
        ("engine", "runs", *(f"{count} at once" for count in CONCURRENCIES)),
        rows,
        title=f"output tokens/s, {PROMPT_TOKENS} in, {OUTPUT_TOKENS} out, {THREADS} threads: "
        f"median (least–most) of {rounds} rounds",
        words=2,
    )
    print(f"waiting engines used at most {100 * idle_share:.1f} % of a core")
    last_line({**_figures(rates, ratio, missing), "precisions": precisions})


def _cell(rates: list[float]) -> str:
    return f"{median(rates):.1f} ({min(rates):.0f}–{max(rates):.0f})"


def _figures(rates: Rates, ratio: dict[int, float], missing: list[str]) -> dict[str, object]:
    return {
        "ratio_to_best": {str(count): round(value, 3) for count, value in ratio.items()},
        "tokens_per_s": {
            name: {str(count): round(median(times), 1) for count, times in by_count.items()}
            for name, by_count in rates.items()
        },
        "missing": missing,
    }
