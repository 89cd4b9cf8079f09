"""The schedule of a node as the turn rule sees it: one run queue for each instance that has work.

The node core fills run queues from what runs on it and asks its turn rule who is next; the
controller core fills them from its view of a node, and `mesh.request.shadow` rolls them forward.
Both decide by the same rule over the same view. Times of day are in the owner's clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from mesh.compute.times import Times
from mesh.domain.ids import InstanceId
from mesh.policy.rules.decode_capacity import Job, spare_s


@dataclass(slots=True, kw_only=True, eq=False)
class Prompt:
    """A request before its next token, with prompt tokens still to compute."""

    left: int
    """Tokens to compute."""
    past: int
    """Tokens of it in the cache already."""
    due_s: float
    """When its next token is due."""
    slack_s: float = inf
    """See `mesh.domain.slo.next_due_s`."""


@dataclass(slots=True, kw_only=True, eq=False)
class RunQueue:
    """The work of one instance. Each decode gives every one of its batch a token, so that the least
    deadline that can be kept stands for all, and the quickest pace.
    """

    instance_id: InstanceId
    times: Times
    tpot_s: float
    """From one token to the next as planned: `Pace.token_s`."""
    batch: int = 0
    """Requests past their prompts."""
    context_tokens: int = 0
    """Of the batch, summed."""
    dues_s: list[float] = field(default_factory=list)
    """When the next tokens of the batch are due, in no order; see `add`."""
    due_s: float = field(default=inf, init=False)
    """The earliest of them that can still be kept."""
    late_s: float = field(default=inf, init=False)
    """The earliest of them that cannot: it is late for the scheduler, whatever it does."""
    oldest_s: float = inf
    """Arrival of the oldest request."""
    prompts: list[Prompt] = field(default_factory=list)
    """In the order in which the engine computes them: that of submission."""
    passed: int = 0
    """Turns in a row that went to a run queue of more headroom."""
    decode_s: float = field(default=0.0, init=False)
    """Of the batch as it is; set by `predict`."""
    _profiled_s: float = field(default=0.0, init=False)
    """The same by the profile alone."""

    def predict(self, lookahead_tokens: int = 0) -> None:
        """Set `decode_s`, for contexts longer by `lookahead_tokens`; after a change of batch."""
        if self.batch:
            context = self.context_tokens / self.batch + lookahead_tokens
            self._profiled_s = self.times.profiled_decode_s(self.batch, context)
        else:
            self._profiled_s = 0.0
        self.decode_s = self._profiled_s * self.times.factor

    def slow_down(self, factor: float) -> None:
        """Iterations take so many times as long as their profile says, from now on."""
        self.times.factor = factor
        self.decode_s = self._profiled_s * factor

    def add(self, due_s: float, now_s: float) -> None:
        """Count a request of the batch, by the deadline of its next token."""
        self.dues_s.append(due_s)
        if due_s < now_s:
            self.late_s = min(self.late_s, due_s)
        else:
            self.due_s = min(self.due_s, due_s)

    def sort_out(self, now_s: float) -> None:
        """Set `due_s` and `late_s` anew, by what a decode that begins now can still keep."""
        self.sort_dues(now_s + self.decode_s)

    def sort_dues(self, done_s: float) -> None:
        """Set `due_s` and `late_s` anew, by what can be kept by tokens that come then."""
        dues_s = self.dues_s
        earliest_s = min(dues_s, default=inf)
        if earliest_s >= done_s:
            self.due_s, self.late_s = earliest_s, inf
        else:
            self.late_s = earliest_s
            self.due_s = min([due_s for due_s in dues_s if due_s >= done_s], default=inf)

    def decoded(self, end_s: float) -> None:
        """The batch has its tokens: each is due a TPOT SLO later, who was late from now on
        (`mesh.domain.slo.next_due_s`).
        """
        due_s = min(self.due_s, self.late_s)
        self.due_s, self.late_s = max(due_s, end_s) + self.tpot_s, inf
        self.dues_s = [self.due_s]

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens to compute, of all requests."""
        return sum(prompt.left for prompt in self.prompts)

    def turn_s(self, prefill_tokens: int) -> float:
        """Seconds of one iteration: a decode of the batch and so many prompt tokens."""
        if not prefill_tokens:
            return self.decode_s
        return self._chunk_s(prefill_tokens, self.prompts[0].past)

    def at_once_s(self, prompt: Prompt, prefill_tokens_max: int) -> float:
        """Seconds of the iterations that compute a prompt in the largest chunks."""
        seconds, left, past = 0.0, prompt.left, prompt.past
        while left > 0:
            tokens = min(left, prefill_tokens_max)
            seconds += self._chunk_s(tokens, past)
            left -= tokens
            past += tokens
        return seconds

    def _chunk_s(self, tokens: int, past_tokens: int) -> float:
        if self.batch:
            return self.decode_s + self.times.chunk_s(tokens, past_tokens, self.batch)
        return self.times.prefill_s(tokens, past_tokens)


def slack_s(queue: RunQueue, queues: Sequence[RunQueue], now_s: float) -> float:
    """How long an iteration of `queue` may take now without making a token of the running requests
    late, now or later, if decodes in the order of their deadlines follow. Requests that are late
    already do not count, and neither do prompts.
    """
    jobs: list[Job] = []
    for other in queues:
        if other.due_s < inf:
            # Its own tokens of now come with the iteration itself.
            due_s = other.due_s + other.tpot_s if other is queue else other.due_s
            jobs.append((due_s, other.decode_s, other.tpot_s))
    return min(spare_s(jobs, now_s), queue.due_s - now_s)
