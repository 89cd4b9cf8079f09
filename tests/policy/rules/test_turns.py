"""Whose turn it is: least headroom first, prompts in chunks, nobody late for who is late anyway."""

from copy import deepcopy
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mesh.domain.ids import RequestId
from mesh.policy.rules.alternate import ALTERNATE
from mesh.policy.rules.first_come import FIRST_COME
from mesh.policy.rules.headroom import HEADROOM
from mesh.policy.rules.run_queues import Prompt, RunQueue
from mesh.policy.rules.turns import Grant, TurnRule, name_all, next_turn, note_turn
from tests.request.rollout import Rollout
from tests.request.schedules import TIMES, TOKENS_MAX, Instance, Job, Node, a_prompt, queue, times
from tests.request.strategies import instances


def turn(*queues: RunQueue, now_s: float = 0.0, tokens_max: int = TOKENS_MAX) -> tuple[str, int]:
    grant = grant_of(*queues, now_s=now_s, tokens_max=tokens_max)
    return grant.queue.instance_id, grant.prefill_tokens


def grant_of(*queues: RunQueue, now_s: float = 0.0, tokens_max: int = TOKENS_MAX) -> Grant:
    grant = next_turn(HEADROOM, queues, now_s, prefill_tokens_max=tokens_max)
    assert grant is not None
    return grant


class TestLeastHeadroom:
    def test_the_earliest_deadline_is_first(self) -> None:
        a, b = queue("a", 0.9, 0.5, times=TIMES), queue("b", 0.8, 0.7, times=TIMES)
        assert turn(a, b) == ("a", 0)
        assert turn(queue("c", 0.4, times=TIMES), a, b) == ("c", 0)

    def test_ties_go_to_the_lesser_id_whatever_the_order(self) -> None:
        a, b = queue("a", 0.5, times=TIMES), queue("b", 0.5, times=TIMES)
        assert turn(a, b) == turn(b, a) == ("a", 0)

    def test_who_has_no_work_gets_no_turn(self) -> None:
        assert next_turn(HEADROOM, [], 0.0, prefill_tokens_max=TOKENS_MAX) is None
        idle = queue("a", times=TIMES)
        assert next_turn(HEADROOM, [idle], 0.0, prefill_tokens_max=TOKENS_MAX) is None
        assert turn(idle, queue("b", 9.0, times=TIMES)) == ("b", 0)

    def test_the_grant_says_how_long_it_takes(self) -> None:
        grant = grant_of(queue("a", 0.5, times=TIMES, prompts=[(50, 0.4)]))
        assert grant.prefill_tokens == 50
        assert grant.seconds == pytest.approx(0.15)


class TestChunks:
    def test_a_prompt_is_computed_as_far_as_the_others_can_wait(self) -> None:
        # b needs 0.1 s until 0.25: 0.15 s are left, for 128 of the prompt's 200 tokens at 1 ms,
        # by halves for 100.
        a, b = queue("a", times=TIMES, prompts=[(200, 0.2)]), queue("b", 0.25, times=TIMES)
        assert turn(a, b) == ("a", 100)
        assert turn(a, queue("b", 0.31, times=TIMES)) == ("a", 200)

    def test_just_in_time_is_in_time(self) -> None:
        halves = times(decode_s=0.125, prefill_token_s=0.125 / 128)
        a, b = queue("a", times=halves, prompts=[(128, 0.2)]), queue("b", 0.25, times=halves)
        assert turn(a, b) == ("a", 128)

    def test_nor_is_it_longer_than_an_iteration_may_be(self) -> None:
        a = queue("a", times=TIMES, prompts=[(200, 0.9), (300, 0.9)])
        assert turn(a) == ("a", 256)
        assert turn(a, tokens_max=64) == ("a", 64)
        assert turn(a, tokens_max=1000) == ("a", 500), "both of its prompts"

    def test_prompts_are_computed_together_if_none_is_late_for_it(self) -> None:
        assert turn(queue("a", times=TIMES, prompts=[(50, 0.1), (30, 0.2)])) == ("a", 80)
        assert turn(queue("a", times=TIMES, prompts=[(50, 0.06), (30, 0.2)])) == ("a", 50)
        assert turn(queue("a", times=TIMES, prompts=[(50, 0.04), (30, 0.2)])) == ("a", 80)
        three = queue("a", times=TIMES, prompts=[(50, 0.2), (30, 0.1), (90, 0.9)])
        assert turn(three) == ("a", 80)

    def test_no_chunk_is_so_small_that_it_is_not_worth_its_iteration(self) -> None:
        # 0.02 s are left: 16 tokens would do, a half of 24 is less than that.
        b = queue("b", 0.12, times=TIMES)
        assert turn(queue("a", times=TIMES, prompts=[(32, 0.1)]), b) == ("a", 16)
        assert turn(queue("a", times=TIMES, prompts=[(24, 0.1)]), b) == ("b", 0)
        assert turn(queue("a", times=TIMES, prompts=[(5, 0.1)]), b) == ("a", 5), "all there is"

    def test_its_own_batch_is_not_made_late_either(self) -> None:
        # The decode takes 0.1 s of the 0.17 s: 50 of 100 tokens.
        assert turn(queue("a", 0.17, times=TIMES, prompts=[(100, 0.1)])) == ("a", 50)
        assert turn(queue("a", 0.11, times=TIMES, prompts=[(100, 0.1)])) == ("a", 0)

    def test_a_late_prompt_makes_nobody_late(self) -> None:
        a = queue("a", times=TIMES, prompts=[(200, -3.0)])
        assert turn(a, queue("b", 0.11, times=TIMES)) == ("b", 0)
        assert turn(a, queue("b", 0.25, times=TIMES)) == ("a", 100)

    def test_nor_does_it_later_by_what_it_takes_away_now(self) -> None:
        # Before its own deadline at 0.56 s, b must let c decode 24 times: nothing is left over,
        # though one decode of each would leave 0.345 s.
        quick = queue("c", 0.1, times=times(decode_s=0.015), tpot_s=0.02)
        slow = queue("b", 0.5601, times=times(decode_s=0.2), tpot_s=5.0)
        assert turn(queue("a", times=TIMES, prompts=[(60, 0.05)]), slow, quick) == ("c", 0)
        slower = queue("b", 1.0, times=times(decode_s=0.2), tpot_s=5.0)
        assert turn(queue("a", times=TIMES, prompts=[(60, 0.05)]), slower, quick) == ("a", 60)


class TestLate:
    def test_who_is_late_already_makes_nobody_late(self) -> None:
        a, b = queue("a", -1.0, times=TIMES), queue("b", 0.15, times=TIMES)
        assert turn(a, b) == ("b", 0)
        assert turn(a, queue("b", 0.25, times=TIMES)) == ("a", 0), "as there is room for both"

    def test_nor_does_who_cannot_be_in_time_any_more(self) -> None:
        # a could not before 0.1 s; b could, if it is first.
        assert turn(queue("a", 0.05, times=TIMES), queue("b", 0.12, times=TIMES)) == ("b", 0)

    def test_a_late_request_does_not_cost_its_batch_the_turn(self) -> None:
        a = queue("a", -1.0, 0.05, 0.12, times=TIMES)
        assert turn(a, queue("b", 0.15, times=TIMES)) == ("a", 0)

    def test_the_latest_is_first_when_all_are_late(self) -> None:
        a, b = queue("a", -1.0, times=TIMES), queue("b", -2.0, times=TIMES)
        assert turn(a, b) == ("b", 0)

    def test_a_late_batch_decodes_beside_a_prompt_that_has_no_room(self) -> None:
        a = queue("a", -1.0, times=TIMES, prompts=[(100, 0.5)])
        grant = grant_of(a, queue("b", 0.21, times=TIMES))
        assert (grant.queue, grant.prefill_tokens, grant.passed) == (a, 0, [a])


class TestPassedOver:
    def test_they_are_those_of_less_headroom_that_get_no_turn(self) -> None:
        a = queue("a", times=TIMES, prompts=[(100, 0.1)])
        b, c = queue("b", 0.12, times=TIMES), queue("c", 0.5, times=TIMES)
        assert grant_of(c, b, a).passed == [a]
        assert not grant_of(c, b).passed

    def test_and_the_queue_itself_if_its_prompts_are_left_out(self) -> None:
        a = queue("a", 0.11, times=TIMES, prompts=[(100, 0.1)])
        assert grant_of(a).passed == [a]

    def test_each_once(self) -> None:
        # Passed over for its prompt and its late request, then it has the turn for the other one.
        a = queue("a", -0.1, 0.11, times=TIMES, prompts=[(100, 0.05)])
        grant = grant_of(a, queue("b", 0.15, times=TIMES))
        assert (grant.queue, grant.prefill_tokens, grant.passed) == (a, 0, [a])
        note_turn(grant)
        assert a.passed == 1

    def test_a_prompt_is_passed_over_so_often_and_no_more(self) -> None:
        b = queue("b", 0.11, times=TIMES)
        a = queue("a", times=TIMES, prompts=[(100, 0.1)], passed=HEADROOM.passed_max - 1)
        grant = grant_of(a, b)
        assert (grant.queue, a.passed) == (b, HEADROOM.passed_max - 1), "asking counts nothing"
        note_turn(grant)
        assert turn(a, b) == ("a", HEADROOM.chunk_tokens_min)
        assert turn(a, queue("b", 0.103, times=TIMES), tokens_max=4) == ("a", 4)
        note_turn(grant_of(a, b))
        assert a.passed == 0

    def test_a_late_decode_too(self) -> None:
        a, b = (
            queue("a", -1.0, times=TIMES, passed=HEADROOM.passed_max),
            queue("b", 0.15, times=TIMES),
        )
        grant = grant_of(a, b)
        assert grant.queue is a
        note_turn(grant)
        assert a.passed == 0

    def test_a_decode_is_no_turn_for_the_prompts_beside_it(self) -> None:
        a = queue("a", 0.11, times=TIMES, prompts=[(100, 0.1)], passed=3)
        note_turn(grant_of(a))
        assert a.passed == 4


def test_first_come_first_served_is_without_regard_to_deadlines() -> None:
    a = queue("a", 0.5, times=TIMES, prompts=[(300, 0.1)])
    b = queue("b", 0.1, times=TIMES)
    a.oldest_s, b.oldest_s = 3.0, 4.0
    grant = next_turn(FIRST_COME, [b, a], 0.0, prefill_tokens_max=TOKENS_MAX)
    assert grant is not None
    assert (grant.queue, grant.prefill_tokens) == (a, 256)
    a.oldest_s = 4.0
    tie = next_turn(FIRST_COME, [b, a], 0.0, prefill_tokens_max=TOKENS_MAX)
    assert tie is not None
    assert tie.queue is a


def test_taking_turns_goes_to_the_queue_that_has_waited_for_the_most_of_them() -> None:
    queues = [queue(name, 9.0, times=TIMES) for name in "cab"]
    given = []
    for _ in range(6):
        grant = next_turn(ALTERNATE, queues, 0.0, prefill_tokens_max=TOKENS_MAX)
        assert grant is not None
        note_turn(grant)
        given.append(grant.queue.instance_id)
    assert given == ["a", "b", "c", "a", "b", "c"]


class TestSeveralDecodes:
    """A decode takes 0.1 s."""

    @staticmethod
    def grant(*queues: RunQueue, turn_s_max: float, rule: TurnRule = HEADROOM) -> Grant:
        found = next_turn(rule, queues, 0.0, prefill_tokens_max=TOKENS_MAX, turn_s_max=turn_s_max)
        assert found is not None
        return found

    def test_they_are_one_turn_as_far_as_that_is_not_too_long(self) -> None:
        grant = self.grant(queue("a", 9.0, times=TIMES), turn_s_max=0.35)
        assert grant.iterations == 3
        assert grant.seconds == pytest.approx(0.3)
        assert self.grant(queue("a", 9.0, times=TIMES), turn_s_max=0.0).iterations == 1

    def test_their_first_token_is_in_time_at_the_end_of_the_turn(self) -> None:
        assert self.grant(queue("a", 0.95, times=TIMES), turn_s_max=0.6).iterations == 3

    def test_nobody_else_is_late_for_them(self) -> None:
        a = queue("a", 0.85, times=TIMES)
        assert self.grant(a, queue("b", 0.9, times=TIMES), turn_s_max=0.4).iterations == 4
        assert (
            self.grant(a, queue("b", 0.9, times=times(decode_s=0.25)), turn_s_max=0.4).iterations
            == 2
        )

    def test_who_has_prompts_or_is_late_gets_one_at_a_time(self) -> None:
        a = queue("a", 9.0, times=TIMES)
        assert (
            self.grant(a, queue("b", times=TIMES, prompts=[(10, 9.0)]), turn_s_max=1.0).iterations
            == 1
        )
        assert self.grant(a, queue("b", -1.0, times=TIMES), turn_s_max=1.0).iterations == 1

    def test_the_baselines_have_them_too(self) -> None:
        a = queue("a", 9.0, times=TIMES)
        for rule in (ALTERNATE, FIRST_COME):
            assert self.grant(a, turn_s_max=0.35, rule=rule).iterations == 3
        prompts = queue("a", 9.0, times=TIMES, prompts=[(10, 9.0)])
        assert self.grant(prompts, turn_s_max=1.0, rule=ALTERNATE).iterations == 1


INSTANCES = st.integers(1, 4).flatmap(
    lambda count: st.tuples(*(instances(f"i{n}", count) for n in range(count)))
)


def given_turn(nodes: tuple[Instance, ...]) -> Grant | None:
    return next_turn(HEADROOM, [i.queue(0.0) for i in nodes], 0.0, prefill_tokens_max=TOKENS_MAX)


@given(INSTANCES, st.randoms(use_true_random=False))
def test_the_turn_does_not_depend_on_the_order_and_goes_to_who_has_work(
    nodes: tuple[Instance, ...], random: Random
) -> None:
    first = given_turn(nodes)
    shuffled = list(nodes)
    random.shuffle(shuffled)
    again = given_turn(tuple(shuffled))
    if first is None or again is None:
        assert first is again
        assert not any(instance.requests for instance in nodes)
        return
    assert first.queue.batch or first.queue.prompts
    assert first.prefill_tokens <= min(first.queue.prompt_tokens, TOKENS_MAX)
    assert first.seconds > 0.0
    assert (first.queue.instance_id, first.prefill_tokens, first.seconds) == (
        again.queue.instance_id,
        again.prefill_tokens,
        again.seconds,
    )
    passed = [queue.instance_id for queue in first.passed]
    assert passed == [queue.instance_id for queue in again.passed]
    assert len(passed) == len(set(passed))


@given(INSTANCES)
def test_nobody_is_passed_over_more_often_than_agreed(nodes: tuple[Instance, ...]) -> None:
    node = Node(instances=list(nodes), newcomer=a_prompt(300, 5.0), target=0)
    for instance in nodes:
        instance.passed = 0
    rollout = Rollout(node=node)
    in_a_row = {instance.name: 0 for instance in nodes}
    for _ in range(200):
        played = rollout.turn()
        if played is None:
            break
        _, grant = played
        if grant.prefill_tokens or not grant.queue.prompts:
            in_a_row[grant.queue.instance_id] = 0
        for passed in grant.passed:
            in_a_row[passed.instance_id] += passed is not grant.queue or bool(passed.prompts)
        assert max(in_a_row.values()) <= HEADROOM.passed_max


@given(INSTANCES)
def test_a_chunk_makes_no_running_request_late(nodes: tuple[Instance, ...]) -> None:
    """Unless its run queue was passed over too often: if all decodes would be in time
    without it.
    """
    grant = given_turn(nodes)
    assume(grant is not None and grant.prefill_tokens)
    assert grant is not None
    assume(grant.queue.passed < HEADROOM.passed_max)
    jobs = [job for instance in nodes if (job := in_time(instance.queue(0.0))) is not None]
    assume(jobs and sum(job.decode_s / job.tpot_s for job in jobs) <= 1.0)
    assume(not decoded_late(jobs, 0.0))
    after = []
    for instance in nodes:
        job = in_time(instance.queue(0.0))
        if job is not None and instance.name == grant.queue.instance_id:
            assert grant.seconds <= job.due_s
            job = job._replace(due_s=job.due_s + job.tpot_s)
        if job is not None:
            after.append(job)
    assert not decoded_late(after, grant.seconds)


def in_time(queue: RunQueue) -> Job | None:
    """Its decodes, from the first deadline that it can keep."""
    dues_s = [due_s for due_s in queue.dues_s if due_s >= queue.decode_s]
    return Job(min(dues_s), queue.decode_s, queue.tpot_s) if dues_s else None


def decoded_late(jobs: list[Job], now_s: float) -> bool:
    """Whether one of many decodes, each next by deadline, comes late."""
    jobs = deepcopy(jobs)
    end_s = max(job.due_s + 10 * job.tpot_s for job in jobs)
    while jobs and min(job.due_s for job in jobs) < end_s:
        jobs.sort()
        job = jobs[0]
        now_s += job.decode_s
        if now_s > job.due_s + 1e-9:
            return True
        jobs[0] = job._replace(due_s=job.due_s + job.tpot_s)
    return False


def test_those_of_a_turn_are_named_where_their_instance_has_others() -> None:
    of = queue("a", times=TIMES)
    of.running = [RequestId("r1")]
    of.prompts = [
        Prompt(request_id=RequestId(name), left=4, past=0, due_s=1.0) for name in ("p1", "p2", "p3")
    ]
    grant = Grant(queue=of, prefill=6, seconds=0.1)
    name_all(grant)
    assert grant.decode == ("r1",)
    assert grant.prefill == (("p1", 4), ("p2", 2))
