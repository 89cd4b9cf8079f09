"""What prompts of the simulator are made of: pieces, which others may begin with, too, or all that
was said in a conversation.

A piece is an id and a number of tokens; the same id stands for the same tokens, whoever sends them.
Before: workloads, which give arrivals their content. After: `cluster`, which makes prompts of it.
"""

import random
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from mesh_workloads.trace import Turn

if TYPE_CHECKING:
    from mesh.sim.cluster import Arrival

Piece = tuple[int, int]
"""Its id, at least 0, and its tokens."""
STRIDE = 1 << 24
"""Between the first token ids of two pieces: longer ones there are none."""
LEAST_SHARE, MOST_SHARE = 0.3, 1.0
"""The bounds of the share of a prompt that its shared beginning makes up."""


def tokens_of(content: Iterable[Piece], size: int, own: int) -> tuple[int, ...]:
    """This many token ids: those of the pieces, and for the rest those of a piece that is the `own`
    one's.
    """
    made: list[int] = []
    for piece, tokens in content:
        made.extend(range(piece * STRIDE, piece * STRIDE + tokens))
    left = max(size - len(made), 0)
    made.extend(range(-own * STRIDE, -own * STRIDE + left))
    return tuple(made[:size])


class Said:
    """What was said in conversations that go on, their answers as engines give them."""

    def __init__(self) -> None:
        self._said: dict[int, tuple[int, ...]] = {}

    def prompt(self, turn: Turn, function: int, size: int, own: int) -> tuple[int, ...]:
        """The prompt of this many tokens: what was said, then the question, which is the `own`
        one's. The first begins with the system prompt of its function.
        """
        said = self._said.get(turn.conversation)
        if said is None:
            return tokens_of([(function, turn.system_tokens)], size, own)
        return (*said, *tokens_of((), max(size - len(said), 0), own))[:size]

    def answer(self, turn: Turn, prompt: tuple[int, ...], answer: tuple[int, ...]) -> None:
        if turn.left:
            self._said[turn.conversation] = prompt + answer
        else:
            self._said.pop(turn.conversation, None)


def with_beginnings(
    arrivals: "Iterable[Arrival]", beginnings: int, seed: int
) -> "Iterator[Arrival]":
    """Each begins with a part of one of so many texts, as callers of one system prompt do."""
    rng = random.Random(seed)
    for arrival in arrivals:
        share = rng.uniform(LEAST_SHARE, MOST_SHARE)
        piece = rng.randrange(beginnings), int(arrival.input_tokens * share)
        yield arrival._replace(content=(piece,))
