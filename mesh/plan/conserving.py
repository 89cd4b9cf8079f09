"""Plans that count device time once: what shares a device shares its time, by the measured curve.

Each function yields plans with their placements, those with the fewest devices first, that the
formulas hold for good. Means are not enough for an SLO that 99 of 100 requests are to keep, so
whoever asks executes each until one keeps it. Before: `mesh.plan.planners`, `mesh.plan.placement`.
After: `mesh.evaluation.operators`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from mesh.domain.errors import InvalidInput
from mesh.plan.placement import Placement, devices_of, pieces_of, place_conserving, place_whole
from mesh.plan.planners import whole_plan
from mesh.plan.problem import LANES_MAX, REPLICAS_MAX, Choice, Plan, Problem
from mesh.plan.queueing import shared_sojourn_s

MARGINS = (1.0, 0.4, 0.1, 0.0)
"""The parts of the time that an SLO leaves for waiting which a plan of operators is made for, tried
in this order: its queues are no M/G/R, and an SLO is kept by few that the mean keeps. With 0 each
operator is on every device.
"""
WEIGHTLESS = 1e-3
"""The share of a model's weights below which an operator is free to be everywhere."""
LANES = (1, 2)
"""Operators at work on a device at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A plan on its devices. `expected_s` is the mean that the formulas tell of an iteration."""

    plan: Plan
    placement: Placement
    expected_s: float
    lanes: int | None = None
    """Servers at work on a device at a time; `None` for all that have work."""

    @property
    def devices(self) -> int:
        """Groups in use."""
        return devices_of(self.placement)


def models(problem: Problem, lanes_max: int) -> Iterator[Placed]:
    """Whole models, up to `lanes_max` of which share a device where their memory allows."""
    table, demand = problem.table, problem.demand
    yields = table.curve.yields(LANES_MAX)
    for devices in range(_least(problem, yields[lanes_max]), REPLICAS_MAX + 1):
        for lanes in range(1, lanes_max + 1):
            fit = [
                choice
                for choice in problem.whole.choices
                if lanes * choice.memory_bytes <= table.device.memory_bytes
            ]
            expected_s, batch = _sojourn(problem, fit, devices, yields[: lanes + 1])
            if expected_s <= demand.slo_s:
                plan = whole_plan(problem, devices * lanes, batch)
                placement = place_whole(plan, lanes)
                yield Placed(plan=plan, placement=placement, expected_s=expected_s)


def _sojourn(
    problem: Problem, choices: Sequence[Choice], devices: int, yields: Sequence[float]
) -> tuple[float, int]:
    """The least mean seconds of an iteration that shares devices with others, and its batch."""
    return min(
        (
            (
                shared_sojourn_s(
                    problem.demand.rate_per_s / choice.batch,
                    choice.service_s,
                    devices,
                    yields,
                    problem.variation,
                ),
                choice.batch,
            )
            for choice in choices
        ),
        default=(math.inf, 0),
    )


def operators(
    problem: Problem, planner: Callable[[Problem], Plan], fewest: Placed
) -> Iterator[Placed]:
    """Operators on no more devices than `fewest` has, planned for the time that sharing leaves
    them. Where they need as many, a plan counts if it takes less memory; else `fewest` itself does:
    a whole model is a plan of operators, too.
    """
    table, demand = problem.table, problem.demand
    yields = table.curve.yields(LANES_MAX)
    for devices in range(_least(problem, yields[LANES[-1]]), fewest.devices + 1):
        for margin, lanes in product(MARGINS, LANES):
            expected_s, _ = _sojourn(problem, problem.whole.choices, devices, yields[: lanes + 1])
            if expected_s > demand.slo_s:
                continue
            slower = problem.with_stretch(lanes / yields[lanes])
            least_s = slower.least_s
            tight_s = least_s + (margin or 1.0) * (demand.slo_s - least_s)
            if tight_s <= 0:
                continue
            slower = replace(slower, demand=replace(demand, slo_s=tight_s))
            try:
                plan = _spread(problem, planner(slower), devices, every=not margin)
                placement = place_conserving(
                    pieces_of(problem, plan),
                    yields[lanes],
                    table.device.memory_bytes,
                    devices=devices,
                )
            except InvalidInput:
                continue
            if placement is None:
                continue
            if devices < fewest.devices or problem.memory_bytes(plan) < problem.memory_bytes(
                fewest.plan
            ):
                expected_s += _between(problem, plan)
                yield Placed(plan=plan, placement=placement, expected_s=expected_s, lanes=lanes)
    yield fewest


def _between(problem: Problem, plan: Plan) -> float:
    """Seconds of waits for replicas and of transfers, beside what shared devices take."""
    alone = replace(problem, conserving=True)
    services = (alone.station(of.roles).choice(of.batch).service_s for of in plan.stations)
    return alone.expected_s(plan.stations) - sum(services)


def _spread(problem: Problem, plan: Plan, devices: int, *, every: bool) -> Plan:
    """The plan with a replica on every device of what has no weights to speak of: it costs nothing,
    and nobody waits for it elsewhere. With `every`, of all operators.
    """
    free = {
        each.role
        for each in problem.table.operators
        if every or each.weights_bytes < WEIGHTLESS * problem.table.weights_bytes
    }
    return replace(
        plan,
        stations=tuple(
            replace(each, replicas=max(each.replicas, devices)) if free >= {*each.roles} else each
            for each in plan.stations
        ),
    )


def _least(problem: Problem, most: float) -> int:
    """Fewer devices than that, at this yield, cannot do the work. Raises InvalidInput where no SLO
    of the demand's is feasible.
    """
    least_s = min(choice.service_s for choice in problem.whole.choices)
    if least_s > problem.demand.slo_s:
        raise InvalidInput(
            f"an iteration takes {least_s * 1e3:.4g} ms unloaded, the SLO is "
            f"{problem.demand.slo_s * 1e3:.4g} ms",
            hint="raise the SLO, or divide the model over more devices",
        )
    return math.floor(problem.demand.rate_per_s * problem.work_s / most) + 1
