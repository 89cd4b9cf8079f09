"""Medians over rounds, ratios to the better peer, tables for people, a line for programs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.engine.contenders import ENTRIES
from bench.engine.models import I4, I8
from bench.engine.workload import FIRST, GREEDY, PREFILL, SAMPLING, THREADS, Work
from bench.printing import last_line, rounded, show_table
from mesh.domain.model import WeightPrecision

OURS = "mesh"
TARGETS = {GREEDY[1].name: 0.9, GREEDY[8].name: 1.0, GREEDY[16].name: 1.0}

Seconds = Mapping[str, Mapping[str, Sequence[float]]]
"""By engine, by the work's name, one a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One model."""

    name: str
    works: Sequence[Work]
    seconds: Mapping[WeightPrecision, Seconds]
    idle_share: float
    """The most CPU, as a share of one core, that a waiting engine used."""
    precisions: Mapping[str, object]

    def rates(self, weights: WeightPrecision, work: Work) -> dict[str, float]:
        """Tokens a second by engine: the median."""
        by_engine = self.seconds.get(weights, {})
        return {
            engine: work.counted_tokens / median(by_work[work.name])
            for engine, by_work in by_engine.items()
            if by_work[work.name]
        }

    def ratio(self, weights: WeightPrecision, name: str) -> float | None:
        """mesh over the best peer; None where there is none, or this was not measured."""
        work = next((work for work in self.works if work.name == name), None)
        rates = {} if work is None else self.rates(weights, work)
        ours = rates.pop(OURS, None)
        return ours / max(rates.values()) if ours and rates else None

    def decode_s(self, weights: WeightPrecision) -> float | None:
        """The seconds of a token of a request alone, what comes before its second one left out."""
        ours = self.seconds.get(weights, {}).get(OURS, {})
        alone = next((work for work in self.works if work.name == GREEDY[1].name), GREEDY[1])
        if not ours.get(alone.name) or not ours.get(FIRST.name):
            return None
        taken_s = median(ours[alone.name]) - median(ours[FIRST.name])
        return taken_s / (alone.output_tokens - 1)

    def figures(self) -> dict[str, object]:
        eight, four = self.decode_s(I8), self.decode_s(I4)
        sampled = self._sampled_over_greedy()
        return {
            "ratio_to_best": self._ratios(I8),
            "ratio_to_best_i4": self._ratios(I4),
            "sampled_ratio": rounded(self.ratio(I8, SAMPLING.name)),
            "sampled_over_greedy": rounded(sampled),
            "prefill_ratio_to_best": rounded(self.ratio(I8, PREFILL.name)),
            "prefill_ratio_to_best_i4": rounded(self.ratio(I4, PREFILL.name)),
            "i4_decode_ratio": rounded(four / eight if eight and four else None),
            "tokens_per_s": {
                weights: {
                    work.name: {e: round(r, 1) for e, r in self.rates(weights, work).items()}
                    for work in self.works
                }
                for weights in self.seconds
            },
            "precisions": self.precisions,
        }

    def _ratios(self, weights: WeightPrecision) -> dict[str, float | None]:
        return {
            str(count): rounded(self.ratio(weights, work.name)) for count, work in GREEDY.items()
        }

    def _sampled_over_greedy(self) -> float | None:
        """mesh's own rates at as many at once."""
        found = {work.name: self.rates(I8, work).get(OURS) for work in self.works}
        sampled, greedy = found.get(SAMPLING.name), found.get(GREEDY[SAMPLING.count].name)
        return sampled / greedy if sampled and greedy else None


def print_model(measured: Measured) -> None:
    works = measured.works
    for weights, by_engine in measured.seconds.items():
        rows = []
        for entry in ENTRIES:
            by_work = by_engine.get(entry.name)
            if by_work is None:
                rows.append((entry.name, "not installed", *("" for _ in works)))
                continue
            cells = (_cell(work, by_work[work.name]) for work in works)
            rows.append((entry.name, entry.runs[weights], *cells))
        ratios = [measured.ratio(weights, work.name) for work in works]
        if any(ratios):
            rows.append(("mesh / best peer", "", *map(_ratio_cell, works, ratios)))
        rounds = max(len(times) for by_work in by_engine.values() for times in by_work.values())
        show_table(
            ("engine", "runs", *(work.name for work in works)),
            rows,
            title=f"{measured.name}, {weights}: tokens/s, {THREADS} threads, median (least–most) "
            f"of {rounds} rounds; {GREEDY[1].prompt_tokens} in and {works[0].output_tokens} out",
            words=2,
        )
    print(f"waiting engines used at most {100 * measured.idle_share:.1f} % of a core")


def print_figures(models: Sequence[Measured], missing: list[str]) -> None:
    """Those of the first model, with all of them in `models`."""
    figures = {measured.name: measured.figures() for measured in models}
    last_line({**figures[models[0].name], "models": figures, "missing": missing})


def _cell(work: Work, seconds: Sequence[float]) -> str:
    if not seconds:
        return ""
    rates = sorted(work.counted_tokens / taken_s for taken_s in seconds)
    return f"{median(rates):.1f} ({rates[0]:.0f}–{rates[-1]:.0f})"


def _ratio_cell(work: Work, ratio: float | None) -> str:
    if ratio is None:
        return ""
    target = TARGETS.get(work.name)
    return f"{ratio:.2f}" + (f" (≥ {target:.1f})" if target else "")
