"""Placement: which replica of a plan is on which group of devices.

`place_greedy` is the paper's algorithm 2, `place_whole` one device a replica. `place_conserving`
packs by memory and by the device time that the replicas' work takes. After: `mesh.sim.operators`
executes it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from operator import add

from mesh.domain.errors import InvalidInput
from mesh.domain.values import dataclass
from mesh.plan.problem import LANES_MAX, Plan, Problem, held_bytes

Weigh = Callable[[float, float], float]
"""Orders pieces, or devices, by the shares of a device's load and memory that they take."""
SIZES: tuple[Weigh, ...] = (max, lambda load, _: load, lambda _, memory: memory, add)
FULLEST: tuple[Weigh, ...] = (lambda *both: -max(both), lambda *both: -sum(both))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A replica to be placed."""

    station: int
    """The number of its station in the plan."""
    load: float
    """Seconds of the whole device that its work takes in a second."""
    memory_bytes: int


Placement = tuple[tuple[int, ...], ...]
"""For each station the device of each of its replicas. Devices, that is groups, count from 0."""


def devices_of(placement: Placement) -> int:
    """The number of devices that a placement uses."""
    return len({device for devices in placement for device in devices})


def pieces_of(problem: Problem, plan: Plan) -> list[Piece]:
    """The replicas of a plan, in the order of its stations, without their activations: the lanes
    of a device have those.
    """
    found = []
    for number, each in enumerate(plan):
        choice = each.choice
        load = problem.rate_per_s / choice.batch * choice.service_s / each.replicas
        kept = choice.weights_bytes + choice.kv_bytes
        piece = Piece(station=number, load=load, memory_bytes=kept)
        found += [piece] * each.replicas
    return found


def place_whole(plan: Plan, lanes: int = 1) -> Placement:
    """Place replicas of a whole model, `lanes` on each device."""
    (whole,) = plan
    return (tuple(number // lanes for number in range(whole.replicas)),)


def place_greedy(problem: Problem, plan: Plan) -> Placement:
    """Algorithm 2: min r whole models, each on a device of its own, then the other replicas, the
    longest first, on the device with the best slack among those with the memory for it on which the
    iteration still keeps the SLO.

    The interference I(d, v) is read off the curve of shares: whoever joins gets one share beside
    those that are at work on d in the mean. It lengthens who joins, as printed, not who is there.
    A plan of whole models has each replica beyond the first as such an extra. Raises InvalidInput
    where a whole model passes the memory.
    """
    memory = problem.table.device.memory_bytes
    bases = 1 if len(plan) == 1 else min(each.replicas for each in plan)
    choices = [each.choice for each in plan]
    used = [problem.load(each.choice) / each.replicas for each in plan]
    placed: list[list[int]] = [list(range(bases)) for _ in plan]
    held = [Counter(range(len(choices))) for _ in range(bases)]
    if (taken := held_bytes(choices, held[0], None)) > memory:
        raise _too_large(taken, memory)
    busy = [sum(used)] * bases
    times = [[choice.service_s] * bases for choice in choices]
    waits = [problem.sojourn_s(each) - each.choice.service_s * problem.stretched for each in plan]
    extras = [number for number, each in enumerate(plan) for _ in range(each.replicas - bases)]
    for number in sorted(extras, key=lambda n: (-choices[n].service_s, n)):
        choice = choices[number]
        best: tuple[float, int, float] | None = None
        rest_s = sum(max(of) + waits[other] for other, of in enumerate(times) if other != number)
        for device in range(len(held)):
            slowed_s = choice.service_s * problem.curve(choice.batch).ratio(1 / (1 + busy[device]))
            taken = held_bytes(choices, held[device] + Counter((number,)), None)
            if taken > memory:
                continue
            if rest_s + max(*times[number], slowed_s) + waits[number] > problem.slo_s:
                continue
            free = 1 - taken / memory
            idle = 1 - (busy[device] + used[number]) / LANES_MAX
            slack = (free + idle, -device, slowed_s)
            best = slack if best is None else max(best, slack)
        if best is None:
            best = 0.0, -len(held), choice.service_s
            held.append(Counter())
            busy.append(0.0)
        device = -best[1]
        placed[number].append(device)
        held[device][number] += 1
        busy[device] += used[number]
        times[number].append(best[2])
    return tuple(tuple(of) for of in placed)


def place_conserving(
    pieces: Sequence[Piece], load: float, memory_bytes: int, devices: int
) -> Placement | None:
    """On `devices`, of which each takes a load of `load` and so much memory: spread evenly, or else
    each piece on the fullest device that has room, in several orders. `None` where that finds none.

    Raises InvalidInput where one piece is too large for a device.
    """
    for each in pieces:
        if each.memory_bytes > memory_bytes:
            raise _too_large(each.memory_bytes, memory_bytes)
        if each.load > load:
            raise InvalidInput(
                f"one replica has a load of {each.load:.3f}, a device takes {load:.3f}",
                hint="give the station more replicas",
            )

    def put(size: Weigh, weigh: Weigh, *, apart: bool = False) -> list[int] | None:
        """The device of each piece, the largest by `size` first: of those with room the least by
        `weigh`; with `apart` one without another replica of its station before that.
        """
        loads, held, found = [0.0] * devices, [0] * devices, [-1] * len(pieces)
        there: Counter[tuple[int, int]] = Counter()
        sizes = [size(each.load / load, each.memory_bytes / memory_bytes) for each in pieces]
        for number in sorted(range(len(pieces)), key=lambda n: (-sizes[n], n)):
            piece = pieces[number]
            best: tuple[int, float, int] | None = None
            for d in range(devices):
                fits = loads[d] + piece.load <= load * (1 + 1e-9)
                if fits and held[d] + piece.memory_bytes <= memory_bytes:
                    beside = apart and there[piece.station, d]
                    key = beside, weigh(loads[d] / load, held[d] / memory_bytes), d
                    best = key if best is None else min(best, key)
            if best is None:
                return None
            found[number] = device = best[-1]
            there[piece.station, device] += 1
            loads[device] += piece.load
            held[device] += piece.memory_bytes
        return found

    found = put(max, lambda load, _: load, apart=True)
    for size, fullest in product(SIZES, FULLEST):
        found = put(size, fullest) if found is None else found
    if found is None:
        return None
    placed: list[list[int]] = [[] for _ in range(pieces[-1].station + 1)]
    for piece, device in zip(pieces, found, strict=True):
        placed[piece.station].append(device)
    return tuple(map(tuple, placed))


def _too_large(memory_bytes: int, device_bytes: int) -> InvalidInput:
    return InvalidInput(
        f"one replica takes {memory_bytes / 1e9:.1f} GB; a device has {device_bytes / 1e9:.1f} GB",
        hint="divide the model over more devices, or plan smaller batches",
    )
