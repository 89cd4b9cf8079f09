"""What becomes of running requests when a node computes nothing but their decodes.

Decodes follow each other in the order of their deadlines. None has to wait for anything but its
turn, since a run queue may compute ahead of its deadlines, so that it comes down to sums: by any
deadline, each run queue must have decoded once, and once more for every TPOT SLO since its first
deadline. The turn rule asks how much time that leaves over, shadow validation how far it gets.

Parts of decodes count here as well, so that the work due grows evenly from one run queue's first
deadline to the next's. That is at most one decode of each run queue too much.
"""

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
