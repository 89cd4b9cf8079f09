"""The schedule of a node as the turn rule sees it: one run queue for each instance that has work.

The node core fills run queues from what runs on it and asks its turn rule who is next; the
controller core fills them from its view of a node, and `mesh.request.shadow` rolls them forward.
Both decide by the same rule over the same view. Times of day are in the owner's clock.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from mesh.compute.times import Times
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.slo import next_due_s
from mesh.domain.steps import Decode
from mesh.policy.rules.decode_capacity import Job, spare_s

NOBODY = RequestId("")
"""Whoever asks by sums alone names no request."""


@dataclass(slots=True, kw_only=True, eq=False)
class Prompt:
    """A request before its next token, with prompt tokens still to compute."""

    request_id: RequestId = NOBODY
    left: int
    """Tokens to compute."""
    past: int
    """Tokens of it in the cache already."""
    due_s: float
    """When its next token is due."""
    slack_s: float = inf
    """See `mesh.domain.slo.next_due_s`."""
    tpot_s: float = 0.0
    """The pace of its tokens; 0: that of its run queue, infinite: it has one token alone."""
    first: bool = True
    """Whether its next token is its first."""
    mates: "list[Prompt]" = field(default_factory=list)
    """For shadow validation: prompts that begin once it is computed, as their beginning is its."""

    @property
    def decodes(self) -> bool:
        """Whether further tokens follow its first one."""
        return self.tpot_s < inf


@dataclass(slots=True, kw_only=True, eq=False)
class PaceClass:
    """Requests past their prompts that have one pace. Where a decode gives each of them a token,
    the least deadline that can be kept stands for all.
    """

    tpot_s: float
    """From one token to the next as planned: `Pace.token_s`."""
    batch: int = 0
    """Requests past their prompts."""
    context_tokens: int = 0
    """The contexts of the batch, summed."""
    dues_s: list[float] = field(default_factory=list)
    """When the next tokens of the batch are due; see `add`. In no order, or in that of `running`;
    a single one for all, once they have decoded together.
    """
    running: list[RequestId] = field(default_factory=list)
    """The batch, by name."""
    due_s: float = field(default=inf, init=False)
    """The earliest of them that can still be kept."""
    late_s: float = field(default=inf, init=False)
    """The earliest of them that cannot: it is late for the scheduler, whatever it does."""
    owed_s: float = field(default=inf, init=False)
    """For shadow validation: the deadline that its next decode has to keep."""

    def add(self, due_s: float, now_s: float) -> None:
        """Count a request of the batch, by the deadline of its next token."""
        self.dues_s.append(due_s)
        if due_s < now_s:
            self.late_s = min(self.late_s, due_s)
        else:
            self.due_s = min(self.due_s, due_s)

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
        """Each of the batch has a token, and is due the next a pace later, who was late from now on
        (`mesh.domain.slo.next_due_s`).
        """
        due_s = min(self.due_s, self.late_s)
        self.due_s, self.late_s = max(due_s, end_s) + self.tpot_s, inf
        self.dues_s = [self.due_s]

    def go_on_from(self, due_s: float) -> None:
        """Its next token is due then, after decodes that kept all deadlines."""
        self.due_s = self.owed_s = due_s
        self.dues_s = [due_s]


@dataclass(slots=True, kw_only=True, eq=False)
class RunQueue(PaceClass):
    """The work of one instance. What it has of a pace class is about all of its batch: the earliest
    deadlines, and the quickest pace, prompts included.
    """

    instance_id: InstanceId
    times: Times
    classes: list[PaceClass] = field(default_factory=list)
    """The batch by pace, or by who decodes together; empty while it is one class by itself."""
    oldest_s: float = inf
    """Arrival of the oldest request."""
    prompts: list[Prompt] = field(default_factory=list)
    """In the order in which the engine computes them: that of submission."""
    passed: int = 0
    """Turns in a row that went to a run queue of more headroom."""
    out: bool = False
    """Whether its weights are off the device. Only rules that are `whole` see such run queues; the
    three numbers below are set for these rules alone.
    """
    copy_s: float = 0.0
    """The seconds in which its weights come, at the rate of the node's last swap."""
    turns: int = 0
    """The turns that it has had since another one had the last; 0 where another one had it."""
    turns_s: float = 0.0
    """The seconds since the first of them began."""
    decode_s: float = field(default=0.0, init=False)
    """The time of a decode of the batch as it is; `predict` sets it."""
    _profiled_s: float = field(default=0.0, init=False)
    """The same by the profile alone."""
    _lookahead_tokens: int = field(default=0, init=False)
    _chunk: tuple[int, int, int, float] = field(default=(0, 0, 0, 0.0), init=False)
    """Prompt tokens, past ones, the batch and the factor of the last chunk that was asked for: a
    rule asks several times for the one that it grants.
    """
    _chunk_added_s: float = field(default=0.0, init=False)
    """The seconds that it adds to a decode, or takes alone."""

    @property
    def parts(self) -> Sequence[PaceClass]:
        """Its classes, of which it is the only one where it has a single pace."""
        return self.classes or (self,)

    def place(self, *, out: bool, copy_s: float, turns: int, turns_s: float) -> None:
        """Set what rules that are `whole` know of its place on the node."""
        self.out, self.copy_s, self.turns, self.turns_s = out, copy_s, turns, turns_s

    def predict(self, lookahead_tokens: int = 0) -> None:
        """Set `decode_s`, for contexts longer by `lookahead_tokens`; after a change of batch."""
        self._lookahead_tokens = lookahead_tokens
        if self.batch:
            context = self.context_tokens / self.batch + lookahead_tokens
            self._profiled_s = self.times.profiled_decode_s(self.batch, context)
        else:
            self._profiled_s = 0.0
        self.decode_s = self._profiled_s * self.times.factor

    def decode_s_of(self, requests: int) -> float:
        """Seconds of a decode of so many of the batch."""
        if not requests:
            return 0.0
        context = self.context_tokens / self.batch + self._lookahead_tokens
        return self.times.decode_s(requests, context)

    def slow_down(self, factor: float) -> None:
        """Iterations take so many times as long as their profile says, from now on."""
        self.times.factor = factor
        self.decode_s = self._profiled_s * factor

    def sort_out(self, now_s: float) -> None:
        """Set `due_s` and `late_s` anew, by what a decode that begins now can still keep."""
        self.sort_dues(now_s + self.decode_s)

    def sort_dues(self, done_s: float) -> None:
        """Set `due_s` and `late_s` anew, by what can be kept by tokens that come then."""
        if not self.classes:
            PaceClass.sort_dues(self, done_s)
            return
        for part in self.classes:
            part.sort_dues(done_s)
        self.gather()

    def divide(self, running: Iterable[tuple[RequestId, float, int, float]], now_s: float) -> None:
        """Set its classes, by requests past their prompts: their deadlines, tokens and paces."""
        for request_id, due_s, tokens, tpot_s in running:
            part = self._class_of(tpot_s)
            part.batch += 1
            part.context_tokens += tokens
            part.running.append(request_id)
            part.add(due_s, now_s)
        self.gather()

    def quicken(self, tpot_s: float) -> None:
        """A request of this pace is on its way to it."""
        if tpot_s < self.tpot_s:
            if self.batch and not self.classes:
                self.classes.append(self._as_class())
            self.tpot_s = tpot_s

    def join(self, prompt: Prompt, end_s: float) -> None:
        """A prompt is computed: with its first token its request is part of the batch."""
        tpot_s = prompt.tpot_s or self.tpot_s
        due_s = next_due_s(prompt.due_s, tpot_s, end_s, slack_s=prompt.slack_s)
        into: PaceClass = self
        if self.classes or tpot_s != self.tpot_s:
            if self.batch and not self.classes:
                self.classes.append(self._as_class())
            into = self._class_of(tpot_s)
            into.batch += 1
            into.context_tokens += prompt.past
        self.batch += 1
        self.context_tokens += prompt.past
        into.add(due_s, end_s)
        into.running.append(prompt.request_id)
        if into is not self:
            into.owed_s = min(into.owed_s, due_s)
            self.gather()

    def decoding(self, decode: Decode) -> Sequence[PaceClass]:
        """The classes of those who decode; some are divided for it."""
        if decode is None:
            return () if not self.batch else tuple(self.classes) or (self,)
        found = []
        for part in tuple(self.parts):
            named = [request_id for request_id in part.running if request_id in decode]
            if named and len(named) < part.batch:
                if not self.classes:
                    part = self._as_class()
                    self.classes.append(part)
                part = self._take_out(part, named)
            if named:
                found.append(part)
        return found

    def gather(self) -> None:
        """Set what is said of all classes together."""
        self.due_s = min([part.due_s for part in self.classes], default=inf)
        self.late_s = min([part.late_s for part in self.classes], default=inf)

    def _as_class(self) -> PaceClass:
        """All of its batch as a class beside others."""
        made = PaceClass(
            tpot_s=self.tpot_s,
            batch=self.batch,
            context_tokens=self.context_tokens,
            dues_s=self.dues_s,
            running=self.running,
        )
        made.due_s, made.late_s, made.owed_s = self.due_s, self.late_s, self.owed_s
        return made

    def _class_of(self, tpot_s: float) -> PaceClass:
        for part in self.classes:
            if part.tpot_s == tpot_s:
                return part
        made = PaceClass(tpot_s=tpot_s)
        self.classes.append(made)
        return made

    def _take_out(self, part: PaceClass, named: list[RequestId]) -> PaceClass:
        """A class of some of another's requests. Their contexts count as the mean."""
        made = PaceClass(tpot_s=part.tpot_s, batch=len(named), running=named)
        made.context_tokens = part.context_tokens * len(named) // part.batch
        known = len(part.dues_s) == part.batch
        dues_s = part.dues_s if known else [min(part.due_s, part.late_s)] * part.batch
        rows = list(zip(part.running, dues_s, strict=True))
        kept_s = part.due_s
        part.batch -= made.batch
        part.context_tokens -= made.context_tokens
        part.running = [request_id for request_id, _ in rows if request_id not in named]
        for into in (part, made):
            mine = set(into.running)
            into.dues_s = [due_s for request_id, due_s in rows if request_id in mine]
            into.due_s = min([due_s for due_s in into.dues_s if due_s >= kept_s], default=inf)
            into.late_s = min([due_s for due_s in into.dues_s if due_s < kept_s], default=inf)
            into.owed_s = into.due_s
        self.classes.append(made)
        return made

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens to compute, of all requests."""
        return sum(prompt.left for prompt in self.prompts)

    @property
    def first_due_s(self) -> float:
        """When its next token is due, late or not; infinite where it has nothing to compute."""
        return min((self.due_s, self.late_s, *[prompt.due_s for prompt in self.prompts]))

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
        batch, times = self.batch, self.times
        of = tokens, past_tokens, batch, times.factor
        if of != self._chunk:
            self._chunk = of
            if batch:
                self._chunk_added_s = times.chunk_s(tokens, past_tokens, batch)
            else:
                self._chunk_added_s = times.prefill_s(tokens, past_tokens)
        return self.decode_s + self._chunk_added_s if batch else self._chunk_added_s


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
