"""A request on its node: what of it is still to compute, and when its next token is due."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.limits import KEPT_OUTPUTS_MAX
from mesh.domain.messages import HeldRequest
from mesh.domain.request import RequestOrder, RequestTokens
from mesh.domain.slo import next_due_s
from mesh.domain.values import replace


@dataclass(slots=True, kw_only=True, eq=False)
class LocalRequest:
    order: RequestOrder
    start_s: float
    """When it arrived at the cell, on this node's clock."""
    output_tokens: int
    first_step: int
    """The first iteration that it can have a part in: what an earlier one leaves to compute under
    this id is an earlier attempt's. Tokens say themselves which attempt they are of.
    """
    due_s: float
    """When its next token is due."""
    prefill_left: int
    """Prompt tokens, and tokens of an earlier attempt, still to compute."""
    paused: bool = False
    """It gets no token until it is let go."""
    decodes: bool = False
    """It has got one here."""
    fetching: bool = False
    """Its KV blocks are on their way, or computed by another one of its prompt: its engine does not
    know of it yet.
    """
    kept: deque[RequestTokens] = field(default_factory=deque)
    """Its last outputs, for a next controller, of one that its client may ask for again."""
    before: list[int] = field(default_factory=list)
    """Its tokens between those of its order and the first that is kept."""
    told: RequestOrder = field(init=False)
    """As its engine knows it. In the midst of an iteration, which may be the request's last, that
    is told nothing.
    """
    tokens: int = field(init=False)
    """The tokens of its prompt and its output so far."""
    pace_s: float = field(init=False)
    """From one token to the next, as planned."""

    def __post_init__(self) -> None:
        self.pace_s = self.order.slo.tpot_s * self.order.pace_share
        self.told = self.order
        self.tokens = len(self.order.request.prompt_tokens) + self.output_tokens

    @property
    def request_id(self) -> RequestId:
        return self.order.request.request_id

    def keep(self, output: RequestTokens) -> None:
        """It has this output."""
        if not self.order.request.keyed:
            return
        self.kept.append(output)
        if len(self.kept) > KEPT_OUTPUTS_MAX:
            self.before += self.kept.popleft().token_ids

    def held(self, instance_id: InstanceId, now_s: float) -> HeldRequest | None:
        """It as the next controller is told; None for one that cannot go on without the last."""
        order, before = self.order, (*self.order.output_tokens, *self.before)
        next_index = len(before)
        for output in self.kept:
            if output.first_index != next_index:
                return None
            next_index += len(output.token_ids)
        alone = not self.paused and not self.fetching and order.request.first is None
        if not (order.request.keyed and alone and next_index == self.output_tokens):
            return None
        return HeldRequest(
            instance_id=instance_id,
            order=replace(
                order,
                output_tokens=before,
                age_s=max(now_s - self.start_s, 0.0),
                due_in_s=self.due_s - now_s,
                cached_tokens=0,
                kv=None,
            ),
            outputs=tuple(self.kept),
            prefill_left=self.prefill_left,
        )

    def note_tokens(self, count: int, now_s: float) -> None:
        """It has so many more tokens."""
        slack_s = inf if self.output_tokens else self.order.slack_s
        self.due_s = next_due_s(self.due_s, self.pace_s, now_s, count, slack_s)
        self.output_tokens += count
        self.tokens += count
        self.prefill_left, self.decodes = 0, True

    def note_prefill_left(self, tokens: int) -> None:
        self.prefill_left = tokens

    def note_arrived(self, tokens: int, first_step: int) -> None:
        """Its engine has it, with the KV blocks of so many tokens, or gets it now, with none."""
        self.fetching, self.first_step = False, first_step
        self.prefill_left = self.tokens - self.paused - tokens

    def go_on(
        self, token_ids: Sequence[int], *, paused: bool, due_s: float, first_step: int
    ) -> None:
        """It has these further tokens from where it came from, and goes on unless `paused`. If none
        was drawn here, its last token before them was left to compute, too.
        """
        output_tokens = (*self.order.output_tokens, *token_ids)
        self.order = replace(self.order, output_tokens=output_tokens, paused=paused)
        self.output_tokens += len(token_ids)
        self.tokens += len(token_ids)
        self.prefill_left += len(token_ids) + (0 if self.decodes else self.paused - paused)
        self.paused, self.due_s, self.first_step = paused, due_s, first_step

    def follow(self, first: RequestId | None) -> None:
        """That request computes its prompt; or it does so itself, from the beginning."""
        request = replace(self.order.request, first=first)
        cached_tokens = 0 if first is None else self.order.cached_tokens
        self.order = replace(self.order, request=request, cached_tokens=cached_tokens)
        self.told = self.order

    def note_told(self) -> None:
        """Its engine is told how it is now."""
        self.told = self.order
