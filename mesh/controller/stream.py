"""One client that waits for the tokens of its request: what it is told next, and how it went.

The core's answers come in by `tell`, on the hot path; the call's handler takes out all that has
come and writes it. A client that lags gets several iterations' tokens as one event, and so does
each where tokens are joined on purpose: a write costs more than a token.
"""

import asyncio
from collections.abc import Iterator, Sequence

from mesh.domain.access import ANYONE, Caller
from mesh.domain.actions import DeliverTokens, RefuseRequest, TellAccepted, TellWaiting
from mesh.domain.errors import MeshError, Refused
from mesh.domain.invocation import (
    Accepted,
    Finished,
    Invocation,
    InvocationEvent,
    Tokens,
    Waiting,
)
from mesh.domain.reasons import FinishReason
from mesh.domain.request import Request, RequestTokens, Resumed
from mesh.domain.slo import BEST_EFFORT, Slo
from mesh.domain.values import replace
from mesh.domain.views import RequestPhase, RequestSnapshot
from mesh.wire.mailbox import Mailbox

JOIN_MARGIN_S = 0.005
"""Before a token is due it goes on its way, whatever it could be joined with."""
Told = TellAccepted | TellWaiting | DeliverTokens | RefuseRequest


class ClientStream:
    """`arrived_s` is when the call came in; all times are of the controller's clock. Tokens after
    the first that come within `join_s` of those given before wait for the next, for as long at
    most, but none until it is due. `charged_before`: of a call that comes again its prompt was
    charged, with so many tokens of its answer; `None` where nothing was.
    """

    def __init__(
        self,
        *,
        asked: Invocation | None = None,
        request: Request,
        slo: Slo,
        has_own_slo: bool = False,
        arrived_s: float,
        told_max: int,
        join_s: float = 0.0,
        caller: Caller = ANYONE,
        resumed: Resumed | None = None,
        charged_before: int | None = None,
    ) -> None:
        self.asked = asked
        self.request = request
        self.charged_before = charged_before
        self.resumed = resumed
        """What its client has of it already."""
        self.end_known: FinishReason | None = None
        """How it has ended, where its client has all of it but that."""
        self.own_slo = slo if has_own_slo or slo.name else None
        """What the core is told of its SLO: `None` where that of its deployment holds."""
        self.caller = caller
        self.dropped: MeshError | None = None
        """Why it was cancelled, where its client has not left by itself."""
        self.finish: FinishReason | None = None
        self.ended = False
        """The core has said its last word on the request, or is to say none."""
        self.finished = False
        """Everything has been taken out."""
        self._slo = slo
        self._cached_prompt_tokens = 0
        """When its prompt was first computed."""
        self._grace_s = 0.0
        """As its client was told."""
        self._arrived_s = arrived_s
        self._first_s: float | None = None
        self._last_s = arrived_s
        self._had = 0 if resumed is None else len(resumed.output_tokens)
        self.output_tokens = self._had
        """Those that its client has, or has before it to read."""
        self.has_place = False
        """Its client was told which deadlines hold."""
        self._told: Mailbox[Told] = Mailbox(told_max)
        self._refusal: Refused | None = None
        self._join_s = join_s
        self._buffered: list[DeliverTokens] = []
        """Not in the mailbox yet."""
        self._buffered_until: asyncio.TimerHandle | None = None
        self._put_s = arrived_s
        """When its client was last given anything."""

    def tell(self, told: Told, now_s: float) -> bool:
        """Whether there was room for it."""
        buffered = False
        match told:
            case DeliverTokens():
                outputs = told.outputs
                if outputs.token_ids:
                    if self._join_s and self._first_s is not None and outputs.finish is None:
                        buffered = self._buffer(told, now_s)
                    self._last_s = now_s
                    if self._first_s is None:
                        self._first_s = now_s
                        self._cached_prompt_tokens = outputs.cached_tokens
                    self.output_tokens += len(outputs.token_ids)
                self.finish = outputs.finish
                self.ended = outputs.finish is not None
            case TellAccepted():
                self.has_place = True
            case RefuseRequest():
                self.ended = True
        if buffered:
            return True
        self._put_buffered()
        self._put_s = now_s
        return self._told.put(told)

    def tell_end(self, now_s: float) -> None:
        """What the core would say of one that has ended: nobody else knows of it any more."""
        assert self.end_known is not None
        request_id = self.request.request_id
        last = RequestTokens(
            request_id=request_id,
            attempt=0,
            first_index=self._had,
            token_ids=(),
            finish=self.end_known,
        )
        self.tell(TellAccepted(request_id=request_id, grace_s=0.0), now_s)
        self.tell(DeliverTokens(outputs=last), now_s)

    def _buffer(self, told: DeliverTokens, now_s: float) -> bool:
        """Whether these tokens wait for the next: those that come soon after others were given, if
        none is due soon. The next tokens take them along, so that the answers of a batch go out at
        once; the timer is for tokens that nothing follows.
        """
        if not now_s < self._put_s + self._join_s or self._told.room <= len(self._buffered):
            return False
        if self._buffered_until is None:
            limit_s = self._slo.ttft_limit_s(len(self.request.prompt_tokens)) + self._grace_s
            due_s = self._arrived_s + limit_s + self.output_tokens * self._slo.tpot_s
            buffered_s = min(self._join_s, due_s - JOIN_MARGIN_S - now_s)
            if buffered_s <= 0.0:
                return False
            self._buffered_until = asyncio.get_running_loop().call_later(
                buffered_s, self._put_buffered
            )
        self._buffered.append(told)
        return True

    def _put_buffered(self) -> None:
        if self._buffered_until is not None:
            self._buffered_until.cancel()
            self._buffered_until = None
        for told in self._buffered:
            self._told.put(told)
        self._buffered.clear()

    @property
    def tokens(self) -> int:
        """The tokens of prompt and answer as they are metered: 0 as long as there is no answer."""
        before = self.charged_before
        prompt = self.request.counted_prompt_tokens if before is None else 0
        came = self.output_tokens - max(self._had, before or 0)
        return prompt + came if came > 0 else 0

    @property
    def charged(self) -> int | None:
        """So many tokens of the answer are charged, with the prompt; `None`: nothing is."""
        came = self.output_tokens > max(self._had, self.charged_before or 0)
        return self.output_tokens if came else self.charged_before

    @property
    def asked_s(self) -> float:
        """When its client has asked first, as far as it counts in a queue."""
        age_s = None if self.resumed is None else self.resumed.queue_age_s
        return self._arrived_s - (age_s or 0.0)

    def snapshot(self, now_s: float) -> RequestSnapshot:
        phase = RequestPhase.ACCEPTED if self.has_place else RequestPhase.QUEUED
        return RequestSnapshot(
            request_id=self.request.request_id,
            deployment=self.request.deployment,
            phase=RequestPhase.ANSWERING if self.output_tokens else phase,
            prompt_tokens=len(self.request.prompt_tokens),
            output_tokens=self.output_tokens,
            output_tokens_max=self.request.sampling.max_tokens,
            age_s=now_s - self._arrived_s,
        )

    async def events(self) -> list[InvocationEvent]:
        """What comes next, as soon as anything does. Raises Refused once that is all there is."""
        if self._refusal is None:
            events = list(self._events(await self._told.take()))
            if events or self._refusal is None:
                return events
        raise self._refusal

    def _events(self, told: Sequence[Told]) -> Iterator[InvocationEvent]:
        tokens: Tokens | None = None
        for one in told:
            match one:
                case DeliverTokens(outputs=outputs):
                    # The end may come alone, after the last token.
                    tells = outputs.token_ids or outputs.text or self._first_s is None
                    tokens = _joined(tokens, outputs, self.request) if tells else tokens
                    if outputs.finish is not None:
                        self.finished = True
                        if tokens is not None:
                            yield tokens
                        yield self._finished(outputs.finish, one)
                        return
                case TellWaiting():
                    if tokens is not None:
                        yield tokens
                        tokens = None
                    yield Waiting(phase=one.phase, share=one.share)
                case TellAccepted():
                    yield self._accepted(one)
                case RefuseRequest():
                    self._refusal = Refused(
                        one.message,
                        reason=one.reason,
                        retry_after_s=one.retry_after_s,
                        hint=one.hint,
                    )
        if tokens is not None:
            yield tokens

    def _accepted(self, told: TellAccepted) -> Accepted:
        self._grace_s = told.grace_s
        prompt = len(self.request.prompt_tokens)
        return Accepted(
            request_id=self.request.request_id,
            prompt_tokens=prompt,
            ttft_limit_s=self._slo.ttft_limit_s(prompt),
            tpot_limit_s=self._slo.tpot_s,
            grace_s=told.grace_s,
            cached_prompt_tokens=told.cached_tokens,
            slo_class="" if self._slo is BEST_EFFORT else self._slo.name,
        )

    def _finished(self, reason: FinishReason, last: DeliverTokens) -> Finished:
        first_s = self._last_s if self._first_s is None else self._first_s
        gaps = self.output_tokens - self._had - 1
        return Finished(
            reason=reason,
            prompt_tokens=len(self.request.prompt_tokens),
            output_tokens=self.output_tokens,
            ttft_s=first_s - self._arrived_s,
            tpot_s=(self._last_s - first_s) / gaps if gaps > 0 else 0.0,
            grace_s=self._grace_s,
            node_id=last.node_id,
            cached_prompt_tokens=self._cached_prompt_tokens,
        )


def _joined(tokens: Tokens | None, outputs: RequestTokens, request: Request) -> Tokens:
    """What a client has not been given yet, and what came after it."""
    if tokens is None:
        asked = request.sampling.prompt_logprobs is not None and not outputs.first_index
        # A node of an earlier release tells none.
        told = asked and len(outputs.prompt_logprobs) == len(request.prompt_tokens) - 1
        return Tokens(
            first_index=outputs.first_index,
            token_ids=outputs.token_ids,
            text=outputs.text,
            logprobs=outputs.logprobs,
            prompt_token_ids=request.prompt_tokens if told else (),
            prompt_logprobs=outputs.prompt_logprobs,
            embedding=outputs.embedding,
        )
    return replace(
        tokens,
        token_ids=tokens.token_ids + outputs.token_ids,
        text=tokens.text + outputs.text,
        logprobs=tokens.logprobs + outputs.logprobs,
    )
