"""Generated conversations: prompts that grow by answers and questions, in their users' time."""

from itertools import groupby, pairwise
from statistics import fmean
from typing import Any

import pytest

from mesh.domain.errors import InvalidInput
from mesh_workloads.conversations import Conversations, Lognormal, generate
from mesh_workloads.trace import Arrival

MADE = Conversations(duration_s=600.0, users=40, functions=3)


def by_conversation(made: Conversations, seed: int = 1) -> list[list[Arrival]]:
    arrivals = [arrival for arrival in generate(made, seed).arrivals if arrival.turn]

    def key(arrival: Arrival) -> int:
        return arrival.turn.conversation if arrival.turn else -1

    return [list(group) for _, group in groupby(sorted(arrivals, key=key), key=key)]


def test_each_prompt_holds_all_that_was_said_and_a_question_and_fits_its_context() -> None:
    talks = by_conversation(MADE)
    assert len(talks) > 100
    for talk in talks:
        assert talk[0].input_tokens > MADE.system_tokens
        assert len({arrival.function for arrival in talk}) == 1
        for before, after in pairwise(talk):
            question = after.input_tokens - before.input_tokens - before.output_tokens
            assert 4 <= question <= 256
            read_s = MADE.first_token_s + before.output_tokens * MADE.token_s
            assert after.t_s - before.t_s >= read_s + 0.5 - 1e-5
            assert before.turn is not None
            assert after.turn is not None
            assert after.turn.left == before.turn.left - 1
        assert talk[-1].input_tokens + talk[-1].output_tokens <= MADE.context_tokens_max


def test_users_take_turns_at_their_pace_and_conversations_have_some() -> None:
    talks = by_conversation(MADE)
    ended = [talk for talk in talks if talk[-1].turn and talk[-1].turn.left == 0]
    assert 3.0 < fmean(len(talk) for talk in ended) < 6.0
    calls = sum(len(talk) for talk in talks)
    assert calls / MADE.duration_s == pytest.approx(MADE.users / MADE.cycle_s, rel=0.3)


def test_a_users_turns_are_those_of_the_seed_whatever_others_there_are() -> None:
    few = Conversations(duration_s=100.0, users=2)
    assert generate(few, 3) == generate(few, 3)
    assert generate(few, 3) != generate(few, 4)
    times = {arrival.t_s for arrival in generate(few, 3).arrivals}
    more = Conversations(duration_s=100.0, users=5)
    assert times < {arrival.t_s for arrival in generate(more, 3).arrivals}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"users": 0}, "users is 0"),
        ({"users": 2, "functions": 3}, "functions is 3; at most 2"),
        ({"duration_s": float("nan")}, "duration_s is nan"),
        ({"turns_mean": 0.5}, "turns_mean is 0.5"),
        ({"context_tokens_max": 500}, "no room in a context of 500"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_name(wrong: dict[str, float], says: str) -> None:
    given: dict[str, Any] = {"duration_s": 60.0, "users": 3} | wrong
    with pytest.raises(InvalidInput, match=says):
        Conversations(**given)


def test_a_lognormal_has_its_median_within_its_bounds() -> None:
    with pytest.raises(InvalidInput, match="cannot lie from 50 to 60"):
        Lognormal(median=40, sigma=1.0, least=50, most=60)
