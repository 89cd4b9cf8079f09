"""What a model thinks aloud before it answers: `<think>…</think>`, as Qwen3 and DeepSeek say it.

Some chat templates open the thought themselves, some close it at once when they are told that none
is wanted; so it is the end of a rendered prompt that tells how an answer begins. Before: the
answer's text, in pieces. After: `answer_reader`.
"""

from mesh.domain.values import dataclass
from mesh.text.stops import overlap

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Thinking:
    """How an answer begins, of a model that thinks aloud."""

    amid: bool
    """In a thought that the prompt has opened; else with one, or without."""
    by_tokens: bool = False
    """The marks are tokens of their own."""


def thinking_after(prompt: str, *, by_tokens: bool = False) -> Thinking | None:
    """What follows the prompt of a model that thinks aloud; None: the answer at once."""
    end = prompt.rstrip()
    if end.endswith(CLOSE):
        return None
    return Thinking(amid=end.endswith(OPEN), by_tokens=by_tokens)


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


class ThoughtReader:
    """One answer, up to the end of its thought. Blanks around the marks are nobody's words."""

    def __init__(self, thinking: Thinking) -> None:
        self.amid = thinking.amid
        self.over = False
        """All that is pushed now is the answer."""
        self._text = ""
        """Not told yet."""
        self._told = False
        """A part of the thought is."""

    def push(self, text: str) -> tuple[str, str]:
        """More of the thought, and what of the answer follows it."""
        self._text += text
        if not self.amid and not self.over:
            self._begin()
        if self.amid:
            return self._thought()
        return "", self._answer() if self.over else ""

    def finish(self) -> tuple[str, str]:
        """What was held back, at the answer's end."""
        left, self._text = self._text, ""
        return (left.rstrip(), "") if self.amid else ("", left)

    def _begin(self) -> None:
        begun = self._text.lstrip()
        if begun.startswith(OPEN):
            self.amid, self._text = True, begun[len(OPEN) :]
        elif not OPEN.startswith(begun):
            self.over = self._told = True

    def _thought(self) -> tuple[str, str]:
        thought, closed, answer = self._text.partition(CLOSE)
        if closed:
            self.amid, self.over, self._text = False, True, answer
        else:
            thought = thought[: len(thought) - overlap(thought, CLOSE)]
        said = thought.rstrip()
        if not closed:
            self._text = self._text[len(said) :]
        if not self._told:
            said = said.lstrip()
        self._told = self._told or bool(said)
        if closed:
            self._told = False
            return said, self._answer()
        return said, ""

    def _answer(self) -> str:
        """What is pushed, without the blanks that follow a thought."""
        text = self._text if self._told else self._text.lstrip()
        self._told, self._text = self._told or bool(text), ""
        return text
