"""Who is served and who is not, by how often a function is called; pure.

The function with the most requests has rank 1; equal ones are ranked by name. Before: outcomes.
After: `cell_numbers`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mesh.domain.outcome import Outcome

GROUPS_MAX = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Functions of neighbouring ranks, and what came of their requests."""

    first_rank: int
    last_rank: int
    requests: int
    met: int
    """TTFT without any grace, and mean TPOT."""
    not_finished: int
    cold_requests: int


def by_rank(outcomes: Sequence[Outcome]) -> tuple[RankGroup, ...]:
    """Groups of as many functions each as can be, busiest first; functions without requests have
    no rank.
    """
    counts = Counter(outcome.deployment for outcome in outcomes)
    ranked = sorted(counts, key=lambda name: (-counts[name], name))
    groups = min(GROUPS_MAX, len(ranked))
    cuts = [len(ranked) * n // groups for n in range(groups + 1)] if groups else []
    group_of = {
        name: group for group in range(groups) for name in ranked[cuts[group] : cuts[group + 1]]
    }
    members: list[list[Outcome]] = [[] for _ in range(groups)]
    for outcome in outcomes:
        members[group_of[outcome.deployment]].append(outcome)
    return tuple(
        RankGroup(
            first_rank=cuts[group] + 1,
            last_rank=cuts[group + 1],
            requests=len(mine),
            met=sum(o.met_in_the_mean_without_grace for o in mine),
            not_finished=sum(not o.finished for o in mine),
            cold_requests=sum(o.grace_s > 0 for o in mine),
        )
        for group, mine in enumerate(members)
    )
