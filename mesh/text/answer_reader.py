"""The parts of a chat's answer, told apart while it comes: thoughts, words, calls of tools.

Before: the answer's text, in pieces. After: whoever writes it in a protocol.
"""

from mesh.domain.text import ToolFormat
from mesh.domain.values import dataclass
from mesh.text import tool_calls
from mesh.text.thoughts import Thinking, Thought, ThoughtReader
from mesh.text.tool_calls import Text, ToolReader

Said = Thought | tool_calls.Said


@dataclass(frozen=True, slots=True)
class Reading:
    """What an answer may hold beside words."""

    thinking: Thinking | None = None
    tools: ToolFormat = ToolFormat.NONE
    """How it calls tools, where it was given some."""
    calls_alone: bool = False
    """It has to call some: what is no call is one that was cut."""

    def __bool__(self) -> bool:
        return self.thinking is not None or self.tools is not ToolFormat.NONE


NOTHING_ELSE = Reading()


class AnswerReader:
    """One answer."""

    def __init__(self, reading: Reading) -> None:
        self._thoughts = None if reading.thinking is None else ThoughtReader(reading.thinking)
        self._calls = None
        if reading.tools is not ToolFormat.NONE:
            self._calls = ToolReader(reading.tools, calls_alone=reading.calls_alone)
        self.thought_tokens = 0
        """What the model has thought in. Of the piece that closes the thought one is the mark, and
        the others by their share of the text.
        """

    @property
    def calls(self) -> int:
        return 0 if self._calls is None else self._calls.calls

    def push(self, text: str, tokens: int = 0) -> list[Said]:
        """What is known by a further piece of the answer, of so many tokens."""
        if self._thoughts is None:
            return [*self._answered(text)]
        was_amid = self._thoughts.amid
        thought, answer = self._thoughts.push(text)
        if self._thoughts.amid:
            self.thought_tokens += tokens
        elif was_amid and thought:
            share = len(thought) / len(thought + answer)
            self.thought_tokens += round(max(tokens - 1, 0) * share)
        said: list[Said] = [Thought(thought)] if thought else []
        return [*said, *self._answered(answer)]

    def finish(self) -> list[Said]:
        """What is left at the answer's end."""
        said: list[Said] = []
        if self._thoughts is not None:
            thought, answer = self._thoughts.finish()
            said = [*([Thought(thought)] if thought else []), *self._answered(answer)]
        return said if self._calls is None else [*said, *self._calls.finish()]

    def _answered(self, text: str) -> list[tool_calls.Said]:
        if not text:
            return []
        return [Text(text)] if self._calls is None else self._calls.push(text)
