"""The most users that are served in time: looked for on a ladder, from where it is expected."""

from collections.abc import Callable
from dataclasses import dataclass

STEP = 1.1
"""From a rung to the next."""
USERS_MAX = 2000
MET_LEAST = 0.99
"""The least share of all calls that must be met, by either measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    users: int
    calls_per_s: float
    met_share: float
    """TTFT and mean TPOT."""
    met_every_token_share: float

    @property
    def passes(self) -> bool:
        return min(self.met_share, self.met_every_token_share) >= MET_LEAST


def rungs() -> list[int]:
    """Numbers of users, ascending."""
    found, users = [1], 1.0
    while users < USERS_MAX:
        users *= STEP
        if round(users) > found[-1]:
            found.append(round(users))
    return found


def most(trial: Callable[[int], Trial], guess: int) -> tuple[Trial | None, list[Trial]]:
    """The highest rung that passes, next to one that does not; and all trials. None: none does."""
    ladder = rungs()
    at = min(range(len(ladder)), key=lambda n: abs(ladder[n] - guess))
    trials = [trial(ladder[at])]
    upwards = trials[0].passes
    while True:
        at += 1 if upwards else -1
        if not 0 <= at < len(ladder):
            break
        trials.append(trial(ladder[at]))
        if trials[-1].passes is not upwards:
            break
    passed = [one for one in trials if one.passes]
    return max(passed, key=lambda one: one.users, default=None), trials
