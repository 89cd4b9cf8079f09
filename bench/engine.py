"""Measures mesh's engine, OpenVINO GenAI and llama.cpp in turn, A B C A B C …, on the same prompts.

With weights of 8 bits and of 4, each engine in a process of its own, idle while another is
measured: prompts of 128 tokens answered greedily at 1, 8 and 16 at once, and sampled at 8; first
tokens of prompts of 128 and 2,048. The last line is one JSON object, of the first model, with all
in `models`: `ratio_to_best` (mesh over the better peer, by requests at once), `sampled_ratio`,
`prefill_ratio_to_best`, the like with `_i4` of 4 bits (mesh's `i4-g128`, in groups as GenAI has
them), `i4_decode_ratio` (a token's time in these over that in 8 bits, mesh's), and
the `precisions` that mesh chose, with what each candidate took and its share of the roofline.
"""

import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Literal

import numpy as np

from bench.cold_start_shapes import DEMO
from bench.engine_contenders import (
    ENTRIES,
    FIRST,
    GREEDY,
    PREFILL,
    SAMPLING,
    THREADS,
    WORKS,
    Work,
    shortened,
    timed,
)
from bench.engine_models import I4, I8, WIDTHS, Models, prepared_models
from bench.harness import Report, Table, rounded
from bench.peer import Peer
from mesh.cli import output
from mesh.domain.errors import EngineError
from mesh.domain.model import ComputePrecision, KvPrecision, WeightPrecision
from mesh.domain.profile import IterationShape
from mesh_nodes.engines.openvino.architecture import Architecture, read_architecture
from mesh_nodes.engines.openvino.precision_choice import tried
from mesh_nodes.engines.openvino.precision_trial import SHAPES as TRIAL_SHAPES
from mesh_nodes.engines.openvino.precision_trial import TrialJob, cut
from mesh_nodes.engines.openvino.precisions import Precisions, Timed, choose
from mesh_nodes.engines.openvino.weights import Matrix, weight_plan

OPERATIONS = {
    ComputePrecision.F32: (("amx_int8", 256), ("avx512_vnni", 256), ("avx_vnni", 128)),
    ComputePrecision.BF16: (("amx_bf16", 2048), ("avx512_bf16", 128)),
    ComputePrecision.F16: (("amx_fp16", 2048), ("avx512_fp16", 128)),
}
"""In a cycle of a core, by the kernel's flag, the first that there is: multiplications and
additions. f32 rounds activations to 8 bits, for which the plugin has kernels for VNNI alone."""
PLAIN_OPERATIONS = (("avx512f", 64), ("avx2", 32))
READ_BYTES = 256 << 20
READS = 5
_KV_BYTES = {KvPrecision.F32: 4, KvPrecision.F16: 2, KvPrecision.BF16: 2, KvPrecision.U8: 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    bytes_per_s: float
    flags: frozenset[str]
    cycles_per_s: float
    """The cycles a second of all physical cores that compute."""

    def least_s(
        self, architecture: Architecture, shape: IterationShape, precisions: Precisions
    ) -> float:
        """The least time of an iteration of a model with weights of 8 bits."""
        a, prefill = architecture, shape.prefill_tokens
        matrices = [each for each in weight_plan(a) if isinstance(each, Matrix)]
        weights = sum(each.columns * sum(n for _, n in each.sources) for each in matrices)
        tokens = shape.decode_batch + prefill
        seen = shape.decode_batch * shape.decode_context_tokens
        attended = seen + prefill * (shape.prefill_past_tokens + prefill / 2)
        operations = (
            2 * weights * tokens + 4 * attended * a.layers * a.attention_heads * a.head_size
        )
        kept = (seen + shape.prefill_past_tokens) * 2 * a.layers * a.kv_heads * a.head_size
        read = weights + kept * _KV_BYTES[precisions.kv]
        peak = self.cycles_per_s * self._operations(precisions.compute)
        return max(read / self.bytes_per_s, operations / peak)

    def _operations(self, compute: ComputePrecision) -> int:
        sets = (*OPERATIONS[compute], *PLAIN_OPERATIONS)
        return next((number for flag, number in sets if flag in self.flags), 8)


def measured(threads: int) -> Roofline:
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    rates = [float(rate) for rate in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", cpuinfo, re.MULTILINE)]
    flags = re.search(r"^flags\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    siblings = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
    beside = len(re.findall(r"\d+", siblings.read_text())) if siblings.exists() else 1
    return Roofline(
        bytes_per_s=_read_bytes_per_s(threads),
        flags=frozenset(flags.group(1).split() if flags else ()),
        cycles_per_s=max(rates, default=2000.0) * 1e6 * max(threads / beside, 1),
    )


def _read_bytes_per_s(threads: int) -> float:
    parts = np.array_split(np.ones(READ_BYTES // 8, np.int64), threads)
    shortest_s = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(READS):
            start_s = perf_counter()
            list(pool.map(np.sum, parts))
            shortest_s = min(shortest_s, perf_counter() - start_s)
    return READ_BYTES / shortest_s


NAMES = ("decode 1", "decode 8", "prefill 128", "prefill 128 past 1024")
"""The shapes of the trial that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    architecture: Architecture
    """The architecture of the layers that were computed."""
    timed: tuple[Timed, ...]
    roofline: Roofline

    @classmethod
    def of(cls, architecture: Architecture) -> "Trial":
        """Raises EngineError."""
        try:
            timed = tried(TrialJob(architecture=architecture, threads=THREADS))
        except (OSError, ValueError) as error:
            raise EngineError(f"precisions cannot be compared: {error}") from error
        return cls(architecture=cut(architecture), timed=timed, roofline=measured(THREADS))

    @property
    def chosen(self) -> Precisions:
        return choose(self.timed)

    def shares(self, timed: Timed) -> list[float]:
        """What each iteration could have taken over what it took."""
        return [
            self.roofline.least_s(self.architecture, shape, timed.precisions) / taken_s
            for shape, taken_s in zip(TRIAL_SHAPES, timed.seconds, strict=True)
        ]

    def figures(self) -> dict[str, object]:
        return {
            "chosen": str(self.chosen),
            "candidates": {
                str(each.precisions): {
                    "ms": [round(1000 * seconds, 3) for seconds in each.seconds],
                    "roofline_share": [round(share, 3) for share in self.shares(each)],
                }
                for each in self.timed
                if each.seconds
            },
        }


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


ROUNDS = {DEMO: 3}
"""The rounds of the demo model; any other model has one, because its iterations are long."""
OUTPUT_TOKENS = 16
"""The output of a request to such a model."""
WARM_UP_TOKENS = 4


class Bench:
    """The peers that could be started, and what was measured."""

    def __init__(self, peers: list[Peer], works: Sequence[Work], vocabulary_tokens: int) -> None:
        self._peers = peers
        self._works = works
        self._vocabulary_tokens = vocabulary_tokens
        self._seed = 0
        self._seconds: dict[str, dict[str, list[float]]]
        self._seconds = {peer.name: {work.name: [] for work in works} for peer in peers}
        self.seconds: Seconds = self._seconds
        self.idle_share = 0.0

    def warm_up(self, works: Sequence[Work]) -> None:
        for work in works:
            asked = self._prompts(work), shortened(work, WARM_UP_TOKENS)
            for peer in self._peers:
                output.message(f"warm up {peer.name}, {work.name}")
                peer.ask(asked)

    def round(self, number: int) -> None:
        for work in self._works:
            asked = self._prompts(work), work
            for peer in self._peers:
                taken_s = self._measure(peer, asked)
                self._seconds[peer.name][work.name].append(taken_s)
                rate = work.counted_tokens / taken_s
                output.message(f"round {number}: {peer.name}, {work.name}: {rate:.1f} tokens/s")

    def _measure(self, peer: Peer, asked: tuple[list[list[int]], Work]) -> float:
        others = [other for other in self._peers if other is not peer]
        start_s, before_s = time.monotonic(), [other.cpu_s() for other in others]
        taken_s: float = peer.ask(asked)
        wall_s = time.monotonic() - start_s
        for other, used_s in zip(others, before_s, strict=True):
            self.idle_share = max(self.idle_share, (other.cpu_s() - used_s) / wall_s)
        return taken_s

    def _prompts(self, work: Work) -> list[list[int]]:
        self._seed += 1
        return work.prompts(self._vocabulary_tokens, self._seed)


def measure(models: Models, works: Sequence[Work], warm: Sequence[Work], rounds: int) -> Bench:
    """Engines that are not installed are left out. Raises Unavailable when one fails."""
    with ExitStack() as stack:
        peers = []
        for entry in ENTRIES:
            if entry.installed:
                output.message(f"start {entry.name}")
                peer = stack.enter_context(Peer(entry.name, timed, entry.name, models))
                peer.wait_ready()
                peers.append(peer)
        bench = Bench(peers, works, models.stored.info.vocabulary_tokens)
        bench.warm_up(warm)
        for number in range(1, rounds + 1):
            bench.round(number)
        return bench


def measured_model(name: str, rounds: int) -> tuple[Measured, Trial]:
    """Raises MeshError."""
    output.message(f"{name}: prepare the model for each engine")
    forms = {weights: prepared_models(name, weights) for weights in WIDTHS}
    output.message(f"{name}: compare precisions")
    trial = Trial.of(read_architecture(forms[I8].stored.path))
    works = WORKS if name == DEMO else [shortened(work, OUTPUT_TOKENS) for work in WORKS]
    seconds: dict[WeightPrecision, Seconds] = {}
    idle_share = 0.0
    for weights, models in forms.items():
        wanted, warm = list(works), list(works)
        if name != DEMO:
            # What takes long is computed once, without having been warmed up.
            wanted = [w for w in works if weights is I8 or w.name != SAMPLING.name]
            warm = [w for w in wanted if w.count <= 8 and w.name not in (FIRST.name, PREFILL.name)]
        bench = measure(replace(models, precisions=trial.chosen), wanted, warm, rounds)
        idle_share = max(idle_share, bench.idle_share)
        seconds[weights] = {
            engine: {work.name: by_work.get(work.name, []) for work in works}
            for engine, by_work in bench.seconds.items()
        }
    found = Measured(
        name=name,
        works=works,
        seconds=seconds,
        idle_share=idle_share,
        precisions=trial.figures(),
    )
    return found, trial


def trial_table(trial: Trial) -> Table:
    rows = []
    for each in trial.timed:
        pairs = zip(each.seconds, trial.shares(each), strict=True) if each.seconds else ()
        cells = [f"{1000 * seconds:.2f} ({100 * share:.0f} %)" for seconds, share in pairs]
        mark = " *" if each.precisions == trial.chosen else ""
        cells = cells or ["too far off", *[""] * (len(NAMES) - 1)]
        rows.append((f"{each.precisions}{mark}", f"{each.error:.4f}", *cells))
    title = (
        f"ms of {trial.architecture.layers} layers (share of the roofline); * chosen; memory "
        f"{trial.roofline.bytes_per_s / 1e9:.1f} GB/s"
    )
    return Table(headings=("precision", "error", *NAMES), rows=rows, title=title)


def model_shown(measured: Measured) -> list[Table | str]:
    works = measured.works
    shown: list[Table | str] = []
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
        title = (
            f"{measured.name}, {weights}: tokens/s, {THREADS} threads, median (least–most) "
            f"of {rounds} rounds; {GREEDY[1].prompt_tokens} in and {works[0].output_tokens} out"
        )
        headings = ("engine", "runs", *(work.name for work in works))
        shown.append(Table(headings=headings, rows=rows, title=title, words=2))
    return [*shown, f"waiting engines used at most {100 * measured.idle_share:.1f} % of a core"]


def report(models: Sequence[Measured], missing: list[str]) -> Report:
    """The figures are those of the first model, with all of them in `models`."""
    figures = {measured.name: measured.figures() for measured in models}
    hint = "make bench-engine, or pip install -e '.[bench]'"
    told = [f"not installed, so not measured: {', '.join(missing)}; {hint}"] if missing else []
    return Report(
        figures={**figures[models[0].name], "models": figures, "missing": missing},
        shown=(*(part for measured in models for part in model_shown(measured)), *told),
        targets={"all engines are installed": not missing},
    )


def run(
    *,
    models: tuple[Literal["135M", "0.4B", "1B", "3B"], ...] = ("135M", "1B"),
    rounds: Annotated[int | None, "rounds (3 with the demo model, else 1)"] = None,
    quick: Annotated[bool, "the demo model, one round"] = False,
) -> Report:
    missing = [entry.name for entry in ENTRIES if not entry.installed]
    found, trials = [], []
    for name in [DEMO] if quick else dict.fromkeys(models):
        usual = 1 if quick else ROUNDS.get(name, 1)
        measured, trial = measured_model(name, rounds or usual)
        found.append(measured)
        trials.append(trial_table(trial))
    made = report(found, missing)
    return replace(made, shown=(*trials, *made.shown))
