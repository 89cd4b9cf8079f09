"""What becomes of running requests when a node computes nothing but their decodes.

Decodes follow each other in the order of their deadlines. None has to wait for anything but its
turn, since a run queue may compute ahead of its deadlines, so that it comes down to sums: by any
deadline, each run queue must have decoded once, and once more for every TPOT SLO since its first
deadline. The turn rule asks how much time that leaves over, shadow validation how far it gets.

Parts of decodes count here as well, so that the work due grows evenly from one run queue's first
deadline to the next's. That is at most one decode of each run queue too much.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from math import inf

Job = tuple[float, float, float]
"""The decodes of one run queue: its first deadline, the seconds of a decode, and the seconds from
each of its deadlines to the next. Sorts by deadline.
"""


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


Batch = tuple[float, int, int]
"""Requests of an instance that have one pace: the seconds from one of their tokens to the next, how
many they are, and the sum of their contexts.
"""
CLASSES_MAX = 4
"""All decode together where there are more paces, for what they add is found by trying all sets of
them.
"""
LEAD_SHARE = 0.25
"""By so much of its pace a slower class decodes before it has to: its tokens may take longer to
their clients than those of the quickest (`mesh.request.shadow`, `decode_margin_s`).
"""


def class_decodes_s(
    batches: Iterable[Batch], decode_s: Callable[[int, float], float], lookahead_tokens: int
) -> list[tuple[float, float]] | None:
    """What the decodes of each class take, and its pace, the quickest first: that one decodes in
    each iteration, and every other adds so much at most to those in which it does, whoever else
    takes part. Batches of one pace are one class. None where it does not pay, since all together
    take no more of the time.
    """
    classes: dict[float, tuple[int, int]] = {}
    for pace_s, requests, tokens in batches:
        before = classes.get(pace_s, (0, 0))
        classes[pace_s] = before[0] + requests, before[1] + tokens
    if not 1 < len(classes) <= CLASSES_MAX:
        return None

    def seconds(paces: Sequence[float]) -> float:
        requests = sum(classes[pace_s][0] for pace_s in paces)
        tokens = sum(classes[pace_s][1] for pace_s in paces)
        return decode_s(requests, tokens / requests + lookahead_tokens)

    first, *slower = sorted(classes)
    alone_s = seconds([first])
    added_s = {pace_s: max(seconds([first, pace_s]) - alone_s, 0.0) for pace_s in slower}
    most = 1.0
    for count in range(2, len(slower) + 1):
        for paces in combinations(slower, count):
            together_s = seconds([first, *paces]) - alone_s
            apart_s = sum(added_s[pace_s] for pace_s in paces)
            if together_s > most * apart_s:
                if not apart_s:
                    return None
                most = together_s / apart_s
    found = [(alone_s, first), *((most * added_s[pace_s], pace_s) for pace_s in slower)]
    busy = sum(taken_s / pace_s for taken_s, pace_s in found)
    return found if busy < seconds([first, *slower]) / first else None


def class_jobs(
    due_s: float, decodes_s: Sequence[tuple[float, float]], dues_s: Sequence[float]
) -> list[Job]:
    """The decodes of an instance whose first token of all is due at `due_s`, and whose classes take
    as long as `class_decodes_s` says and are due at `dues_s`. A slower class decodes with the last
    iteration of the quickest that begins early enough, which is due up to a pace of the quickest
    before it is.
    """
    (alone_s, pace_s), *slower = decodes_s
    return [
        (due_s, alone_s, pace_s),
        *(
            (class_due_s - lead_s(pace_s, tpot_s), added_s, tpot_s)
            for (added_s, tpot_s), class_due_s in zip(slower, dues_s[1:], strict=True)
        ),
    ]


def lead_s(pace_s: float, tpot_s: float) -> float:
    """A class that is due less than this after the next token of the quickest decodes with it."""
    return pace_s + LEAD_SHARE * tpot_s
