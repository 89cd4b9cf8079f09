"""The conversations benchmark: how the most users are looked for."""

from itertools import pairwise

import pytest

from bench.conversations import STEP, USERS_MAX, Trial, most, rungs


def test_rungs_ascend_by_the_step() -> None:
    found = rungs()
    assert found[:4] == [1, 2, 3, 4]
    assert found[-1] >= USERS_MAX
    assert all(b > a for a, b in pairwise(found))
    assert all(b / a < STEP * 1.02 for a, b in pairwise(found) if a > 50)


@pytest.mark.parametrize("guess", [1, 5, 21, 22, 23, 24, 400])
def test_the_most_users_are_found_from_below_and_from_above(guess: int) -> None:
    tried: list[int] = []

    def trial(users: int) -> Trial:
        tried.append(users)
        share = 1.0 if users <= 23 else 0.98
        return Trial(users=users, calls_per_s=users / 2, met_share=1, met_every_token_share=share)

    found, trials = most(trial, guess)
    assert found is not None
    assert found.users == max(rung for rung in rungs() if rung <= 23)
    assert [one.users for one in trials] == tried
    assert len(set(tried)) == len(tried)


def test_where_nobody_is_served_in_time_there_is_no_capacity() -> None:
    def trial(users: int) -> Trial:
        return Trial(users=users, calls_per_s=1.0, met_share=0.5, met_every_token_share=0.5)

    found, trials = most(trial, 3)
    assert found is None
    assert [one.users for one in trials] == [3, 2, 1]
