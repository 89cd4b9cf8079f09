"""An answer by its blocks in turn, thoughts, words and calls of tools: each begins, grows, ends.

Messages and Responses tell answers so. Before: `generation`, which has the events of the gateway.
After: the writer of either, which says how its protocol tells each of these steps.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import field
from typing import Any, Literal

from mesh.domain.invocation import Accepted, Finished, Tokens
from mesh.domain.values import dataclass
from mesh.http.answers import AnswerTo, Writer
from mesh.http.logprobs import TokenLogprob, chat_logprobs
from mesh.http.refusals import encoded
from mesh.text.answer_reader import AnswerReader, Said
from mesh.text.thoughts import Thought
from mesh.text.tool_calls import Arguments, CallBegun, Text


@dataclass(slots=True, kw_only=True)
class Block:
    kind: Literal["thought", "text", "call"]
    number: int
    name: str = ""
    """The tool's, of a call."""
    text: str = ""
    """So far; of a call its arguments, as JSON."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Those of a text's tokens, where they were asked for."""


class BlockWriter(Writer):
    """The one answer of a call."""

    def __init__(self, to: AnswerTo) -> None:
        super().__init__(to)
        self._reader = AnswerReader(to.reading)
        self._cached_tokens = 0
        self._blocks: list[Block] = []
        self._is_open = False
        """The last of the blocks may grow."""
        self._untold: list[TokenLogprob] = []
        """The log-probabilities of tokens since the last words."""

    def _begun(self, block: Block) -> bytes:
        """How a block is told that has just begun."""
        return b""

    @abstractmethod
    def _grown(self, block: Block, more: str, logprobs: list[TokenLogprob]) -> bytes:
        """How `more` of a block is told."""

    @abstractmethod
    def _closed(self, block: Block, end: Finished | None) -> bytes:
        """How the end of a block is told; `end` is the answer's, if it ends with the block."""

    @abstractmethod
    def _ended(self, end: Finished) -> bytes:
        """What comes after all blocks."""

    @abstractmethod
    def _answer(self, end: Finished) -> dict[str, Any]:
        """The whole answer."""

    def accepted(self, index: int, accepted: Accepted) -> None:
        super().accepted(index, accepted)
        self._cached_tokens = accepted.cached_prompt_tokens

    def piece(self, index: int, tokens: Tokens) -> bytes:
        if self._to.bytes_of is not None and tokens.logprobs:
            self._untold += chat_logprobs(tokens, self._to.bytes_of).content
        return self._say(self._reader.push(tokens.text, len(tokens.token_ids)))

    def ending(self, index: int, end: Finished) -> bytes:
        return self._last(end) + self._ended(end)

    def whole(self, answers: Sequence[Sequence[Tokens]], ends: Sequence[Finished]) -> bytes:
        for part in answers[0]:
            self.piece(0, part)
        self._last(ends[0])
        return encoded(self._answer(ends[0]))

    def _say(self, said: Sequence[Said]) -> bytes:
        return b"".join(map(self._told_as, said))

    def _last(self, end: Finished) -> bytes:
        """What was held back, and the end of the open block."""
        return self._say(self._reader.finish()) + self._close(end)

    def _told_as(self, one: Said) -> bytes:
        match one:
            case CallBegun(name=name):
                return self._open("call", name)
            case Arguments(text=text):
                return self._grow(text)
            case Text(text=text):
                return self._open("text") + self._grow(text)
            case Thought(text=text):
                return self._open("thought") + self._grow(text)

    def _open(self, kind: Literal["thought", "text", "call"], name: str = "") -> bytes:
        """Nothing where the open block is of the kind; each call has its own."""
        if self._is_open and self._blocks[-1].kind == kind != "call":
            return b""
        closed = self._close()
        block = Block(kind=kind, number=len(self._blocks), name=name)
        self._blocks.append(block)
        self._is_open = True
        return closed + self._begun(block)

    def _grow(self, more: str) -> bytes:
        block, logprobs = self._blocks[-1], self._untold
        self._untold = []
        block.text += more
        if block.kind == "text":
            block.logprobs += logprobs
        return self._grown(block, more, logprobs)

    def _close(self, end: Finished | None = None) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        block = self._blocks[-1]
        if block.kind == "text":
            block.logprobs += self._untold
        return self._closed(block, end)

    @property
    def _thought_tokens(self) -> int | None:
        """`None` where the model does not think aloud."""
        return self._reader.thought_tokens if self._to.reading.thinking is not None else None
