"""The conversations: a system prompt that all share, and turns of a few words each.

Token ids are drawn, so that every contender computes the same prompts; an answer's are its own.
Before: `__main__`. After: `contenders`.
"""

import random
from dataclasses import dataclass, field

from bench.engine.workload import THREADS as THREADS
from mesh.domain.errors import EngineError

SYSTEM_TOKENS = 420
"""About 400 words."""
TURN_TOKENS = 42
"""The tokens of a turn's question, with what a chat template puts around it."""
OUTPUT_TOKENS = 32
TURNS = 8
CONTEXT_TOKENS = 2048
CONVERSATIONS = (1, 4)
"""At once."""
TOKEN_IDS = range(1000, 40_000)


@dataclass(slots=True)
class Conversation:
    """`history` is all that has been said."""

    history: list[int]
    rng: random.Random
    first_token_s: list[float] = field(default_factory=list)
    """The TTFT of each turn."""
    made_up: bool = False
    """An answer's ids were not told, and it goes on with others: what is cached of that is lost."""

    def ask(self) -> list[int]:
        """The next prompt: the whole history with the next question."""
        self.history += self.rng.choices(TOKEN_IDS, k=TURN_TOKENS)
        return list(self.history)

    def hear(self, first_token_s: float, answer: list[int]) -> None:
        """Raises EngineError for an answer without a token."""
        if not first_token_s > 0.0:
            raise EngineError(f"turn {len(self.first_token_s) + 1} was answered without a token")
        self.first_token_s.append(first_token_s)
        if len(answer) != OUTPUT_TOKENS:
            self.made_up = True
            answer = self.rng.choices(TOKEN_IDS, k=OUTPUT_TOKENS)
        self.history += answer


def conversations(count: int, seed: int) -> list[Conversation]:
    """They share the system prompt, and no other seed does."""
    system = random.Random(f"system {seed}").choices(TOKEN_IDS, k=SYSTEM_TOKENS)
    return [Conversation(list(system), random.Random(f"{n} {seed}")) for n in range(count)]
