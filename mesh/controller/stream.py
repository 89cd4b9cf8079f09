"""One client that waits for the tokens of its request: what it is told next, and how it went.

The core's answers come in by `tell`, on the hot path; the call's handler takes out all that has
come and writes it. A client that lags gets several iterations' tokens as one event.
"""

from collections.abc import Iterator, Sequence

from mesh.domain.access import ANYONE, Caller
from mesh.domain.actions import DeliverTokens, RefuseRequest, TellAccepted, TellWaiting
from mesh.domain.errors import Cancelled, Refused
from mesh.domain.invocation import Accepted, Finished, InvocationEvent, Tokens, Waiting
from mesh.domain.reasons import FinishReason
from mesh.domain.request import Request, RequestTokens
from mesh.domain.slo import Slo
from mesh.domain.views import RequestPhase, RequestSnapshot
from mesh.wire.mailbox import Mailbox

Told = TellAccepted | TellWaiting | DeliverTokens | RefuseRequest


class ClientStream:
    """`arrived_s` is when the call came in; all times are of the controller's clock."""

    def __init__(
        self,
        *,
        request: Request,
        slo: Slo,
        own_slo: Slo | None = None,
        arrived_s: float,
        told_max: int,
        caller: Caller = ANYONE,
    ) -> None:
        self.request = request
        self.own_slo = own_slo
        self.caller = caller
        self.dropped: Cancelled | None = None
        """Why it was cancelled, where its client has not left by itself."""
        self.ended = False
        """The core has said its last word on the request, or is to say none."""
        self.finished = False
        """Everything has been taken out."""
        self._slo = own_slo or slo
        self._cached_prompt_tokens = 0
        """When its prompt was first computed."""
        self._grace_s = 0.0
        """As its client was told."""
        self._arrived_s = arrived_s
        self._first_s: float | None = None
        self._last_s = arrived_s
        self._output_tokens = 0
        self._has_place = False
        self._told: Mailbox[Told] = Mailbox(told_max)
        self._refusal: Refused | None = None

    def tell(self, told: Told, now_s: float) -> bool:
        """Whether there was room for it."""
        match told:
            case DeliverTokens():
                outputs = told.outputs
                if outputs.token_ids:
                    self._last_s = now_s
                    if self._first_s is None:
                        self._first_s = now_s
                        self._cached_prompt_tokens = outputs.cached_tokens
                    self._output_tokens += len(outputs.token_ids)
                self.ended = outputs.finish is not None
            case TellAccepted():
                self._has_place = True
            case RefuseRequest():
                self.ended = True
        return self._told.put(told)

    @property
    def tokens(self) -> int:
        """Of its prompt and its answer; 0 as long as it has no answer, as it is metered."""
        prompt = len(self.request.prompt_tokens)
        return prompt + self._output_tokens if self._output_tokens else 0

    def snapshot(self, now_s: float) -> RequestSnapshot:
        phase = RequestPhase.ACCEPTED if self._has_place else RequestPhase.QUEUED
        return RequestSnapshot(
            request_id=self.request.request_id,
            deployment=self.request.deployment,
            phase=RequestPhase.ANSWERING if self._output_tokens else phase,
            prompt_tokens=len(self.request.prompt_tokens),
            output_tokens=self._output_tokens,
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
                    tokens = _joined(tokens, outputs)
                    if outputs.finish is not None:
                        self.finished = True
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
        )

    def _finished(self, reason: FinishReason, last: DeliverTokens) -> Finished:
        first_s = self._last_s if self._first_s is None else self._first_s
        gaps = self._output_tokens - 1
        return Finished(
            reason=reason,
            prompt_tokens=len(self.request.prompt_tokens),
            output_tokens=self._output_tokens,
            ttft_s=first_s - self._arrived_s,
            tpot_s=(self._last_s - first_s) / gaps if gaps > 0 else 0.0,
            grace_s=self._grace_s,
            node_id=last.node_id,
            cached_prompt_tokens=self._cached_prompt_tokens,
        )


def _joined(tokens: Tokens | None, outputs: RequestTokens) -> Tokens:
    """What a client has not been given yet, and what came after it."""
    if tokens is None:
        return Tokens(
            first_index=outputs.first_index,
            token_ids=outputs.token_ids,
            text=outputs.text,
            logprobs=outputs.logprobs,
        )
    return Tokens(
        first_index=tokens.first_index,
        token_ids=tokens.token_ids + outputs.token_ids,
        text=tokens.text + outputs.text,
        logprobs=tokens.logprobs + outputs.logprobs,
    )
