"""Conversations: users who ask, read, think and ask again, each time with all that was said.

A conversation begins with a text that all of its function share (a system prompt) and has some
turns; with each the prompt grows by the answer before and a question. When a turn comes is planned:
its user reads the answer at `token_s` a token, then thinks. Who plays a turn sends it no earlier
than the answer before has ended. Before: a seed. After: `mesh.sim.workload`, live benchmarks.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge

from mesh.domain.errors import InvalidInput
from mesh_workloads.trace import ARRIVALS_MAX, DURATION_S_MAX, Arrival, Trace, Turn

USERS_MAX = 100_000
TURNS_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """Lengths or times, cut off at both ends."""

    median: float
    sigma: float
    least: float
    most: float

    def __post_init__(self) -> None:
        sane = 0 < self.least <= self.median <= self.most < math.inf and 0 <= self.sigma < math.inf
        if not sane:
            raise InvalidInput(
                f"a lognormal of median {self.median:g} and sigma {self.sigma:g} cannot lie from "
                f"{self.least:g} to {self.most:g}"
            )

    def draw(self, draw: random.Random) -> float:
        drawn = self.median * math.exp(self.sigma * draw.gauss(0.0, 1.0))
        return round(min(max(drawn, self.least), self.most), 6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Users of each function in equal parts; when a conversation ends, its user begins another.

    Lengths are skewed as in ShareGPT's conversations, where vLLM's paper finds means of 161 tokens
    of a prompt and 338 of an answer (Kwon et al. 2023, §6.2); shorter, for small machines.
    """

    duration_s: float
    """No turn is planned later."""
    users: int
    functions: int = 1
    turns_mean: float = 5.0
    """The number of turns is geometric, `TURNS_MAX` at most."""
    system_tokens: int = 400
    question_tokens: Lognormal = Lognormal(median=40, sigma=1.0, least=4, most=256)
    output_tokens: Lognormal = Lognormal(median=60, sigma=0.8, least=8, most=200)
    think_s: Lognormal = Lognormal(median=4.0, sigma=0.6, least=0.5, most=60.0)
    token_s: float = 0.12
    first_token_s: float = 1.0
    """What users expect of a first token, and so plan with."""
    context_tokens_max: int = 2048
    """A conversation ends before it has more."""

    def __post_init__(self) -> None:
        bounds = {
            "duration_s": (self.duration_s, 0.0, DURATION_S_MAX),
            "users": (self.users, 0, USERS_MAX),
            "functions": (self.functions, 0, self.users),
            "turns_mean": (self.turns_mean, 0.999, TURNS_MAX),
            "system_tokens": (self.system_tokens, 0, self.context_tokens_max),
            "token_s": (self.token_s, 0.0, 60.0),
            "first_token_s": (self.first_token_s, 0.0, 3600.0),
        }
        for name, (value, above, most) in bounds.items():
            if not above < value <= most:
                raise InvalidInput(f"conversations: {name} is {value:g}; at most {most:g}, above 0")
        first = self.system_tokens + self.question_tokens.most + self.output_tokens.most
        if first > self.context_tokens_max:
            raise InvalidInput(
                f"conversations: a first turn of {first:g} tokens has no room in a context of "
                f"{self.context_tokens_max}"
            )

    @property
    def cycle_s(self) -> float:
        """From a turn to the next, about."""
        reading_s = self.output_tokens.median * self.token_s
        return self.first_token_s + reading_s + self.think_s.median


def generate(made: Conversations, seed: int) -> Trace:
    """The same for the same parameters and seed; a user's stay the same whatever the others are."""
    users = [_of_user(made, user, random.Random(f"{seed}/{user}")) for user in range(made.users)]
    arrivals = tuple(merge(*users, key=lambda arrival: arrival.t_s))
    if len(arrivals) > ARRIVALS_MAX:
        raise InvalidInput(f"conversations: more than {ARRIVALS_MAX} turns")
    return Trace(name="conversations", arrivals=arrivals, duration_s=made.duration_s)


def _of_user(made: Conversations, user: int, draw: random.Random) -> Iterator[Arrival]:
    at_s, number = draw.uniform(0.0, made.cycle_s), 0
    while at_s < made.duration_s:
        turns = list(_turns(made, draw))
        for turn, (input_tokens, output_tokens, pause_s) in enumerate(turns):
            if at_s >= made.duration_s:
                return
            yield Arrival(
                t_s=round(at_s, 6),
                function=user % made.functions,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                turn=Turn(
                    conversation=number * made.users + user,
                    left=len(turns) - turn - 1,
                    system_tokens=made.system_tokens,
                ),
            )
            at_s += pause_s
        number += 1


def _turns(made: Conversations, draw: random.Random) -> Iterator[tuple[int, int, float]]:
    """The turns of one conversation: tokens of the prompt and of the answer, and seconds until the
    next turn.
    """
    said = made.system_tokens
    for turn in range(TURNS_MAX):
        question, output = (
            int(length.draw(draw)) for length in (made.question_tokens, made.output_tokens)
        )
        pause_s = made.first_token_s + output * made.token_s + made.think_s.draw(draw)
        if turn and said + question + output > made.context_tokens_max:
            return
        said += question
        yield said, output, pause_s
        said += output
        if draw.random() * made.turns_mean < 1.0:
            return
