"""Aegaeon's turns: prompts by groups of a model, decodes round by round with quotas."""

import pytest

from mesh.domain.ids import InstanceId
from mesh.policy.rules.registry import rule_named
from mesh.policy.rules.rounds import ROUNDS, Rounds, WorkingWeights
from mesh.policy.rules.run_queues import RunQueue
from mesh.policy.rules.swapping import SwapRule
from mesh.policy.rules.turns import Grant, name_of, next_turn
from tests.request.schedules import TIMES, TOKENS_MAX, queue


def batch(name: str, due_s: float, **placed: float) -> RunQueue:
    """A batch whose decodes take a quarter of their TPOT, and whose weights take 1 s to come."""
    made = queue(name, due_s, times=TIMES)
    made.tpot_s, made.copy_s = 4 * made.decode_s, 1.0
    for field, value in placed.items():
        setattr(made, field, value)
    return made


def turn(*queues: RunQueue) -> Grant:
    grant = next_turn(ROUNDS, queues, 0.0, prefill_tokens_max=TOKENS_MAX)
    assert grant is not None
    return grant


def weights(of: RunQueue) -> WorkingWeights:
    return WorkingWeights(
        instance_id=of.instance_id, weights_bytes=10, share=float(not of.out), due_s=0.0, queue=of
    )


def test_the_quota_is_that_of_the_papers_example() -> None:
    three = [batch("a", 1.0, out=True), batch("b", 2.0), batch("c", 3.0)]
    assert [Rounds(quota_s_max=3.0).quota_s(q, three) for q in three] == pytest.approx([3.0] * 3)


def test_a_round_that_keeps_its_slos_twice_over_has_short_turns() -> None:
    two = [batch("a", 1.0, out=True, copy_s=0.05), batch("b", 2.0, copy_s=0.05)]
    two[0].tpot_s = two[1].tpot_s = 10 * two[0].decode_s
    # alpha is 0.5: 0.1 / (10 * (0.5 - 0.2)).
    assert ROUNDS.quota_s(two[1], two) == pytest.approx(1 / 30)


def test_where_all_weights_are_there_each_turn_is_one_grant() -> None:
    assert turn(batch("a", 1.0, turns=1, turns_s=0.01), batch("b", 9.0)).queue.instance_id == "b"


@pytest.mark.parametrize(("turns_s", "next_one"), [(3.9, "a"), (4.1, "b")])
def test_a_batch_decodes_for_its_quota_and_then_the_next(turns_s: float, next_one: str) -> None:
    queues = batch("a", 9.0, turns=5, turns_s=turns_s), batch("b", 7.0), batch("c", 8.0, out=True)
    assert turn(*queues).queue.instance_id == next_one


def test_whoever_has_had_its_turn_makes_room_for_the_first_that_is_out() -> None:
    queues = batch("a", 1.0, turns=5, turns_s=9.0), batch("b", 7.0), batch("c", 8.0, out=True)
    found = ROUNDS.swap([weights(each) for each in queues], 0)
    assert found == ("a", 0.0)
    queues[0].turns_s = 1.0
    found = ROUNDS.swap([weights(each) for each in queues], 0)
    assert found is None, "c comes after both"


def test_prompts_come_first_one_at_a_time_and_nobody_decodes_beside_them() -> None:
    a = queue("a", 0.1, times=TIMES)
    b = queue("b", 0.1, times=TIMES, prompts=[(50, 5.0), (60, 4.0)])
    grant = turn(a, b)
    assert (grant.queue, grant.prefill_tokens, grant.decode) == (b, 60, ())


@pytest.mark.parametrize(("turns", "next_one"), [(7, "b"), (8, "a")])
def test_a_group_goes_on_until_it_is_full(turns: int, next_one: str) -> None:
    a = queue("a", times=TIMES, prompts=[(50, 1.0)])
    b = queue("b", times=TIMES, prompts=[(50, 2.0)])
    b.turns = turns
    assert turn(a, b).queue.instance_id == next_one


def test_what_moved_here_waits_for_the_turn_of_its_batch() -> None:
    a = queue("a", 1.0, times=TIMES)
    b = queue("b", 2.0, times=TIMES, prompts=[(3, 1.5)])
    b.prompts[0].first = False
    assert turn(a, b).queue is a
    a.turns = 1
    assert turn(a, b).prefill_tokens == 3


def test_whose_weights_are_out_gets_no_turn_and_every_node_has_the_rule() -> None:
    out = batch("a", 1.0, out=True)
    assert next_turn(ROUNDS, [out], 0.0, prefill_tokens_max=TOKENS_MAX) is None
    assert isinstance(rule_named(name_of(ROUNDS)), SwapRule)
    assert weights(out).instance_id == InstanceId("a")
