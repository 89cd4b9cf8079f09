"""The evaluation of operator-level autoscaling (§4.3), and what of it holds when it is executed.

A point is a model under a demand. Its plans are counted in the paper's way and with device time
conserved, by four planners each, and each is executed. Before: `mesh bench operators`. After:
`runs`, `record`. docs/operators.md says what the figures mean.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from mesh.domain.errors import InvalidInput
from mesh.domain.operators import Phase
from mesh.domain.values import dataclass, replace
from mesh.plan import conserving
from mesh.plan.conserving import Placed
from mesh.plan.placement import place_greedy, place_whole
from mesh.plan.planners import plan_brute, plan_greedy, plan_model, plan_operators
from mesh.plan.problem import LANES_MAX, SAMPLE, Plan, Problem, sample_of, slo_of, sum_r
from mesh.sim.operators.execution import Executed, Execution, poisson
from mesh.sim.operators.tables import DEVICES, operator_table
from mesh_workloads.published import AZURE_CODE, AZURE_CONVERSATION, LONG_CONTEXT
from mesh_workloads.reading import read, recognise

PAPER, CONSERVING = "paper", "conserving"
GREEDY = "operators-greedy"
PLANNERS = ("model", "model-shared", GREEDY, "operators")
MAKE = {"model": plan_model, GREEDY: plan_greedy, "operators": plan_operators}
"""The functions that make plans, by the names of planners."""
DENSE, MIXTURE = "qwen2-7b", "qwen2-57b-a14b"
SIZES = ("qwen2-0.5b", "qwen2-1.5b", DENSE, "qwen2-72b")
SLO_TIMES = 2.0
LENGTHS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
RATES = (1, 5, 10, 20, 40, 60, 80, 100)
LOAD_MAX = 12.0
"""Device-seconds a second, at full speed, of the figure over lengths: longer prompts come less
often.
"""
MET = 0.99
"""The share of the requests that must keep the SLO in each trial for a plan to count."""
TRIAL_RATE = 1.1
"""The rate of a trial over that of the demand, as in bursts that are longer than a trial."""
SEED = 1
RATE_TIMES = 6
"""The highest rate that is tried for `throughput_gain`, over that of its point."""
TRIAL_SEEDS = (1_000_001, 1_000_002, 1_000_003)
PASSES, FEWER = {Phase.PREFILL: 1, Phase.DECODE: 32}, 4
"""Iterations of a request that is executed. There are so many times fewer answers than prompts."""
VISITS = 2
"""The turns in which an iteration comes by its layers."""
FULL, QUICK = 5000, 1000
"""The number of requests of a trial, and of an execution."""
USED_MAX = 0.8
"""`queueing_error` counts plans whose devices are used to that share at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A model under a demand."""

    figure: str
    name: str
    model: str = DENSE
    phase: Phase = Phase.PREFILL
    rate_per_s: float = 40.0
    """Prompts, or tokens when decoding."""
    lengths: tuple[int, ...] = (2048,)
    slo_times: float = SLO_TIMES
    slo_of: str = ""
    """The model whose unloaded iteration the SLO is a multiple of; empty for its own."""
    device: str = DEVICES[0]

    def problem(self) -> Problem:
        table, like = (
            operator_table(model, self.phase, device=self.device)
            for model in (self.model, self.slo_of or self.model)
        )
        slo_s = slo_of(like, self.lengths, self.slo_times)
        return Problem(table=table, rate_per_s=self.rate_per_s, lengths=self.lengths, slo_s=slo_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The plan of one planner at a point, in one accounting."""

    devices: int
    sum_pr: int
    memory_bytes: int
    energy_j: float
    plan_ms: float
    """What planning and placing took of a processor, without the trials."""
    expected_s: float
    executed: Executed
    used: float
    """The load of full batches over what its devices yield."""


def points(
    trace: Path | None = None, *, quick: bool = False, device: str = DEVICES[0]
) -> list[Point]:
    """All points of the figures; with `quick` every other one of the two long ones. With a trace,
    its own lengths and rate alone.
    """
    every = _of_figures(quick, device) if trace is None else _of_trace(trace)
    return [replace(point, device=device) for point in every]


def _of_figures(quick: bool, device: str) -> list[Point]:
    step = 2 if quick else 1
    return [
        *(_of_length(*of, device) for of in product((DENSE, MIXTURE), LENGTHS[::step])),
        *(_at_rate("qps", *of) for of in product((DENSE, MIXTURE), RATES[::step])),
        *_over_phases(),
        *(Point(figure="size", name=model, model=model, slo_of=SIZES[-1]) for model in SIZES),
        *(Point(figure="slo", name=f"{times:g}", slo_times=times) for times in (1.5, 2.0, 3.0)),
    ]


def _at_rate(figure: str, model: str, rate: float) -> Point:
    lengths = (2048,) if model == DENSE else (1024,)
    of = f"{figure} {model}"
    return Point(figure=of, name=str(rate), model=model, lengths=lengths, rate_per_s=float(rate))


def _of_length(model: str, tokens: int, device: str) -> Point:
    work_s = operator_table(model, Phase.PREFILL, device=device).seconds((tokens,))
    rate, of = round(min(40.0, LOAD_MAX / work_s), 3), f"length {model}"
    return Point(figure=of, name=str(tokens), model=model, lengths=(tokens,), rate_per_s=rate)


def _over_phases() -> Iterable[Point]:
    """Azure's traces at eight times their rates (5.4 and 2.5 a second), Mooncake's at its own."""
    for name, lengths, rate in (
        ("azure-conversation", AZURE_CONVERSATION, 43.2),
        ("azure-code", AZURE_CODE, 20.0),
        ("mooncake-conversation", LONG_CONTEXT, 3.4),
    ):
        prompts = [lengths.input.at((number + 0.5) / SAMPLE) for number in range(SAMPLE)]
        yield from _both("phase", name, prompts, lengths.output.mean(), rate)


def _both(
    figure: str, name: str, prompts: Sequence[int], answer: float, rate: float
) -> Iterable[Point]:
    """A point of the prompts, and one of the tokens of their answers."""
    for phase, per_s, more in (
        (Phase.PREFILL, rate, 0),
        (Phase.DECODE, rate * answer, round(answer / 2)),
    ):
        lengths, of = tuple(each + more for each in prompts), f"{name} {phase}"
        yield Point(figure=figure, name=of, phase=phase, rate_per_s=per_s, lengths=lengths)


def _of_trace(path: Path) -> Iterable[Point]:
    """The points of a trace. Raises InvalidInput where its format has no lengths."""
    columns = recognise(path).columns
    if not any(word in columns.lower() for word in ("token", "length")):
        raise InvalidInput(
            f"{path} has no lengths of prompts and answers: its columns are {columns}",
            hint="give a trace that tells them, such as the Azure LLM trace",
        )
    trace = read(path)
    prompts = sample_of([each.input_tokens for each in trace.arrivals])
    answer = fmean(each.output_tokens for each in trace.arrivals)
    rate = len(trace.arrivals) / trace.duration_s
    yield from _both("trace", path.stem, prompts, answer, rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class PointJob:
    """All plans of a point (`mesh.evaluation.runs.Job`)."""

    point: Point
    requests: int

    @property
    def name(self) -> str:
        return f"{self.point.figure} {self.point.name}"

    @property
    def weight(self) -> float:
        return self.point.rate_per_s

    def compute(self) -> dict[str, dict[str, Cell]]:
        """Cells by accounting and planner. Raises InvalidInput where the SLO is infeasible."""
        problem = self.point.problem()
        made: dict[str, dict[str, Cell]] = {PAPER: {}, CONSERVING: {}}
        run = _Executions(problem=problem, requests=self.requests)
        for name in PLANNERS:
            before_s = time.process_time()
            try:
                placed = _paper(problem, name)
            except InvalidInput:
                if name != GREEDY:
                    raise
                continue  # Algorithm 1 gives up where others find a plan.
            plan_s, energy_j = time.process_time() - before_s, problem.energy_j(placed.plan)
            made[PAPER][name] = run.cell(placed, plan_s, energy_j)
        fewest: dict[str, Placed] = {}
        for name in PLANNERS:
            fewest[name], plan_s = run.first_kept(_conserving(problem, name, fewest))
            made[CONSERVING][name] = run.cell(fewest[name], plan_s)
        return made


@dataclass(slots=True, kw_only=True)
class _Executions:
    """Executes plans of a problem, each of them once, though several planners make it."""

    problem: Problem
    requests: int
    known: dict[object, Executed] = field(default_factory=dict)

    def cell(self, placed: Placed, plan_s: float, energy_j: float | None = None) -> Cell:
        """The cell of a plan, with the joules of an iteration if given, else of its execution."""
        problem, executed = self.problem, self._once(placed, SEED, 0.0)
        devices, each_j = problem.table.devices, executed.energy_j / executed.requests
        return Cell(
            devices=placed.devices * devices,
            sum_pr=sum_r(placed.plan) * devices,
            memory_bytes=placed.memory_bytes(problem),
            energy_j=each_j if energy_j is None else energy_j * PASSES[problem.table.phase],
            plan_ms=1e3 * plan_s,
            expected_s=placed.expected_s,
            executed=executed,
            used=placed.used(problem),
        )

    def first_kept(self, candidates: Iterable[Placed]) -> tuple[Placed, float]:
        """The first plan whose trials keep the SLO, and the seconds that planning took. Raises
        InvalidInput where none does.
        """
        plan_s, before_s = 0.0, time.process_time()
        for placed in candidates:
            plan_s += time.process_time() - before_s
            if all(self._once(placed, seed, MET).met >= MET for seed in TRIAL_SEEDS):
                return placed, plan_s
            before_s = time.process_time()
        raise InvalidInput(
            f"no plan keeps {self.problem.slo_s * 1e3:.4g} ms for {100 * MET:g} % of the requests",
            hint="raise the SLO",
        )

    def _once(self, placed: Placed, seed: int, least_met: float) -> Executed:
        """Execute a plan for Poisson arrivals, quicker ones in a trial, which ends once fewer than
        `least_met` can keep the SLO. The first requests, until the answers among them are through,
        do not count.
        """
        key = (placed.plan, placed.placement, placed.lanes, seed)
        if key in self.known:
            return self.known[key]
        problem, table = self.problem, self.problem.table
        tokens_per_s = problem.rate_per_s * (TRIAL_RATE if least_met else 1.0)
        passes = PASSES[table.phase]
        count = self.requests // (1 if passes == 1 else FEWER)
        warm = count // 10
        if passes > 1:
            warm = max(warm, round(2 * tokens_per_s * problem.slo_s))
        execution = Execution(
            table,
            placed.plan,
            placed.placement,
            slo_s=problem.slo_s,
            lanes=placed.lanes,
            visits=VISITS,
            misses_max=int((1 - least_met) * count) if least_met else None,
        )
        arrivals = poisson(tokens_per_s / passes, problem.lengths, count + warm, seed, passes)
        self.known[key] = execution.run(arrivals, warm)
        return self.known[key]


def _paper(problem: Problem, name: str) -> Placed:
    """Plan and placement by the paper's formulas: whole models on a device each, all else by
    algorithm 2. Of whole models that share devices more may take fewer devices, since each of them
    waits less, so that several numbers are tried.
    """
    if name == "model-shared":
        (least,) = plan_model(problem)
        counts = range(least.replicas, 2 * least.replicas + 3)
        plans: list[Plan] = [(replace(least, replicas=count),) for count in counts]
    else:
        plans = [MAKE[name](problem)]
    every = [
        Placed(
            plan=plan,
            placement=place_whole(plan) if name == "model" else place_greedy(problem, plan),
            expected_s=problem.expected_s(plan),
        )
        for plan in plans
    ]
    return min(every, key=lambda placed: (placed.devices, sum_r(placed.plan)))


def _conserving(problem: Problem, name: str, fewest: Mapping[str, Placed]) -> Iterable[Placed]:
    if name.startswith("model"):
        return conserving.models(problem, 1 if name == "model" else LANES_MAX)
    return conserving.operators(problem, MAKE[name], fewest["model-shared"])


def oracle(
    rates: Sequence[float] = tuple(range(5, 101, 5)), device: str = DEVICES[0]
) -> dict[str, Any]:
    """For the dense model and the mixture with 1,024 tokens: how far algorithm 1
    (`oracle_gap_greedy`, where it does not give up) and the exact planner (`oracle_gap`, where
    trying all ends) are from the best plan, and how long the exact one takes.
    """
    greedy, exact, took, gave_up = [], [], [], 0
    for model, rate in product((DENSE, MIXTURE), rates):
        point = replace(_at_rate("oracle", model, rate), lengths=(1024,), device=device)
        problem = point.problem()
        before_s = time.process_time()
        best = sum_r(plan_operators(problem))
        took.append(1e3 * (time.process_time() - before_s))
        try:
            greedy.append(sum_r(plan_greedy(problem)) / best - 1)
        except InvalidInput:
            gave_up += 1
        with suppress(InvalidInput):  # There are too many plans to try.
            exact.append(best / sum_r(plan_brute(problem)) - 1)
    return {
        "oracle_gap_greedy": _mean(greedy),
        "oracle_gave_up": gave_up,
        "oracle_gap": max(exact, default=None),
        "oracle_enumerated": len(exact),
        "plan_ms_p99": round(sorted(took)[int(0.99 * len(took))], 2),
    }


def throughput_gain(point: Point) -> float:
    """The largest rate that operators serve, by the paper's formulas, on the devices that whole
    models need for the point's, over the largest that these serve on them.
    """
    problem = point.problem()
    devices = _paper(problem, "model").devices
    operators, models = (
        _most(problem, devices, partial(_paper, name=name)) for name in ("operators", "model")
    )
    return operators / models


def _most(problem: Problem, devices: int, plan: Callable[[Problem], Placed]) -> float:
    """The largest rate for which a plan has at most so many devices, to 2 % and up to RATE_TIMES
    that of the demand. Devices do not always rise with the rate, so that rates are tried downwards.
    """
    rate = problem.rate_per_s * RATE_TIMES
    while rate > problem.rate_per_s:
        try:
            if plan(problem.but(rate_per_s=rate)).devices <= devices:
                return rate
        except InvalidInput:
            pass  # The rate is above what can be planned or placed: a lower one may not be.
        rate /= 1.02
    return problem.rate_per_s


Found = Mapping[Point, Mapping[str, Mapping[str, Cell]]]
"""Cells by point, accounting and planner."""


def record(
    found: Found, tested: Mapping[str, Any] | None = None, gains: Sequence[float] = ()
) -> dict[str, Any]:
    """The figures as one plain value, with those of `oracle`. Savings are 1 - planner's /
    baseline's; points at which algorithm 1 gave up lack its cell.
    """
    met = [cell.executed.met for by in found.values() for cell in by[CONSERVING].values()]
    models = PLANNERS[:2]
    paper, ours = (partial(_savings, accounting=of) for of in (PAPER, CONSERVING))
    fewer = {name: ours(found, "operators", name, "devices") for name in models}
    smaller = {name: ours(found, "operators", name, "memory_bytes") for name in models}
    gain = None
    if gains:
        gain = {"min": round(min(gains), 3), "mean": _mean(gains), "max": round(max(gains), 3)}
    phases = {
        phase: {point: by for point, by in found.items() if point.phase is phase} for phase in Phase
    }
    figures: dict[str, dict[str, object]] = {}
    for point, by in found.items():
        figures.setdefault(point.figure, {})[point.name] = {
            accounting: {name: _plain(point, cell) for name, cell in planners.items()}
            for accounting, planners in by.items()
        }
    return {
        "gpu_saving_max": _most_of(paper(found, "operators", "model", "devices")),
        "gpu_saving_shared_max": _most_of(paper(found, "model-shared", "model", "devices")),
        "energy_saving_max": _most_of(paper(found, "operators", "model", "energy_j")),
        "memory_saving_max": _most_of(paper(found, "operators", "model", "memory_bytes")),
        "throughput_gain_fixed": gain,
        "executed_met_min": min(met, default=None),
        "queueing_error": {
            phase.value: {"models": _errors(of, models), "operators": _errors(of, ("operators",))}
            for phase, of in phases.items()
        },
        "paper_plans_refuted": _refuted(found, (GREEDY, "operators")),
        "paper_models_refuted": _refuted(found, ("model",)),
        "saving_conserving_max": {name: _most_of(saved) for name, saved in fewer.items()},
        "saving_conserving_mean": {name: _mean(saved) for name, saved in fewer.items()},
        "operators_fewer": {
            "points": len(found),
            **{name: sum(each > 0 for each in saved) for name, saved in fewer.items()},
        },
        "memory_saving_conserving_max": {name: _most_of(each) for name, each in smaller.items()},
        "prefill_and_decode": {
            phase.value: _mean(paper(of, "operators", "model", "devices", figure="phase"))
            for phase, of in phases.items()
        },
        **(tested or {}),
        "cells": figures,
    }


def _savings(
    found: Found, planner: str, over: str, key: str, *, accounting: str, figure: str = ""
) -> list[float]:
    return [
        1 - getattr(by[accounting][planner], key) / getattr(by[accounting][over], key)
        for point, by in found.items()
        if figure in ("", point.figure)
    ]


def _refuted(found: Found, planners: Sequence[str]) -> dict[str, int]:
    """How many plans there are by the paper's formulas, and how many missed when executed."""
    cells = [by[PAPER][name] for by in found.values() for name in planners if name in by[PAPER]]
    missed = [one for one in cells if one.executed.met < MET]
    return {"plans": len(cells), "refuted": len(missed)}


def _errors(found: Found, planners: Sequence[str]) -> dict[str, float | None]:
    """How far the mean that was expected is off, as a share of the executed one, where devices are
    used up to USED_MAX.
    """
    errors = [
        abs(cell.expected_s / cell.executed.mean_s - 1)
        for by in found.values()
        for name, cell in by[CONSERVING].items()
        if name in planners and cell.used <= USED_MAX
    ]
    return {"max": _most_of(errors), "mean": _mean(errors)}


def _most_of(values: Sequence[float]) -> float | None:
    return round(max(values), 4) if values else None


def _mean(values: Sequence[float]) -> float | None:
    return round(fmean(values), 4) if values else None


def _plain(point: Point, cell: Cell) -> dict[str, Any]:
    key = "ttft_met" if point.phase is Phase.PREFILL else "tbt_met"
    executed = cell.executed
    return {
        "devices": cell.devices,
        "sum_pr": cell.sum_pr,
        "memory_bytes": cell.memory_bytes,
        "energy_j_per_request": round(cell.energy_j, 3),
        key: round(executed.met, 4),
        "plan_ms": round(cell.plan_ms, 2),
        "expected_s": round(cell.expected_s, 6),
        "executed_s": round(executed.mean_s, 6),
        "utilisation": round(cell.used, 4),
        "device_s": round(executed.device_s, 3),
        "peak_bytes": executed.memory_bytes,
    }
