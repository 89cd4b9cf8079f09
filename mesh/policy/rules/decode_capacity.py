"""What becomes of running requests when a node computes nothing but their decodes.

Decodes follow each other in the order of their deadlines. None has to wait for anything but its
turn, since a run queue may compute ahead of its deadlines, so that it comes down to sums: by any
deadline, each run queue must have decoded once, and once more for every TPOT SLO since its first
deadline. The turn rule asks how much time that leaves over, shadow validation how far it gets.

Parts of decodes count here as well, so that the work due grows evenly from one run queue's first
deadline to the next's. That is at most one decode of each run queue too much.
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf

Job = tuple[float, float, float]
"""The decodes of one run queue: its first deadline, the seconds of a decode, and the seconds from
each of its deadlines to the next. Sorts by deadline.
"""


def share_of(jobs: Iterable[Job]) -> float:
    """The share of the time that they take."""
    return sum([decode_s / tpot_s for _, decode_s, tpot_s in jobs])


def spare_s(jobs: list[Job], now_s: float) -> float:
    """The least time that any deadline leaves over. Sorts the jobs.

    It is least at some run queue's first deadline, as long as the decodes' shares of their TPOT
    SLOs sum to 1 at most: between those, no more work becomes due than time passes.
    """
    jobs.sort()
    spare = inf
    before_s, work_s, growth = now_s, 0.0, 0.0
    for due_s, decode_s, tpot_s in jobs:
        work_s += growth * (due_s - before_s) + decode_s
        growth += decode_s / tpot_s
        before_s = due_s
        left_s = due_s - now_s - work_s
        if left_s < spare:
            spare = left_s
    return spare


def reached_s(jobs: list[Job], seconds: float) -> float:
    """The deadline before which all that is due can be decoded in so many seconds. Sorts the jobs,
    of which there must be one.
    """
    jobs.sort()
    before_s, work_s, growth = jobs[0][0], 0.0, 0.0
    for due_s, decode_s, tpot_s in jobs:
        until_s = work_s + growth * (due_s - before_s)
        if until_s > seconds:
            break
        if until_s + decode_s > seconds:
            return due_s
        work_s = until_s + decode_s
        growth += decode_s / tpot_s
        before_s = due_s
    return before_s + (seconds - work_s) / growth


COSTED_APART_MAX = 3
"""Slower classes whose costs are found apart. Those beyond cost as much as the rest together."""


def class_costs(
    classes: Sequence[tuple[int, int]],
    decode_s: Callable[[int, float], float],
    lookahead_tokens: int,
) -> list[float]:
    """Seconds of a decode of an instance's quickest class, then the most that each slower one adds
    to a decode in which the quickest takes part, whichever others do. Classes are given by requests
    and context tokens, the quickest first.

    A decode of any of them, of which requests have ended since, takes no longer than the sum of
    their costs, as a smaller batch takes no longer.
    """
    first, *slower = classes
    last = COSTED_APART_MAX - 1
    if len(slower) > COSTED_APART_MAX:
        batches, tokens = zip(*slower[last:], strict=True)
        slower[last:] = [(sum(batches), sum(tokens))]
    sums = [first]
    for batch, tokens_of in slower:
        sums += [(requests + batch, tokens + tokens_of) for requests, tokens in sums]
    seconds = [
        decode_s(requests, tokens / requests + lookahead_tokens) for requests, tokens in sums
    ]
    costs = seconds[:1]
    for place in range(len(slower)):
        own = 1 << place  # `sums` has each class in those places alone that have its bit
        without = [others for others in range(len(sums)) if not others & own]
        costs.append(max(0.0, *[seconds[others | own] - seconds[others] for others in without]))
    return costs + costs[-1:] * (len(classes) - len(costs))


def class_share(
    batches: Iterable[tuple[float, int, int]],
    decode_s: Callable[[int, float], float],
    lookahead_tokens: int,
) -> float:
    """The share of the time that an instance's decodes take where each class decodes once in its
    pace: of paces, requests and context tokens.
    """
    classes: dict[float, tuple[int, int]] = {}
    for pace_s, requests, tokens in batches:
        before = classes.get(pace_s, (0, 0))
        classes[pace_s] = before[0] + requests, before[1] + tokens
    paces_s = sorted([pace_s for pace_s, (requests, _) in classes.items() if requests])
    if not paces_s:
        return 0.0
    costs = class_costs([classes[pace_s] for pace_s in paces_s], decode_s, lookahead_tokens)
    return sum(seconds / pace_s for seconds, pace_s in zip(costs, paces_s, strict=True))


def lead_s(pace_s: float, slower_s: float) -> float:
    """How much earlier than due a class of a slower pace has to decode: it joins the last decode of
    the quickest class before its own deadline, and its tokens may take up to a quarter of the
    difference longer to their clients (`mesh.request.shadow`, `decode_margin_s`).
    """
    return pace_s + (slower_s - pace_s) / 4
