"""What the controller core knows of a request: its deadlines, where it runs, why it waits.

Owned by the controller core, like all entries. `InstanceEntry.add` and `remove` call `submitted`
and `left`, `expect` and `expect_no_more` call `wait_for`, so that a request and its instance never
disagree on where it runs, or will.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from mesh.core.controller.state.refusals import RequestRefusals
from mesh.domain.ids import DeploymentName, NodeId, RequestId
from mesh.domain.lifecycle import REQUEST, RequestState, advance
from mesh.domain.request import Request, RequestTokens, Resumed
from mesh.domain.slo import PACE, Pace, Slo, next_due_s
from mesh.domain.values import replace

if TYPE_CHECKING:
    from mesh.core.controller.state.instance import InstanceEntry
    from mesh.core.controller.state.migration import Migration


@dataclass(slots=True, kw_only=True, eq=False)
class RequestEntry:
    original: Request
    """As its client sent it."""
    slo: Slo
    has_own_slo: bool = False
    """Not that of its deployment: what others were refused for says nothing of it."""
    pace: Pace = PACE
    """As its policy has its tokens planned."""
    arrival_s: float
    state: RequestState = RequestState.QUEUED
    queued_at_s: float = 0.0
    attempt: int = 0
    """Its submission to the node where it runs, or ran last."""
    submissions: int = 0
    """To nodes so far, those of copies included."""
    moves: int = 0
    """Migrations begun: submissions of copies."""
    migration: "Migration | None" = None
    """It, or what it is a copy of, moves."""
    drawn_apart: bool = False
    """A copy of it drew another token, or was never level: the next one draws none beside it."""
    output_tokens: list[int] = field(default_factory=list)
    instance: "InstanceEntry | None" = None
    required_blocks: int = 0
    """KV blocks that it is expected to need where it runs (LLM-Mesh eq. 2), but for shared ones."""
    shared_blocks: int = 0
    """Blocks of its prompt with which another answer of its call is counted there."""
    evictions: int = 0
    accepted: bool = False
    """Its client has been told which deadlines hold: from now on it is served, late or not."""
    grace_s: float = 0.0
    """By how much its first token may come after its limit, as its client was told."""
    waits_for: "InstanceEntry | None" = None
    """The instance whose load it waits for."""
    leader: "RequestEntry | None" = None
    """The request that computes their common prompt."""
    _mates: tuple["RequestEntry", ...] = field(default=(), init=False)
    """What the other answers of its call will be, once somebody has asked for its price."""
    due_s: float = field(init=False)
    """When its next token is due."""
    slack_s: float = 0.0
    """See `Pace.slack_s`."""
    submitted_s: float = 0.0
    times_s: tuple[float, float] | None = None
    """When its first token came, and its last; `None` before the first."""
    prefill_left: int = 0
    """Tokens that its node has still to compute before its next one."""
    carried_tokens: int = 0
    """How many tokens of a copy the KV blocks are of that are on their way to it."""
    carried_s: float = 0.0
    """When they are expected to be there."""
    refusals: RequestRefusals = field(default_factory=RequestRefusals)
    """Why it waits."""
    latest_start: tuple[int, float] | None = None
    """When its first token would be late if it had not begun, as known at this number of
    `Cell.fleet_changes`; `None` until that is worked out.
    """
    submissions_before: int = 0
    """The number of the last attempt under its id before this request began, or a higher one:
    `submissions` counts on from there.
    """
    resumed: bool = False
    """Its client has come with what it had of it from an earlier controller."""
    overtaken: int = 0
    """Later requests that were placed on a node that could not compute this one in time."""
    tokens: int = field(init=False)
    """The tokens of its prompt and its output."""
    pace_s: float = field(init=False)
    """From one token to the next, as planned; infinite for an answer of one token, or a vector."""

    def __post_init__(self) -> None:
        decodes = self.original.sampling.max_tokens > 1
        self.pace_s = self.pace.token_s(self.slo) if decodes else inf
        prompt_tokens = len(self.original.prompt_tokens)
        self.tokens = prompt_tokens + len(self.output_tokens)
        self.due_s = self.arrival_s + self.slo.ttft_limit_s(prompt_tokens)

    def _mate(self, number: int) -> "RequestEntry":
        request_id = RequestId(f"{self.request_id}/{number}")
        return RequestEntry(
            original=replace(self.original, request_id=request_id, answers=1),
            slo=self.slo,
            has_own_slo=self.has_own_slo,
            pace=self.pace,
            arrival_s=self.arrival_s,
            slack_s=self.slack_s,
            leader=self,
        )

    @property
    def mates(self) -> tuple["RequestEntry", ...]:
        """The other answers that need a place where it gets its first one; none once it has been
        submitted, or waits for a load: they are booked by themselves from then on.
        """
        if self.original.answers == 1 or self.submissions or self.waits_for is not None:
            return ()
        if not self._mates:
            self._mates = tuple([self._mate(n) for n in range(1, self.original.answers)])
        return self._mates

    @property
    def follows(self) -> bool:
        """Whether nothing is to be looked for until the one that computes its prompt has a place or
        a load.
        """
        leader = self.leader
        return leader is not None and leader.has_no_place

    @property
    def has_no_place(self) -> bool:
        """Whether it is queued, and no load has been promised to it."""
        return self.state is RequestState.QUEUED and self.waits_for is None

    def follow(self, leader: "RequestEntry | None") -> None:
        """That one computes its prompt on its instance, or it does so itself from the beginning."""
        self.leader = leader
        if leader is None:
            self.prefill_left = self.tokens

    def follows_to(self, instance: "InstanceEntry") -> bool:
        """Whether the one that computes its prompt is on the instance, or goes there with it. Once
        it has been submitted itself, it goes by what nodes tell.
        """
        leader = self.leader
        if leader is None or self.submissions:
            return False
        return leader.has_no_place or instance in (leader.instance, leader.waits_for)

    @property
    def held_blocks(self) -> int:
        """The KV blocks that are there for it, shared ones included."""
        return self.required_blocks + self.shared_blocks

    @property
    def request_id(self) -> RequestId:
        return self.original.request_id

    @property
    def deployment(self) -> DeploymentName:
        return self.original.deployment

    @property
    def waits_since_s(self) -> float:
        """The time since which it waits for a place, without the load that it was promised."""
        load = self.waits_for
        return self.queued_at_s if load is None else max(self.queued_at_s, load.loaded_at_s)

    @property
    def rank(self) -> tuple[bool, float]:
        """Sorts a queue: by arrival, and best effort behind all others."""
        return self.slo.best_effort, self.arrival_s

    def is_met(self) -> bool:
        """Whether the tokens that it has kept TTFT and mean TPOT, as was promised."""
        if self.times_s is None:
            return False
        first_s, last_s = self.times_s
        ttft_s = self.slo.ttft_limit_s(len(self.original.prompt_tokens)) + self.grace_s
        between_s = (last_s - first_s) / max(len(self.output_tokens) - 1, 1)
        return first_s - self.arrival_s <= ttft_s and between_s <= self.slo.tpot_s

    def advance(self, to: RequestState) -> None:
        self.state = advance(REQUEST, self.state, to)

    def queued(self, now_s: float) -> None:
        """It enters its queue."""
        self.queued_at_s = now_s

    def accept(self, grace_s: float = 0.0) -> None:
        """It has a place, or will have one: its first token comes so much after its limit."""
        self.accepted, self.grace_s = True, grace_s
        self.due_s += grace_s

    def wait_for(self, instance: "InstanceEntry | None", blocks: int = 0) -> None:
        """It waits for the load of an instance, where it is expected to need so many KV blocks, or
        for none any more.
        """
        self.waits_for, self.required_blocks = instance, blocks

    def digests(self, block_tokens: int) -> tuple[int, ...]:
        """The digests of the keys of its prompt's full blocks; none where it shares nothing."""
        for size, digests in self.original.digests:
            if size == block_tokens:
                return digests
        return ()

    def led_tokens(self, block_tokens: int) -> int:
        """How many of its tokens another answer of its call computes for it."""
        blocks = min(len(self.digests(block_tokens)), (self.tokens - 1) // block_tokens)
        return blocks * block_tokens

    def found_tokens(self, there: Collection[int], block_tokens: int) -> int:
        """How many of its tokens are in a cache that has blocks of these digests. At least one
        token is left to compute.
        """
        if not there:
            return 0
        found = 0
        for digest in self.digests(block_tokens):
            if digest not in there:
                break
            found += block_tokens
        return found if found < self.tokens else found - block_tokens

    def submitted(
        self,
        instance: "InstanceEntry",
        *,
        blocks: int,
        now_s: float,
        cached_tokens: int = 0,
        shared_blocks: int = 0,
    ) -> None:
        """It goes to an instance, where it is expected to need so many KV blocks beside those that
        it shares, and not to have to compute so many of its tokens.
        """
        self.advance(RequestState.RUNNING)
        self.refusals.forget_starts()
        self.submissions += 1
        self.attempt = self.submissions
        self.instance, self.required_blocks = instance, blocks
        self.shared_blocks = shared_blocks
        self.submitted_s, self.prefill_left = now_s, self.tokens - cached_tokens

    def left(self) -> None:
        """It is not on its instance any more; unless it is over, it waits for another place."""
        self.instance, self.required_blocks, self.shared_blocks = None, 0, 0
        if self.state is RequestState.RUNNING:
            self.advance(RequestState.QUEUED)

    def note_tokens(self, token_ids: Sequence[int], now_s: float) -> None:
        """It has these further tokens, so that its prompt is computed, and the next one is due."""
        slack_s, count = inf if self.output_tokens else self.slack_s, len(token_ids)
        self.due_s = next_due_s(self.due_s, self.pace_s, now_s, count, slack_s)
        self.times_s = (now_s if self.times_s is None else self.times_s[0]), now_s
        self.output_tokens += token_ids
        self.tokens += count
        self.prefill_left = 0

    @property
    def moves_now(self) -> bool:
        """Whether it is on its way to another instance, or computed ahead there."""
        return self.migration is not None

    @property
    def is_copy(self) -> bool:
        """Whether it is computed ahead for the request of its id, which runs elsewhere."""
        return self.migration is not None and self.migration.copy is self

    @property
    def failures(self) -> int:
        """Submissions of it that came to nothing, or have not yet come to something."""
        return self.submissions - self.moves - self.evictions - self.submissions_before

    def copy(self, now_s: float) -> "RequestEntry":
        """A copy of the request as it is now, to be computed ahead elsewhere in the time of a first
        token.
        """
        copy = RequestEntry(
            original=self.original,
            slo=self.slo,
            has_own_slo=self.has_own_slo,
            pace=self.pace,
            arrival_s=self.arrival_s,
            accepted=True,
            output_tokens=list(self.output_tokens),
            slack_s=self.slack_s,
            submissions=self.submissions,
        )
        copy.note_ahead((), now_s + self.slo.ttft_limit_s(copy.tokens), now_s)
        return copy

    def as_if_now(self, now_s: float) -> "RequestEntry":
        """The request as if it had come this moment."""
        return RequestEntry(
            original=self.original,
            slo=self.slo,
            has_own_slo=self.has_own_slo,
            pace=self.pace,
            arrival_s=now_s,
            output_tokens=list(self.output_tokens),
            slack_s=self.slack_s,
            latest_start=self.latest_start,
        )

    def note_migration(self, migration: "Migration | None") -> None:
        """It moves, or does no more."""
        self.migration = migration

    def note_move(self) -> None:
        """A copy of it has been submitted."""
        self.submissions += 1
        self.moves += 1

    def note_ahead(self, token_ids: Sequence[int], due_s: float, now_s: float) -> None:
        """A copy has these further tokens to compute, by then."""
        self.output_tokens += token_ids
        self.tokens += len(token_ids)
        self.prefill_left, self.due_s, self.submitted_s = len(token_ids), due_s, now_s

    def note_carried(self, tokens: int, arrives_s: float, now_s: float) -> None:
        """The KV blocks of so many of a copy's tokens would go to its place, where they are later,
        in place of what was noted before in the same event.
        """
        self.due_s += arrives_s - max(self.carried_s, now_s)
        self.carried_tokens, self.carried_s = tokens, arrives_s

    def note_arrived(self, tokens: int) -> None:
        """A copy's place has the KV blocks of so many of its tokens; it computes the others."""
        self.carried_tokens, self.carried_s = 0, 0.0
        self.prefill_left = max(self.tokens - tokens, 1)

    def note_drawn_apart(self) -> None:
        """See `drawn_apart`."""
        self.drawn_apart = True

    def resume(self, resumed: Resumed, now_s: float) -> None:
        """Its client has these tokens of it already. However old it says that the request is, no
        token was due before now.
        """
        self.accepted, self.resumed = resumed.accepted, True
        queue_age_s = resumed.age_s if resumed.queue_age_s is None else resumed.queue_age_s
        self.arrival_s = now_s - queue_age_s
        limit_s = self.slo.ttft_limit_s(len(self.original.prompt_tokens))
        decoded_s = len(resumed.output_tokens) * self.pace.token_s(self.slo)
        due_s = now_s - resumed.age_s + limit_s + decoded_s
        self.go_on_with(resumed.output_tokens, max(due_s, now_s), now_s)

    def go_on_with(self, token_ids: Sequence[int], due_s: float, now_s: float) -> None:
        """It has these tokens; the next one is due then."""
        self.output_tokens += token_ids
        self.tokens += len(token_ids)
        self.due_s = due_s
        self.times_s = (self.arrival_s, now_s) if token_ids else None

    def take_attempt(self, attempt: int) -> None:
        """It has been entered where it runs already, in this attempt: the last one of this
        controller, or one of an earlier one. The next one has a number that neither has had.
        """
        self.submissions -= self.submissions == attempt + 1
        beyond = max(attempt - self.submissions, 0)
        self.attempt, self.submissions = attempt, self.submissions + beyond
        self.submissions_before += beyond

    def begin_after(self, attempt: int) -> None:
        """Its first attempt has the next number."""
        self.submissions = self.submissions_before = attempt

    def note_due(self, due_s: float) -> None:
        """A copy that has been computed: by then the next token of what it is a copy of is due."""
        self.due_s = due_s

    def handed_over(self, copy: "RequestEntry", instance: "InstanceEntry", now_s: float) -> None:
        """It runs on in place of its copy, with what that has left to compute."""
        self.advance(RequestState.RUNNING)
        self.attempt, self.instance = copy.attempt, instance
        self.required_blocks, self.submitted_s = copy.required_blocks, now_s
        self.prefill_left = copy.prefill_left

    def note_prefill_left(self, tokens: int) -> None:
        """Its node has so many tokens left to compute before its next one."""
        self.prefill_left = tokens

    def note_latest_start(self, fleet_changes: int, at_s: float) -> None:
        """See `latest_start`."""
        self.latest_start = fleet_changes, at_s

    def note_demand(self, blocks: int, shared_blocks: int) -> None:
        """It needs so many KV blocks where it runs, beside those that it shares."""
        self.required_blocks, self.shared_blocks = blocks, shared_blocks

    def note_evicted(self) -> None:
        """It has to leave its instance for want of memory there."""
        self.evictions += 1

    def note_overtaken(self, most: int) -> None:
        """A later one was placed where it could not be in time; counted up to `most`."""
        self.overtaken = min(self.overtaken + 1, most)


@dataclass(slots=True, kw_only=True, eq=False)
class Orphan:
    """A request that a node has brought along, and that its client has not come for yet."""

    request: RequestEntry
    node_id: NodeId
    until_s: float
    """When it is given up."""
    outputs: list[RequestTokens]
    """The last of it, for the client."""

    def keep(self, outputs: RequestTokens) -> None:
        """It has this further output."""
        self.outputs.append(outputs)
