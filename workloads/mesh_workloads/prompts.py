"""Prompts of exactly the lengths that a plan asks for, in tokens, from a text that is shipped.

The text is fifty sentences that were written for this. A prompt is sentences drawn by the seed and
the call's number, cut where it is long enough: prompts differ from each other, and are the same in
every run. Before: `replay_plan`. After: whoever sends the calls.
"""

import random
from collections.abc import Callable, Sequence
from importlib.resources import files

from mesh.domain.errors import InvalidInput

Encode = Callable[[str], Sequence[int]]
"""A tokenizer: a text's token ids, without any that begin or end it."""
Sentences = tuple[tuple[int, ...], ...]
"""One at least, each of one token at least, in tokens with the space before it."""


class Prompts:
    """Writes the prompts of deployments that share a tokenizer."""

    def __init__(self, sentences: Sentences, *, seed: int = 0) -> None:
        self.sentences = sentences
        self._seed = seed

    def prompt(self, number: int, tokens: int) -> tuple[int, ...]:
        """The token ids of call `number`'s prompt, as many as asked for."""
        draw = random.Random(f"{self._seed}/{number}/prompt")
        ids: list[int] = []
        while len(ids) < tokens:
            ids += self.sentences[int(draw.random() * len(self.sentences))]
        return tuple(ids[:tokens])


def encoded(encode: Encode) -> Sentences:
    """Those that are shipped. Raises InvalidInput when the tokenizer makes no tokens of them."""
    sentences = (tuple(encode(f" {sentence}")) for sentence in sentences_shipped())
    found = tuple(ids for ids in sentences if ids)
    if not found:
        raise InvalidInput("the tokenizer makes no tokens of the text for prompts")
    return found


def sentences_shipped() -> tuple[str, ...]:
    """A line each of `prompts.txt`."""
    text = files("mesh_workloads").joinpath("prompts.txt").read_text(encoding="utf-8")
    return tuple(text.splitlines())
