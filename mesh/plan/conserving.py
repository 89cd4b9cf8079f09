"""Plans that count device time once: what shares a device shares its time by the measured curve.

Each function yields plans with their placements, those with the fewest devices first, whose mean
keeps the SLO by the formulas. Means are not enough for an SLO that 99 of 100 requests are to keep,
so whoever asks executes each until one keeps it. Before: `mesh.plan.planners`,
`mesh.plan.placement`. After: `mesh.evaluation.operators`, and `mesh.plan.live`, whose tokens come
in batches that form in the same way.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from statistics import fmean

from mesh.domain.errors import InvalidInput
from mesh.domain.operators import OUTSIDE_LAYERS, Phase
from mesh.domain.values import dataclass
from mesh.plan.placement import Placement, devices_of, pieces_of, place_conserving, place_whole
from mesh.plan.problem import LANES_MAX, REPLICAS_MAX, Plan, Problem, Staffed, held_bytes
from mesh.plan.queueing import batched_sojourn_s, erlang_c, present, shared_s, wait_s, worked_s

MARGINS = (1.0, 0.4, 0.1, 0.0)
"""The parts of the time that an SLO leaves for waiting which a plan of operators is made for, tried
in this order: its queues are no M/G/R, and an SLO is kept by few that the mean keeps. With 0 each
operator is on every device.
"""
WEIGHTLESS = 1e-3
"""The share of a model's weights below which an operator is free to be everywhere."""
LANES = (1, 2)
"""How many operators of a plan are at work on a device at a time."""


Yields = Callable[[float], Sequence[float]]
"""What a device yields with iterations of this batch, by the number of them that share it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A plan on its devices. `expected_s` is the mean of an iteration by the formulas."""

    plan: Plan
    placement: Placement
    expected_s: float
    lanes: int | None = None
    """How many servers a device has at work at a time; `None` stands for all that have work."""

    @property
    def devices(self) -> int:
        """The number of groups in use."""
        return devices_of(self.placement)

    def memory_bytes(self, problem: Problem) -> int:
        """The bytes that all devices hold."""
        there: dict[int, Counter[int]] = {}
        for station, devices in enumerate(self.placement):
            for device in devices:
                there.setdefault(device, Counter())[station] += 1
        choices = [each.choice for each in self.plan]
        held = (held_bytes(choices, each, self.lanes) for each in there.values())
        return problem.table.devices * sum(held)

    def used(self, problem: Problem) -> float:
        """The load of full batches over what the devices yield."""
        batch = min(each.batch for each in self.plan)
        together = max(max(Counter(devices).values()) for devices in self.placement)
        lanes = self.lanes or (together if len(self.placement) == 1 else LANES_MAX)
        load = sum(piece.load for piece in pieces_of(problem, self.plan))
        return load / (self.devices * problem.yields(batch)[min(lanes, LANES_MAX)])


def models(problem: Problem, lanes_max: int) -> Iterator[Placed]:
    """Plans of whole models, up to `lanes_max` of which share a device and its copy of the weights
    where the memory allows; each with the smallest and the largest batch that the mean allows.
    """
    memory, slo_s = problem.table.device.memory_bytes, problem.slo_s
    problem.least_of(problem.whole)  # checks the rate
    for devices in range(_least(problem, lanes_max), REPLICAS_MAX + 1):
        for lanes in range(1, lanes_max + 1):
            fit = [
                (choice, expected_s)
                for choice in problem.whole
                if held_bytes((choice,), {0: lanes}, lanes) <= memory
                and (expected_s := sojourn_s(problem, devices, lanes, choice.batch)[0]) <= slo_s
            ]
            for choice, expected_s in dict.fromkeys((*fit[:1], *fit[-1:])):
                plan = (Staffed(replicas=devices * lanes, choice=choice),)
                placement = place_whole(plan, lanes)
                yield Placed(plan=plan, placement=placement, expected_s=expected_s)


def sojourn_s(problem: Problem, devices: int, lanes: int, batch_max: int) -> tuple[float, float]:
    """The mean seconds of an iteration on devices with so many at a time, and how large its batch
    is; infinite where the devices cannot do the work.

    A server that is done takes what has come meanwhile, as one batch. Prompts that share a device
    wait as much longer by it as they would on servers as slow as when all share.
    """
    rate, alone_s = problem.rate_per_s, problem.whole[0].service_s
    seconds = {each.batch: each.service_s for each in problem.whole}
    batch = _formed(rate, seconds, problem.yields, devices, lanes)
    if batch > batch_max:
        return math.inf, batch
    if problem.table.phase is Phase.DECODE:
        return token_s(rate, seconds, problem.yields, devices, lanes, batch_max), batch
    variation, yields = problem.variation, problem.yields(batch)[: lanes + 1]
    served_s, waited_s = shared_s(rate, alone_s, devices, yields, variation)
    if batch_max == 1:
        return served_s + waited_s, batch
    slower, servers = lanes / yields[lanes], devices * lanes
    first_s = slower * alone_s
    further_s = (slower * service_s(seconds, batch_max) - first_s) / (batch_max - 1)
    batched_s = batched_sojourn_s(rate, first_s, further_s, servers, batch_max, variation)
    if lanes == 1 or math.isinf(served_s):
        return batched_s, batch
    unbatched_s = wait_s(rate, first_s, servers, variation)
    longer = (batched_s - first_s) / unbatched_s if unbatched_s else 1.0
    return served_s + longer * waited_s, batch


def token_s(
    rate: float,
    seconds: Mapping[int, float],
    yields_of: Yields,
    devices: int,
    lanes: int,
    batch_max: int,
) -> float:
    """Mean seconds of a token, at `rate` tokens a second. A sequence is in each batch of its
    server, and sequences are spread evenly, so that their number is a chain of births and deaths,
    however long answers are. Infinite where the devices cannot do the work.
    """
    yields, sizes = {batch: yields_of(batch) for batch in seconds}, list(seconds)
    alone_s, single = seconds[sizes[0]], yields[sizes[0]][: lanes + 1]
    servers = devices * lanes

    def done(number: int) -> float:
        batch = max(number / servers, 1.0)
        if batch == 1.0:
            return worked_s(number, devices, single) / alone_s
        like = sizes[bisect_right(sizes, batch) - 1]
        return devices * yields[like][lanes] * batch / service_s(seconds, batch)

    there, used = present(rate, done, servers * batch_max)
    if used >= 1:
        return math.inf
    beyond, most = there[-1] * used / (1 - used), len(there) - 1
    inside = sum(number * share for number, share in enumerate(there))
    return (inside + beyond * (most + 1 / (1 - used))) / rate


def _formed(
    rate: float, seconds: Mapping[int, float], yields_of: Yields, devices: int, lanes: int
) -> float:
    """The smallest batch with which servers keep up; infinite where none does."""
    most = [devices * yields_of(batch)[lanes] for batch in seconds]
    least, least_s = next(iter(seconds.items()))
    if rate * least_s < most[0] * least:
        return least
    for ((low, low_s), (high, high_s)), done in zip(pairwise(seconds.items()), most, strict=False):
        slope = (high_s - low_s) / (high - low)
        if done > rate * slope:
            batch = rate * (low_s - slope * low) / (done - rate * slope)
            if batch <= high:
                return max(batch, low)
    return math.inf


def service_s(seconds: Mapping[int, float], batch: float) -> float:
    """Seconds of an iteration, between the batches that they are known of, which ascend."""
    for (low, low_s), (high, high_s) in pairwise(seconds.items()):
        if batch <= high:
            return low_s + (batch - low) / (high - low) * (high_s - low_s)
    return seconds[max(seconds)]


def operators(
    problem: Problem, planner: Callable[[Problem], Plan], fewest: Placed
) -> Iterator[Placed]:
    """Plans of operators on no more devices than `fewest` has, for the time that sharing leaves
    them. Where they need as many, a plan counts if it takes less memory; else `fewest` itself does:
    a whole model is a plan of operators, too.
    """
    slo_s, memory = problem.slo_s, problem.table.device.memory_bytes
    fewest_bytes, batch_max = fewest.memory_bytes(problem), problem.whole[-1].batch
    numbers = range(_least(problem, LANES[-1]), fewest.devices + 1)
    for devices, margin, lanes in product(numbers, MARGINS, LANES):
        expected_s, batch = sojourn_s(problem, devices, lanes, batch_max)
        if expected_s > slo_s:
            continue
        slower = problem.but(conserving=True, stretched=lanes / problem.yields(batch)[lanes])
        least_s = slower.unloaded_s(slower.stations)
        tight_s = least_s + (margin or 1.0) * (slo_s - least_s)
        if tight_s <= least_s:
            continue
        slower = slower.but(slo_s=tight_s)
        try:
            at_once = batch * lanes * devices if batch > 1 else 0.0
            plan = _spread(problem, planner(slower), devices, at_once, every=not margin)
            placement = place_conserving(
                pieces_of(problem, plan),
                problem.yields(min(each.batch for each in plan))[lanes],
                memory - lanes * max(each.choice.transient_bytes for each in plan),
                devices,
            )
        except InvalidInput:
            continue
        if placement is None:
            continue
        expected_s = expected(slower, plan, placement, lanes)
        placed = Placed(plan=plan, placement=placement, expected_s=expected_s, lanes=lanes)
        fewer = devices < fewest.devices or placed.memory_bytes(problem) < fewest_bytes
        if expected_s <= slo_s and fewer:
            yield placed
    yield fewest


def expected(slower: Problem, plan: Plan, placement: Placement, lanes: int) -> float:
    """Mean seconds of an iteration of operators: that of a whole one on as many devices, the waits
    for stations that are not on all of them, and for lanes there, and the transfers from devices
    that lack the next. Those stations are slowed for as much of the time as others are at work on
    their devices, over which what is on all of them spreads.
    """
    devices = devices_of(placement)
    total_s, _ = sojourn_s(slower, devices, lanes, min(each.batch for each in plan))
    loads = [piece.load for piece in pieces_of(slower, plan)]
    even, at = sum(loads) / devices, [device for station in placement for device in station]
    some = [each.replicas < devices for each in plan for _ in range(each.replicas)]
    held: dict[int, float] = dict.fromkeys(at, 0.0)
    for load, device, pinned in zip(loads, at, some, strict=True):
        held[device] += load if pinned else 0.0
    for number, each in enumerate(plan):
        choice = each.choice
        if each.replicas < devices:
            own = slower.rate_per_s / choice.batch * choice.service_s / each.replicas
            others = fmean(max(held[device], even) - own for device in placement[number])
            beside = min(max(others, 0.0) * slower.stretched, 1.0)
            partly = slower.but(stretched=1 + beside * (slower.stretched - 1))
            waited_s = partly.sojourn_s(each) - choice.transfer_s
            total_s += waited_s - choice.service_s * partly.stretched
        following = placement[(number + 1) % len(placement)]
        away = sum(device not in following for device in placement[number])
        total_s += choice.transfer_s * away / each.replicas
    return total_s + _lanes_s(slower, plan, placement, lanes)


def _lanes_s(slower: Problem, plan: Plan, placement: Placement, lanes: int) -> float:
    """Mean seconds in which requests wait for a lane of the few devices that have their next
    operator: those that come from elsewhere, as if what is on all devices were computed where the
    data is. Other operators hold all lanes there with the probability of Erlang C. Each of them has
    its mean residual life E[S²] / 2E[S] left, as in the formula of Pollaczek and Khinchine, and the
    first of `n` ends after 2 / (n + 1) of that, as if they were evenly spread. Embedding and head
    hold lanes for a short time only: what they have left is not counted.
    """
    devices, rate = devices_of(placement), slower.rate_per_s
    layers = [
        (each.choice.service_s * slower.stretched, rate / each.batch, {*there})
        for each, there in zip(plan, placement, strict=True)
        if each.choice.roles[0] not in OUTSIDE_LAYERS
    ]
    held = sum(piece.load for piece in pieces_of(slower, plan)) * slower.stretched / devices
    left_s = sum(per_s * taken_s**2 for taken_s, per_s, _ in layers) / 2
    left_s *= (1 + slower.variation) / sum(per_s * taken_s for taken_s, per_s, _ in layers)
    some = [each for each in layers if len(each[-1]) < devices]
    total_s = 0.0
    for (*_, before), (taken_s, per_s, there) in zip(some[-1:] + some[:-1], some, strict=True):
        servers, come = len(there) * lanes, 1 - len(there & before) / len(before)
        others = max(len(there) * held - per_s * taken_s, 0.0)
        total_s += come * erlang_c(servers, others) * left_s * 2 / (servers + 1)
    return total_s


def _spread(problem: Problem, plan: Plan, devices: int, at_once: float, *, every: bool) -> Plan:
    """The plan with a replica on every device of what has no weights to speak of: it costs nothing,
    and nobody waits for it elsewhere. With `every`, of all operators. No station takes less at a
    time than what is `at_once` under way for each of its replicas: that comes together.
    """
    free = {
        each.role
        for each in problem.table.operators
        if every or each.weights_bytes < WEIGHTLESS * problem.table.weights_bytes
    }
    stations = []
    for each, station in zip(plan, problem.stations, strict=True):
        replicas = max(each.replicas, devices) if free >= {*each.choice.roles} else each.replicas
        wanted = max(each.batch, at_once / replicas)
        enough = (choice for choice in station if choice.batch >= wanted)
        stations.append(Staffed(replicas=replicas, choice=next(enough, station[-1])))
    return tuple(stations)


def _least(problem: Problem, lanes: int) -> int:
    """The number of devices below which they cannot do the work. Raises InvalidInput where the SLO
    is below an iteration that is alone.
    """
    least_s = min(choice.service_s for choice in problem.whole)
    if least_s > problem.slo_s:
        raise InvalidInput(
            f"an iteration takes {least_s * 1e3:.4g} ms unloaded, the SLO is "
            f"{problem.slo_s * 1e3:.4g} ms",
            hint="raise the SLO, or divide the model over more devices",
        )
    most = max(
        problem.yields(each.batch)[lanes] * each.batch / each.service_s for each in problem.whole
    )
    return math.floor(problem.rate_per_s / most) + 1
