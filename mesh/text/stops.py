"""Stop strings: the output ends before the first of them that is complete.

Text that could be the beginning of a stop string is held back until it is clear that it is not.
"""

from collections.abc import Sequence


class StopMatcher:
    """Watches the text of one request. With no stop strings, text passes through."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that may be given out. Once `stopped`, nothing more may."""
        if self.stopped:
            return ""
        if not self._stops or not text:
            return text
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        held = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What was held back, when the output ends for another reason."""
        text, self._held = self._held, ""
        return text


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
