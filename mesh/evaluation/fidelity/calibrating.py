"""From what was observed of a node to the costs of a virtual one.

The profile says how iterations compare with each other; here is what it cannot know: how much
longer they take in service than when they were measured alone, what a node adds to each, and how
long loads and resizes take. No latency that a client saw goes into it, but for the delay between a
client and the node, which is measured as such. Before: `observing`. After: `planning`.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil, inf
from statistics import fmean, median

from mesh.compute.load_times import slowdowns
from mesh.compute.times import Times
from mesh.core.node.state import LOAD_SLOWDOWN
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import RequestId
from mesh.evaluation.fidelity.observing import Iteration, Observed, Spent
from mesh.sim.costs import Jitter, NodeCosts, Pace

WINDOW_S = 0.5
"""The pace is averaged over windows of this length."""
WINDOW_FILLED_S = 0.05
"""Computing time without which a window of the pace says nothing."""
STEPS_MIN = 50
"""Undisturbed iterations without which nothing can be said of a node."""


def calibrate(observed: Observed, times: Times, *, from_s: float, until_s: float) -> NodeCosts:
    """Costs of iterations by the undisturbed steps that began in that span, at an even pace; of
    loads, resizes and unloads by all that ended before its end.

    Raises InvalidInput when there were too few steps.
    """
    steps = [s for s in observed.steps if s.alone and from_s <= s.began_s < until_s]
    decodes = [s for s in steps if not s.shape.prefill_tokens]
    prefills = [s for s in steps if s.shape.prefill_tokens]
    if min(len(decodes), STEPS_MIN * len(prefills)) < STEPS_MIN:
        raise InvalidInput(
            f"{len(decodes)} decodes and {len(prefills)} iterations with prompts were undisturbed "
            "while the node was calibrated: too few",
            hint="calibrate for longer",
        )
    known, factor = NodeCosts(), _engine_ratio(decodes, times)
    alone_s, stretch = _loads(observed, until_s)
    costs = NodeCosts(
        factor=factor,
        prefill_factor=_engine_ratio(prefills, times) / factor,
        overhead_s=fmean(max(s.took_s - s.engine_s, 0.0) for s in steps),
        load_bytes_per_s=inf,
        resize_bytes_per_s=inf,
        load_s=alone_s,
        load_stretch=stretch,
        resize_s=_mean_s(observed.resizes, until_s, known.resize_s),
        unload_s=_mean_s(observed.unloads, until_s, known.unload_s),
    )
    beside = [s for s in observed.steps if s.beside_load and s.began_s < until_s]
    primings = [p for p in observed.primings if p.alone and p.began_s < until_s]
    extra_s = fmean(p.took_s - modelled_s(p, times, costs) for p in primings) if primings else 0.0
    return replace(
        costs,
        load_slowdown=_ratio(beside, times, costs) if beside else LOAD_SLOWDOWN,
        priming_s=max(extra_s, 0.0),
    )


def pace(
    observed: Observed, times: Times, costs: NodeCosts, *, from_s: float, until_s: float
) -> Pace:
    """By how much the steps of each window took longer than these costs say. A window with too few
    of them has the mean of all.
    """
    took_s: dict[int, float] = defaultdict(float)
    meant_s: dict[int, float] = defaultdict(float)
    for step in observed.steps:
        if (step.alone or step.beside_load) and from_s <= step.began_s < until_s:
            window = int((step.began_s - from_s) / WINDOW_S)
            slower = costs.load_slowdown if step.beside_load else 1.0
            took_s[window] += step.took_s
            meant_s[window] += modelled_s(step, times, costs) * slower
    mean = sum(took_s.values()) / sum(meant_s.values()) if meant_s else 1.0
    factors = (
        took_s[n] / meant_s[n] if meant_s[n] >= WINDOW_FILLED_S else mean
        for n in range(max(ceil((until_s - from_s) / WINDOW_S), 1))
    )
    return Pace(window_s=WINDOW_S, factors=tuple(factors))


def jitter(
    observed: Observed, times: Times, costs: NodeCosts, even: Pace, *, from_s: float, until_s: float
) -> Jitter:
    """What the undisturbed steps took more than these costs say at this pace, which begins at
    `from_s`; less its mean.
    """
    left_s: dict[bool, list[float]] = {False: [], True: []}
    for step in observed.steps:
        if step.alone and from_s <= step.began_s < until_s:
            meant_s = modelled_s(step, times, costs) * even.at(step.began_s - from_s)
            left_s[step.shape.prefill_tokens > 0].append(step.took_s - meant_s)
    return Jitter(decode_s=_centred(left_s[False]), prefill_s=_centred(left_s[True]))


def delay_s(
    observed: Observed,
    sent_s: Mapping[RequestId, float],
    came_s: Mapping[RequestId, Sequence[float]],
) -> float:
    """How long a request that is placed at once takes from its client to its node, and a token
    back: the sum of both means. `sent_s` and `came_s` say when each request was sent, and when its
    tokens came.
    """
    there = [at_s - sent_s[p] for p, at_s in observed.submitted_s.items() if p in sent_s]
    back = [
        seen_s - at_s
        for request_id, reported_s in observed.tokens_s.items()
        for at_s, seen_s in zip(reported_s, came_s.get(request_id, ()), strict=False)
    ]
    if not there or not back:
        raise InvalidInput("no request reached the node", hint="the logs of the cell say why")
    return max(median(there), 0.0) + max(fmean(back), 0.0)


def modelled_s(iteration: Iteration, times: Times, costs: NodeCosts) -> float:
    """What a virtual node takes for it, at an even pace and with no load beside it."""
    seconds = times.iteration_s(iteration.shape) * costs.factor
    if iteration.shape.prefill_tokens:
        seconds *= costs.prefill_factor
    return seconds + costs.overhead_s


def _centred(left_s: Sequence[float]) -> tuple[float, ...]:
    mean_s = fmean(left_s) if left_s else 0.0
    return tuple(each_s - mean_s for each_s in left_s)


def _ratio(steps: Sequence[Iteration], times: Times, costs: NodeCosts) -> float:
    return sum(s.took_s for s in steps) / sum(modelled_s(s, times, costs) for s in steps)


def _engine_ratio(steps: Sequence[Iteration], times: Times) -> float:
    return sum(s.engine_s for s in steps) / sum(times.iteration_s(s.shape) for s in steps)


def _loads(observed: Observed, until_s: float) -> tuple[float, float]:
    """How long a load takes alone, in the mean, and by how much longer beside which the node
    computes all along; of all of them alike where they do not tell that apart.
    """
    loads = [load for load in observed.loads if load.began_s < until_s and load.took_s > 0.0]
    if not loads:
        return NodeCosts().load_s, 1.0
    turns = [*observed.steps, *observed.primings]
    shares = [sum(_overlap_s(turn, load) for turn in turns) / load.took_s for load in loads]
    took_s = [load.took_s for load in loads]
    found = list(slowdowns(zip(took_s, shares, strict=True)))
    slowdown = median(found) if found else 0.0
    alone_s = fmean(s / (1.0 + slowdown * b) for s, b in zip(took_s, shares, strict=True))
    return alone_s, 1.0 + slowdown


def _overlap_s(turn: Iteration, load: Spent) -> float:
    began_s, ended_s = turn.began_s, turn.began_s + turn.took_s
    return max(min(ended_s, load.began_s + load.took_s) - max(began_s, load.began_s), 0.0)


def _mean_s(spent: Iterable[Spent], until_s: float, default_s: float) -> float:
    took = [s.took_s for s in spent if s.began_s < until_s]
    return fmean(took) if took else default_s
