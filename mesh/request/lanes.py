"""The schedule of a node as the turn rule sees it: one lane for each instance that has work.

The node core fills lanes from what runs on it and asks `mesh.request.turns` who is next; the
controller core fills them from its view of a node, and `mesh.request.shadow` rolls them forward.
Both decide by the same rule over the same picture. Times of day are in the owner's clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from mesh.compute.times import Times
from mesh.domain.ids import InstanceId


@dataclass(slots=True, kw_only=True, eq=False)
class Prompt:
    """A request before its next token, with prompt tokens still to compute."""

    left: int
    """Tokens to compute."""
    past: int
    """Tokens of it in the cache already."""
    due_s: float
    """When its next token is due."""


@dataclass(slots=True, kw_only=True, eq=False)
class Lane:
    """The work of one instance. All its requests have the same TPOT SLO, and each decode gives
    every one of its batch a token, so that the least deadline stands for all of them.
    """

    instance_id: InstanceId
    times: Times
    tpot_s: float
    batch: int = 0
    """Requests past their prompts."""
    context_tokens: int = 0
    """Of the batch, summed."""
    due_s: float = inf
    """When the batch's next token is due: the earliest among those that can still be in time."""
    late_s: float = inf
    """The earliest deadline among those of the batch that have missed it already."""
    oldest_s: float = inf
    """Arrival of the oldest request."""
    prompts: list[Prompt] = field(default_factory=list)
    """In the order in which the engine computes them: that of submission."""
    passed: int = 0
    """Turns in a row that went to a lane of more headroom."""
    decode_s: float = 0.0
    """Of the batch as it is; set by `predict`."""

    def predict(self, lookahead_tokens: int = 0) -> None:
        """Set `decode_s`, for contexts longer by `lookahead_tokens`; after a change of batch."""
        if self.batch:
            context = self.context_tokens / self.batch + lookahead_tokens
            self.decode_s = self.times.decode_s(self.batch, context)
        else:
            self.decode_s = 0.0

    def add(self, due_s: float, now_s: float) -> None:
        """Count a request of the batch, by the deadline of its next token."""
        if due_s < now_s:
            self.late_s = min(self.late_s, due_s)
        else:
            self.due_s = min(self.due_s, due_s)

    @property
    def urgent_s(self) -> float:
        """The earliest deadline in the lane, missed or not; infinite when it has no work."""
        due_s = min(self.due_s, self.late_s)
        for prompt in self.prompts:
            due_s = min(due_s, prompt.due_s)
        return due_s

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens to compute, of all requests."""
        return sum(prompt.left for prompt in self.prompts)

    def turn_s(self, prefill_tokens: int) -> float:
        """Seconds of one iteration: a decode of the batch and so many prompt tokens."""
        if not prefill_tokens:
            return self.decode_s
        past = self.prompts[0].past
        if self.batch:
            return self.decode_s + self.times.chunk_s(prefill_tokens, past)
        return self.times.prefill_s(prefill_tokens, past)


def slack_s(lane: Lane, lanes: Sequence[Lane], now_s: float) -> float:
    """How long an iteration of `lane` may take now without making a request of another lane late:
    the others' decodes then follow in the order of their deadlines. Requests that are late already
    do not count, and neither do prompts.
    """
    others = [(other.due_s, other.decode_s) for other in lanes if other is not lane]
    others.sort()
    slack = inf
    busy_until_s = now_s
    for due_s, decode_s in others:
        busy_until_s += decode_s
        slack = min(slack, due_s - busy_until_s)
    return slack
