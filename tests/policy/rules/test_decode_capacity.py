"""Sums of decodes against decodes counted one by one."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.policy.rules.decode_capacity import reached_s, spare_s
from tests.request.schedules import Job

JOBS = st.lists(
    st.builds(
        lambda due, decode, tpot: Job(due / 1000, decode / 1000, tpot / 1000),
        st.integers(1, 3000),
        st.integers(1, 100),
        st.sampled_from([20, 50, 100, 250, 500]),
    ),
    min_size=1,
    max_size=4,
)


def share(jobs: list[Job]) -> float:
    """The share of a node's time that the decodes take in the long run."""
    return sum(job.decode_s / job.tpot_s for job in jobs)


def in_time(jobs: list[Job]) -> list[Job]:
    """The same with decodes so much shorter that a node keeps up with them."""
    least = max(share(jobs), 1.0)
    return [job._replace(decode_s=job.decode_s / least) for job in jobs]


def decode(jobs: list[Job], until_s: float) -> tuple[float, list[float]]:
    """One after the other by deadline, from 0 on, as long as they end by then: the least time that
    one was ahead of its deadline, and the deadlines that come next.
    """
    now_s, least_s = 0.0, inf
    dues_s = [job.due_s for job in jobs]
    while True:
        first = min(range(len(jobs)), key=dues_s.__getitem__)
        now_s += jobs[first].decode_s
        if now_s > until_s:
            return least_s, dues_s
        least_s = min(least_s, dues_s[first] - now_s)
        dues_s[first] += jobs[first].tpot_s


def test_spare_time_counts_every_token_that_is_due_until_then() -> None:
    # Until 0.56 s: 0.2 s for the slow one, and 0.015 s each for those due at 0.1, 0.12, … 0.56 of
    # the quick one, 24 of them: 0.56 s. One round alone would seem to leave 0.345 s.
    quick = Job(due_s=0.1, decode_s=0.015, tpot_s=0.02)
    slow = Job(due_s=0.56, decode_s=0.2, tpot_s=1.0)
    assert spare_s([slow, quick], 0.0) == pytest.approx(0.0)
    assert spare_s([quick], 0.0) == pytest.approx(0.085)
    assert spare_s([], 0.0) == inf


def test_reached_is_the_deadline_before_which_all_is_decoded() -> None:
    # In 0.5 s: 0.1 s each for the deadlines 1, 2, 3 of one and 2, 3 of the other; parts of decodes
    # count, too: until 2.5, 0.25 s of the first and 0.15 s of the second, and 0.1 s.
    one, two = Job(1.0, 0.1, 1.0), Job(2.0, 0.1, 1.0)
    assert reached_s([two, one], 0.05) == 1.0
    assert reached_s([two, one], 0.15) == pytest.approx(1.5)
    assert reached_s([two, one], 0.25) == 2.0
    assert reached_s([two, one], 0.5) == pytest.approx(3.0)


@given(JOBS.map(in_time))
def test_no_decode_comes_later_than_spare_time_says(jobs: list[Job]) -> None:
    least_s, _ = decode(jobs, 10.0)
    assert least_s >= spare_s(list(jobs), 0.0) - 1e-9


@given(JOBS.map(in_time))
def test_spare_time_is_short_by_one_decode_of_each_at_most(jobs: list[Job]) -> None:
    least_s, _ = decode(jobs, 10.0)
    assert least_s <= spare_s(list(jobs), 0.0) + sum(job.decode_s for job in jobs) + 1e-9


@given(JOBS, st.integers(1, 2000))
def test_decodes_get_as_far_as_reckoned_and_a_round_farther_at_most(
    jobs: list[Job], wait_ms: int
) -> None:
    wait_s = wait_ms / 1000
    reached = reached_s(list(jobs), wait_s)
    _, dues_s = decode(jobs, wait_s)
    assert min(dues_s) >= reached - 1e-9
    round_s = sum(job.decode_s for job in jobs)
    assert min(dues_s) <= reached_s(list(jobs), wait_s + round_s) + 1e-9
