"""What is to be planned, what a plan is, and how long an iteration takes by it.

A problem is a table of operators, a demand (the requests that come, and their SLO) and a way of
counting. A plan says for each station (an operator, or a whole model) how many replicas it has and
how large its batches are. Before: `mesh.domain.operators`. After: `mesh.plan.planners`, which look
for plans, `mesh.plan.placement`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from statistics import fmean
from typing import Any

from mesh.domain.errors import InvalidInput
from mesh.domain.operators import Operator, OperatorTable, Phase, Role, ShareCurve
from mesh.domain.values import dataclass
from mesh.plan.queueing import wait_s

REPLICAS_MAX = 1024
"""The most replicas of a station: a rate that needs more is above all capacity."""
SAMPLE = 16
"""How many quantiles stand for a distribution of lengths."""
LANES_MAX = 4
"""How many iterations share a device at most: the curves know no shares below a quarter."""
BATCHES = {Phase.PREFILL: (1, 2, 4, 8), Phase.DECODE: tuple(2**n for n in range(9))}
"""Sizes of batches: prompts fill a device by few, tokens by many."""


def check_demand(rate_per_s: float, lengths: Sequence[int], slo_s: float) -> None:
    """Raise InvalidInput for requests that nothing can be planned for."""
    if not (math.isfinite(rate_per_s) and rate_per_s > 0):
        raise InvalidInput(f"the rate is {rate_per_s:g} a second; it must be above 0")
    if not (math.isfinite(slo_s) and slo_s > 0):
        raise InvalidInput(f"the SLO is {slo_s:g} s; it must be above 0")
    if not lengths or min(lengths) < 1:
        raise InvalidInput(
            "the demand has no lengths, or one below 1 token",
            hint="a trace to plan for must tell how long its prompts and answers are",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What one size of batch takes at a station that has the whole device."""

    roles: tuple[Role, ...]
    """The operators of the station: one, or all of a model's."""
    batch: int
    service_s: float
    """The mean over the lengths."""
    transfer_s: float
    """To the next station, if that is elsewhere."""
    weights_bytes: int
    """These, and the two below, are held by each device of a group."""
    kv_bytes: int
    transient_bytes: int

    @property
    def memory_bytes(self) -> int:
        """What a replica holds that is alone on a device."""
        return self.weights_bytes + self.kv_bytes + self.transient_bytes


Station = tuple[Choice, ...]
"""What replicas are made of: one operator, or all of a model's in one. By batch, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staffed:
    """A station as planned."""

    replicas: int
    choice: Choice

    @property
    def batch(self) -> int:
        return self.choice.batch


Plan = tuple[Staffed, ...]
"""Its stations, in the order of an iteration."""


def sum_r(plan: Plan) -> int:
    """Replicas of operators: those of a whole model count for each of its operators (eq. 8, with
    the group of a replica as its parallelism).
    """
    return sum(len(each.choice.roles) * each.replicas for each in plan)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A table and a demand, counted in the paper's way or, with `conserving`, so that services vary
    as the lengths do and take `stretched` times as long, since others share the device.

    `rate_per_s` counts prompts, or tokens when decoding; `lengths` are equally likely prompts, or
    contexts; an iteration is to be over in `slo_s`. A request takes as long as its batch (equation
    3; line 8 of algorithm 1 divides by the size). Raises InvalidInput for what nothing can be
    planned for.
    """

    table: OperatorTable
    rate_per_s: float
    lengths: tuple[int, ...]
    slo_s: float
    batches: tuple[int, ...] = ()
    """The sizes to choose from; empty for those of the phase."""
    conserving: bool = False
    stretched: float = 1.0

    def __post_init__(self) -> None:
        check_demand(self.rate_per_s, self.lengths, self.slo_s)

    def but(self, **changes: Any) -> "Problem":
        """The problem with another rate, SLO or way of counting: the stations stay as made."""
        made = dataclasses.replace(self, **changes)
        kept = ("stations", "whole", "variation")
        vars(made).update({name: each for name, each in vars(self).items() if name in kept})
        return made

    @cached_property
    def stations(self) -> tuple[Station, ...]:
        """A station for each operator. Raises InvalidInput for one that fits no device."""
        return tuple(self._station((each,)) for each in self.table.operators)

    @cached_property
    def whole(self) -> Station:
        """The whole model as one station. Raises InvalidInput where it fits no device."""
        return self._station(self.table.operators)

    @cached_property
    def variation(self) -> float:
        """The squared coefficient of variation of services."""
        single = [self.table.seconds((length,)) for length in self.lengths]
        return max(fmean([each**2 for each in single]) / fmean(single) ** 2 - 1, 0.0)

    def _station(self, operators: tuple[Operator, ...]) -> Station:
        batches = self.batches or BATCHES[self.table.phase]
        every = [self._choice(operators, batch) for batch in batches]
        memory = self.table.device.memory_bytes
        if not (fit := [each for each in every if each.memory_bytes <= memory]):
            least = min(each.memory_bytes for each in every)
            raise InvalidInput(
                f"{self.table.model}: a replica takes {least / 1e9:.1f} GB of a device, which has "
                f"{memory / 1e9:.1f} GB",
                hint="divide the model over more devices, or plan for shorter prompts",
            )
        return tuple(fit)

    def _choice(self, operators: tuple[Operator, ...], batch: int) -> Choice:
        phase, device, last = self.table.phase, self.table.device, operators[-1]
        drawn = [(length,) * batch for length in self.lengths]
        tokens = round(batch * fmean(self.lengths))
        rows = [each.rows(phase, (tokens // batch,) * batch) for each in operators]
        moved = last.output_bytes_per_row * rows[-1] / device.link_bytes_per_s
        stays = len(operators) > 1 or last.role is Role.HEAD
        return Choice(
            roles=tuple(each.role for each in operators),
            batch=batch,
            service_s=fmean([sum([of.seconds(phase, each) for of in operators]) for each in drawn]),
            transfer_s=0.0 if stays else last.repeats * (moved + device.link_latency_s),
            weights_bytes=sum([each.weights_bytes for each in operators]),
            kv_bytes=sum([each.kv_bytes_per_token * tokens for each in operators]),
            transient_bytes=max(
                number * each.transient_bytes_per_row
                for each, number in zip(operators, rows, strict=True)
            ),
        )

    def curve(self, batch: float) -> ShareCurve:
        """The curve of iterations with such batches."""
        decode = self.table.phase is Phase.DECODE
        return self.table.curve(batch if decode else batch * fmean(self.lengths))

    def yields(self, batch: float) -> tuple[float, ...]:
        """What a device yields, by the number of such iterations that share it."""
        return self.curve(batch).yields(LANES_MAX)

    def unloaded_s(self, stations: Sequence[Station]) -> float:
        """Seconds of an iteration by these stations if nobody ever waits: no SLO below that is
        feasible.
        """
        return sum(
            min(each.service_s * self.stretched + each.transfer_s for each in station)
            for station in stations
        )

    def load(self, choice: Choice) -> float:
        """Seconds of service that come in a second: more replicas than that must be there."""
        return self.rate_per_s / choice.batch * choice.service_s * self.stretched

    def least_replicas(self, choice: Choice) -> int:
        """The fewest replicas with which a station keeps up."""
        return math.floor(self.load(choice) + 1e-12) + 1

    def least_of(self, station: Station) -> int:
        """The replicas that a station needs with the batch that needs the fewest. Raises
        InvalidInput where these are more than a station may have.
        """
        least = min(map(self.least_replicas, station))
        if least > REPLICAS_MAX:
            raise InvalidInput(
                f"{station[0].roles[0]} would need {least} replicas for "
                f"{self.rate_per_s:g} a second; at most {REPLICAS_MAX} are planned",
                hint="plan for a lower rate",
            )
        return least

    def sojourn_s(self, at: Staffed) -> float:
        """Mean seconds at a station, with the transfer from it (a term of eq. 3)."""
        service_s = at.choice.service_s * self.stretched
        rate = self.rate_per_s / at.batch
        # By equation 1 services have no memory, and so a variation of 1.
        variation = self.variation if self.conserving else 1.0
        waited = wait_s(rate, service_s, at.replicas, variation)
        return service_s + waited + at.choice.transfer_s

    def expected_s(self, plan: Plan) -> float:
        """Mean seconds of an iteration by equation 3, the operators being one after the other."""
        return sum(map(self.sojourn_s, plan))

    def energy_j(self, plan: Plan) -> float:
        """Joules of a request by equation 9: α is the idle power over each replica's wait and
        service, β what computing adds. What a batch takes is shared by its requests.
        """
        device, devices = self.table.device, self.table.devices
        total = 0.0
        for each in plan:
            sojourn_s = self.sojourn_s(each) - each.choice.transfer_s
            joules = device.power.joules(each.replicas * sojourn_s, each.choice.service_s)
            total += devices * joules / each.batch
        return total


def held_bytes(choices: Sequence[Choice], there: Mapping[int, int], lanes: int | None) -> int:
    """What so many replicas, by station, hold of a device: weights once, KV cache for each, and
    activations for as many as are at work at a time. Without `lanes` that is as many as a station
    has: each replica is then one of a whole model, whose operators work one after the other.
    """
    at_work = max(there.values()) if lanes is None else min(lanes, sum(there.values()))
    return sum(
        choices[number].weights_bytes + count * choices[number].kv_bytes
        for number, count in there.items()
    ) + at_work * max(choices[number].transient_bytes for number in there)


def slo_of(table: OperatorTable, lengths: Sequence[int], times: float) -> float:
    """An SLO of `times` the seconds that the longest takes unloaded, alone in its batch."""
    return times * table.seconds((max(lengths),))


def sample_of(lengths: Sequence[int]) -> tuple[int, ...]:
    """Quantiles of lengths, at most SAMPLE."""
    ordered, count = sorted(lengths), min(len(lengths), SAMPLE)
    return tuple(ordered[(2 * n + 1) * len(ordered) // (2 * count)] for n in range(count))
