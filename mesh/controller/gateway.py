"""The gateway: a client's call becomes a request, and what the core says of it becomes the answer.

On the way in: check, tokenise, draw a seed, post InvokeRequested. On the way out: tokens as they
come, then the times. It knows no protocol: before it, a writer of one has read the call, and writes
the events that the gateway yields. A client that goes away, lets its deadline pass or reads too
slowly becomes CancelRequested, so that its place is free within an iteration.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from hashlib import sha256
from typing import Any, Protocol

from mesh.controller.invocation_checks import (
    check_invocation,
    check_named_tokens,
    check_output,
    check_prompt_logprobs,
    check_task,
    check_token_ids,
    end_of,
    sampling_of,
    slo_of,
)
from mesh.controller.lookup import no_deployment, no_request, seen_by
from mesh.controller.snapshots import with_failed
from mesh.controller.stream import ClientStream, Told
from mesh.controller.tenants import Taken, TenantMeter
from mesh.controller.tokenizers import Tokenizers, chars_of
from mesh.domain.access import ANYONE, Caller, TenantLimits
from mesh.domain.actions import DeliverTokens, RefuseRequest, TellAccepted, TellWaiting
from mesh.domain.deployment import Deployment, DeploymentSpec
from mesh.domain.errors import (
    AlreadyExists,
    Cancelled,
    InvalidInput,
    MeshError,
    Refused,
    Unavailable,
)
from mesh.domain.events import CancelRequested, InvokeRequested
from mesh.domain.front import FailRequest
from mesh.domain.grammar import Grammar
from mesh.domain.ids import DeploymentName, ModelId, RequestId
from mesh.domain.invocation import Invocation, InvocationEvent, Resume, TokenPrompt
from mesh.domain.limits import forget_oldest
from mesh.domain.messages import NodeStarting
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.request import Request, Resumed, SamplingParams
from mesh.domain.revision import public_name
from mesh.domain.slo import BEST_EFFORT, Slo
from mesh.domain.text import SamplingDefaults, ToolFormat
from mesh.domain.values import dataclass, replace
from mesh.domain.views import CellSnapshot, Deployed, RequestSnapshot
from mesh.memory.block_keys import digests_of
from mesh.runtime.clock import Clock
from mesh.text.thoughts import Thinking
from mesh.wire.access import caller
from mesh.wire.errors import error_named

CHARS_PER_TOKEN_MAX = 256
"""No vocabulary has longer tokens, but for runs of blanks."""
REVISIONS_TRIED_MAX = 4
ACCEPTED_BEFORE_S_MAX = 60.0
"""For so long after its start a controller takes it that who comes again was accepted before."""
ACCEPTED_BEFORE_MAX = 1024
"""So many calls of a deployment at most; further ones pass admission as new ones do."""
GAP_S_MAX = 15.0
"""From the end of a controller to the start of the next: nobody is ranked in a queue as if he had
asked earlier than so long before this one began.
"""
ENDED_KEYS_MAX = 4096
STARTING_RETRY_S = 5.0
"""Who is refused while the only nodes for it are starting is told to come again then: a trial of
precisions takes 24 s on two cores.
"""
Headers = Callable[[], Iterable[tuple[str | bytes, str | bytes]]]
"""The headers of a call, by whichever protocol, with their names in lower case."""


class Cell(Protocol):
    """What the gateway asks the core."""

    def deployment(self, name: DeploymentName) -> Deployment | None: ...

    def deployed(self) -> tuple[Deployed, ...]: ...

    def snapshot(self, now_s: float) -> CellSnapshot: ...

    def asked_before(self, request_id: RequestId) -> tuple[Request, Sequence[int]] | None: ...


class Tracing(Protocol):
    """Where calls are traced."""

    def call(
        self, asked: Invocation, headers: Headers, arrived_s: float
    ) -> AbstractContextManager[Callable[[Request], None] | None]:
        """Around a call; what it yields, if anything, is told the request before it is posted."""
        ...


_UNTRACED: AbstractContextManager[Callable[[Request], None] | None] = nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits:
    calls_max: int = 8192
    """Open at one time, those that are still being tokenised included."""
    told_max: int = 1024
    """Messages that may wait for one client to read; then it is cancelled as too slow."""
    join_s: float = 0.0
    """Tokens after the first that come within so long of others go out together with them."""


@dataclass(frozen=True, slots=True)
class _EndedStream:
    """What is known of a call with a key whose stream has ended."""

    asked_s: float
    charged: int | None
    """See `ClientStream.charged`."""
    output_tokens: int
    finish: FinishReason | None
    ended_s: float
    has_place: bool
    """The core had accepted it."""


class Call:
    """An invocation under way: its events, until Finished."""

    def __init__(self, stream: ClientStream, model_id: ModelId, taken: Taken) -> None:
        self.request = stream.request
        self.model_id = model_id
        """The model whose tokens its prompt is."""
        self.taken = taken
        self._stream = stream

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    async def __aiter__(self) -> AsyncIterator[InvocationEvent]:
        """Raises Refused where the answer ends so."""
        while not self._stream.finished:
            for event in await self._stream.events():
                yield event


class Gateway:
    """What every protocol's calls go through, and the Clients port of the performer. Request ids
    are r<epoch>-<n>: the epoch keeps them apart from those that a node still holds from before a
    restart. That of a call with a key is made of its tenant and the key, so that a later controller
    knows it.
    """

    def __init__(
        self,
        *,
        cell: Cell,
        post: Callable[[InvokeRequested | CancelRequested], None],
        clock: Clock,
        tokenizers: Tokenizers,
        rng: random.Random,
        epoch: int,
        limits: GatewayLimits,
        tenants: TenantMeter | None = None,
        traces: Tracing | None = None,
        starting: Callable[[], Sequence[NodeStarting]] = tuple,
        adopts: bool = True,
    ) -> None:
        """`adopts`: an earlier controller may have accepted calls that come again; a front has not
        seen that one did.
        """
        self._starting = starting
        self._traces = traces
        self._cell = cell
        self._post = post
        self._clock = clock
        self._tokenizers = tokenizers
        self._rng = rng
        self._epoch = epoch
        self._limits = limits
        self._tenants = tenants or TenantMeter(lambda _: TenantLimits(), clock)
        self._began_s = clock.now_s()
        self._adopts = adopts
        self._ended_keys: dict[RequestId, _EndedStream] = {}
        """The last calls with a key whose streams have ended, by their requests."""
        self._accepted_before: dict[DeploymentName, set[RequestId]] = {}
        """Those that are taken for accepted by an earlier controller."""
        self._calls = 0
        self._requests = 0
        self._streams: dict[RequestId, ClientStream] = {}
        self._readers: dict[RequestId, asyncio.Task[Any]] = {}
        self._calls_coming: dict[RequestId, list[ClientStream]] = {}
        """The answers so far of calls for several to one prompt, by the first of them."""
        self._cancelled: list[RequestId] = []
        """Requests whose clients have gone in this turn of the loop."""
        self.stopping = False
        """No further calls are taken."""

    def stop(self) -> None:
        """Take no further calls."""
        self.stopping = True

    @property
    def is_asked(self) -> bool:
        """Whether any client waits."""
        return bool(self._streams)

    def now_s(self) -> float:
        """By the clock that calls are timed with."""
        return self._clock.now_s()

    def deployment(self, name: DeploymentName) -> Deployment:
        """One that takes requests. Raises NotFound, or Unavailable while it is being imported."""
        deployment = self._cell.deployment(name)
        if deployment is None or not caller().may_see(deployment.spec):
            raise no_deployment(name, self.deployed())
        return deployment

    def check(self, asked: Invocation) -> None:
        """Raises what a call would be refused with before its prompt is tokenised: NotFound,
        Unavailable or InvalidInput.
        """
        check_invocation(asked)
        spec = self.deployment(asked.deployment).spec
        check_task(asked, spec.task)
        _slo_of(asked, spec)

    def deployed(self) -> list[Deployed]:
        """The deployments that the caller may see, by name."""
        asks = caller()
        return [one for one in self._cell.deployed() if asks.may_see(one.spec)]

    def snapshot(self) -> CellSnapshot:
        """The cell as the caller may see it."""
        seen = seen_by(caller(), self._cell.snapshot(self._clock.now_s()))
        return with_failed(seen, self._tokenizers.failure)

    def payer(self, request_id: RequestId) -> Caller:
        """Who has made an open call."""
        stream = self._streams.get(request_id)
        return stream.caller if stream is not None else ANYONE

    def asked(self, request_id: RequestId) -> Invocation | None:
        """What the client of an open call has asked for."""
        stream = self._streams.get(request_id)
        return None if stream is None else stream.asked

    def charged_before(self, request_id: RequestId) -> int | None:
        """See `ClientStream`."""
        stream = self._streams.get(request_id)
        return None if stream is None else stream.charged_before

    async def sampling_defaults(self, deployment: Deployment) -> SamplingDefaults:
        """What its model's makers recommend, for protocols that go by that."""
        return await self._tokenizers.sampling_defaults(deployment.model.model_id)

    async def tool_format(self, deployment: Deployment) -> ToolFormat:
        """How its model calls tools."""
        said = deployment.spec.tool_format
        return said or await self._tokenizers.tool_format(deployment.model.model_id)

    async def calls_by_tokens(self, deployment: Deployment) -> bool:
        """Whether its model has tokens for the marks of its calls."""
        return await self._tokenizers.calls_by_tokens(
            deployment.model.model_id, deployment.model.vocabulary_tokens
        )

    async def thinking(self, deployment: Deployment, template_kwargs: str) -> Thinking | None:
        """How its model's answers to chats begin; None: with no thought."""
        model = deployment.model
        return await self._tokenizers.thinking(
            model.model_id, template_kwargs, model.vocabulary_tokens
        )

    async def token_bytes(self, deployment: Deployment) -> Callable[[int], bytes]:
        """What each of its model's tokens adds to a text."""
        return await self._tokenizers.token_bytes(deployment.model.model_id)

    async def tokens(self, asked: Invocation, *, is_part: bool = False) -> tuple[int, ...]:
        """The tokens of its prompt, which nobody is asked to continue; a text's with the model's
        own beginning unless `is_part`. It counts as a call. Raises what `call` does.
        """
        with self._open():
            check_invocation(asked)
            _, tokens = await self._tokenised(asked, is_part=is_part)
            return tokens

    async def text(self, deployment: Deployment, token_ids: tuple[int, ...]) -> str:
        """What so many tokens of its model say as the context holds, special ones by their names.
        It counts as a call. Raises InvalidInput or Refused.
        """
        with self._open():
            most = deployment.context_tokens_max
            if len(token_ids) > most:
                raise Refused(
                    f"there are {len(token_ids)} tokens; the context of "
                    f"{deployment.spec.name!r} holds {most}",
                    reason=RefusalReason.PROMPT_TOO_LONG,
                )
            check_token_ids(token_ids, deployment.model.vocabulary_tokens)
            return await self._tokenizers.text(deployment.model.model_id, token_ids)

    async def check_grammar(self, grammar: Grammar) -> None:
        """Raises InvalidInput, with what of it cannot be kept to."""
        await self._tokenizers.check_grammar(grammar)

    @asynccontextmanager
    async def call(
        self,
        asked: Invocation,
        headers: Headers = tuple,
        *,
        answers: int = 1,
        first: Call | None = None,
    ) -> AsyncIterator[Call]:
        """The call, from when the core was asked until its client has left the block. The first one
        of several `answers` to one prompt is asked for before the others, which are given it as
        `first`: then the prompt is computed once.

        Raises NotFound, Unavailable, InvalidInput or Refused at once. Where the block leaves more
        events unread than may wait, or an operator says so, its task is cancelled, and Cancelled
        raised.
        """
        arrived_s = self._clock.now_s()
        traced = _UNTRACED
        if self._traces is not None:
            traced = self._traces.call(asked, headers, arrived_s)
        takes_over = counted = False
        if asked.resume is not None and _is_keyed(asked, answers, first):
            takes_over, counted = (
                _keyed_id(asked) in self._streams,
                self._began_before(asked.resume),
            )
        with traced as trace, self._open(answers, first, takes_over, counted) as taken:
            stream, model_id = await self._stream(asked, arrived_s, answers, first)
            if trace is not None:
                trace(stream.request)
            try:
                with self._asked(stream):
                    yield Call(stream, model_id, taken)
            finally:
                taken.tokens = stream.tokens

    def requests(self) -> tuple[RequestSnapshot, ...]:
        """Those whose clients wait, the oldest first."""
        now_s = self._clock.now_s()
        return tuple(stream.snapshot(now_s) for stream in self._streams.values())

    def cancel(self, request_id: RequestId) -> None:
        """Its client is told so. Raises NotFound for a request that is not open."""
        stream = self._streams.get(request_id)
        if stream is None:
            raise no_request(request_id)
        self._drop(stream, Cancelled(f"{request_id} was cancelled by an operator"))

    def accepted(self, told: TellAccepted) -> None:
        self._tell(told.request_id, told)

    def waiting(self, told: TellWaiting) -> None:
        self._tell(told.request_id, told)

    def deliver(self, tokens: DeliverTokens) -> None:
        self._tell(tokens.outputs.request_id, tokens)

    def refuse(self, refusal: RefuseRequest) -> None:
        if refusal.reason is RefusalReason.NO_NODE:
            refusal = self._unless_one_starts(refusal)
        self._tell(refusal.request_id, refusal)

    def _unless_one_starts(self, refusal: RefuseRequest) -> RefuseRequest:
        """What its client is told where a node is starting, of which the core knows nothing. Nodes
        are not named: tenants are told this, too.
        """
        stream, starting = self._streams.get(refusal.request_id), self._starting()
        if stream is None or not starting:
            return refusal
        deployment = self._cell.deployment(stream.request.deployment)
        wanted = deployment.spec.devices if deployment else ()
        node = next((node for node in starting if node.device in wanted), None)
        if node is None:
            return refusal
        return replace(
            refusal,
            message=f"no {' or '.join(wanted)} node is up yet: one {node.phase}, "
            f"{node.share:.0%} done",
            hint=f"try again in {STARTING_RETRY_S:.1f} s; `mesh nodes` shows how far it is",
            retry_after_s=STARTING_RETRY_S,
        )

    def _tell(self, request_id: RequestId, told: Told) -> None:
        stream = self._streams.get(request_id)
        if stream is not None and not stream.tell(told, self._clock.now_s()):
            told_max = self._limits.told_max
            late = f"{request_id} was cancelled: {told_max} messages wait to be read, which is"
            self._drop(stream, Cancelled(f"{late} the limit", hint="read the answer as it comes"))

    def left(self, request_id: RequestId) -> None:
        """Its client has gone, and its place is free before its task has come to its end: of a
        thousand who leave at once, that takes 50 ms.
        """
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._note_ended(stream)
        if stream is not None and not stream.ended:
            stream.ended = True
            self._cancel(request_id)

    def fail(self, failure: FailRequest) -> None:
        """Its client is told the error; the request has ended."""
        stream = self._streams.get(failure.request_id)
        if stream is not None:
            stream.ended = True
            self._drop(stream, error_named(failure.error, failure.message, hint=failure.hint))

    def _cancel(self, request_id: RequestId) -> None:
        """Those who leave in one turn of the loop go together: a place that each frees would be
        given to the next one that is about to go.
        """
        if not self._cancelled:
            asyncio.get_running_loop().call_soon(self._cancel_together)
        self._cancelled.append(request_id)

    def _cancel_together(self) -> None:
        left, self._cancelled = self._cancelled, []
        if not left:
            return  # it went before its turn came
        self._post(CancelRequested(request_id=left[0], others=tuple(left[1:])))

    def _drop(self, stream: ClientStream, why: MeshError) -> None:
        """Free the request's place, and wake the task that waits for it to be told why."""
        request_id = stream.request.request_id
        stream.dropped = why
        del self._streams[request_id]
        self._note_ended(stream)
        self._readers[request_id].cancel()
        if not stream.ended:
            stream.ended = True
            self._cancel(request_id)

    @contextmanager
    def _open(
        self,
        answers: int = 1,
        first: Call | None = None,
        takes_over: bool = False,
        counted: bool = False,
    ) -> Iterator[Taken]:
        """A call of the caller's, within the limits, or a further answer of it; see `TenantMeter`.
        Raises Refused.
        """
        self._check_open()
        self._calls += 1
        try:
            of = None if first is None else first.taken
            with self._tenants.call(
                caller().tenant,
                answers=answers,
                first=of,
                takes_over=takes_over,
                counted=counted,
                best_effort=caller().best_effort,
            ) as taken:
                yield taken
        finally:
            self._calls -= 1

    def _check_open(self) -> None:
        if self.stopping:
            raise Refused("the controller is stopping", reason=RefusalReason.SHUTTING_DOWN)
        if self._calls >= self._limits.calls_max:
            raise Refused(
                f"{self._calls} invocations are open, which is the limit",
                reason=RefusalReason.QUEUE_FULL,
                retry_after_s=1.0,
            )

    async def _stream(
        self, asked: Invocation, arrived_s: float, answers: int, first: Call | None
    ) -> tuple[ClientStream, ModelId]:
        """Everything before the request is posted. Raises NotFound, Unavailable, InvalidInput,
        Refused.
        """
        self.check(asked)
        if first is None:
            if asked.grammar is not None:
                await self._tokenizers.check_grammar(asked.grammar)
            deployment, prompt_tokens = await self._tokenised(asked)
        else:
            deployment = self.deployment(asked.deployment)
            prompt_tokens = first.request.prompt_tokens
            if deployment.model.model_id != first.model_id:
                raise Unavailable(
                    f"{asked.deployment!r} has got another model while it was asked",
                    hint="try again",
                )
        check_prompt_logprobs(asked, len(prompt_tokens))
        check_named_tokens(asked, deployment.model.vocabulary_tokens)
        room_tokens = deployment.context_tokens_max - len(prompt_tokens)
        if self.stopping:  # it was tokenised meanwhile, and the core has said its last
            raise Refused("the controller is stopping", reason=RefusalReason.SHUTTING_DOWN)
        slo = _slo_of(asked, deployment.spec)
        self._requests += 1
        keyed = _is_keyed(asked, answers, first)
        request_id = RequestId(f"r{self._epoch}-{self._requests}")
        rng = self._rng
        if keyed:
            # Seeds are drawn alike for the same key, under whichever controller.
            request_id, rng = _keyed_id(asked), random.Random(_digest_of(asked.key))
        spec = deployment.spec
        # No tenant's requests share with another's, nor a caller's with those of other salts. What
        # is cached has no log-probabilities, and no hidden states.
        shares = asked.prompt_logprobs is None and spec.task is None
        salt = f"{caller().tenant}/{asked.cache_salt}" if shares and spec.prefix_cache else None
        if shares and first is not None:
            salt = first.request.cache_salt
        elif shares and answers > 1 and salt is None:
            salt = request_id  # The answers to this prompt share it with nobody else.
        block_sizes = (footprint.block_tokens for _, footprint in deployment.footprints)
        sampling = sampling_of(asked, room_tokens=room_tokens, rng=rng)
        request = Request(
            request_id=request_id,
            deployment=asked.deployment,
            prompt_tokens=prompt_tokens,
            sampling=sampling,
            cache_salt=salt,
            digests=digests_of(prompt_tokens, block_sizes, salt),
            answers=answers if shares else 1,
            first=first.request_id if shares and first is not None else None,
            keyed=keyed,
            asked_digest=_asked_digest(prompt_tokens, sampling) if keyed else "",
        )
        resumed = self._resumed(asked, request, deployment) if keyed else None
        stream = ClientStream(
            asked=asked,
            request=request,
            slo=slo,
            has_own_slo=slo is not deployment.spec.slo,
            arrived_s=arrived_s,
            told_max=self._limits.told_max,
            join_s=self._limits.join_s,
            caller=caller(),
            resumed=resumed,
            charged_before=self._charged(request_id) if resumed is not None else None,
        )
        if resumed is not None and asked.resume is not None:
            before = self._streams.get(request_id) or self._ended_keys.get(request_id)
            if before is not None and before.output_tokens == len(resumed.output_tokens):
                stream.end_known = before.finish
            if stream.end_known is None:
                stops = deployment.model.stop_token_ids
                stream.end_known = end_of(asked.resume, request.sampling, stops)
        return stream, deployment.model.model_id

    def _began_before(self, resume: Resume) -> bool:
        """Whether an earlier controller may have accepted a call that comes again."""
        now_s = self._clock.now_s()
        if caller().vouched:
            return True
        if not self._adopts:
            return False
        recent = now_s - self._began_s < ACCEPTED_BEFORE_S_MAX
        return recent and (bool(resume.output_tokens) or now_s - resume.age_s < self._began_s)

    def _charged(self, request_id: RequestId) -> int | None:
        """What was charged of a call that comes again: see `ClientStream.charged`. The prompt of
        one that the core has from its node was charged by an earlier controller.
        """
        known = self._streams.get(request_id) or self._ended_keys.get(request_id)
        if known is not None:
            return known.charged
        before = self._cell.asked_before(request_id)
        return 0 if before is not None and before[1] else None

    def _resumed(
        self, asked: Invocation, request: Request, deployment: Deployment
    ) -> Resumed | None:
        """What the core is told of an earlier call with the key. Raises AlreadyExists for a key
        that is in use or has been, and InvalidInput for one of another call, or for tokens that its
        answer does not have.
        """
        request_id, resume = request.request_id, asked.resume
        stream, before = self._streams.get(request_id), self._cell.asked_before(request_id)
        ended = self._ended_keys.get(request_id)
        if before is not None and _differs(before[0], request):
            raise InvalidInput(
                "the key is that of another call: of another prompt, model or sampling",
                hint="give each call a key of its own",
                field="key",
            )
        if resume is None:
            if stream is not None or (ended is not None and ended.finish is not None):
                raise AlreadyExists(
                    f"a call with this key {'runs' if stream is not None else 'has ended'}",
                    hint="give each call a key of its own, or say with resume what you have of it",
                )
            return None
        tokens = None if before is None else before[1]
        check_output(resume, request.sampling, deployment.model.vocabulary_tokens, tokens)
        answered = None if tokens is None else len(tokens)
        answered = answered if stream is None else stream.output_tokens
        if answered is not None and len(resume.output_tokens) > answered:
            raise InvalidInput(
                f"resume.next_index is {resume.next_index}; the answer has {answered} tokens yet",
                hint="give the tokens as they came",
                field="resume",
            )
        known, now_s = stream or ended, self._clock.now_s()
        accepted = self._accepts(request, resume)
        # Who comes again soon after his stream ended, as by another front, keeps the place.
        had_place = known is not None and known.has_place
        had_place = had_place and (ended is None or now_s - ended.ended_s < GAP_S_MAX)
        asked_s = now_s if known is None else known.asked_s
        if accepted and known is None:
            asked_s = self._began_s - GAP_S_MAX
        return Resumed(
            output_tokens=resume.output_tokens,
            age_s=resume.age_s,
            accepted=accepted or had_place,
            queue_age_s=min(resume.age_s, now_s - asked_s),
        )

    def _accepts(self, request: Request, resume: Resume) -> bool:
        """Whether a call is taken for one that an earlier controller has accepted."""
        if not self._began_before(resume):
            return False
        if caller().vouched:
            return True
        accepted = self._accepted_before.setdefault(public_name(request.deployment), set())
        if len(accepted) < ACCEPTED_BEFORE_MAX:
            accepted.add(request.request_id)
        return request.request_id in accepted

    async def _tokenised(
        self, asked: Invocation, *, is_part: bool = False
    ) -> tuple[Deployment, tuple[int, ...]]:
        """The prompt's tokens, and the revision that they are for: another one may take over while
        they are made.
        """
        for _ in range(REVISIONS_TRIED_MAX):
            deployment = self.deployment(asked.deployment)
            prompt_tokens = await self._tokens(asked, deployment, is_part=is_part)
            if self.deployment(asked.deployment).model == deployment.model:
                return deployment, prompt_tokens
        raise Unavailable(
            f"{asked.deployment!r} has changed {REVISIONS_TRIED_MAX} times while it was asked",
            hint="try again",
        )

    async def _tokens(
        self, asked: Invocation, deployment: Deployment, *, is_part: bool
    ) -> tuple[int, ...]:
        """The prompt's tokens. One that cannot fit is refused before it is tokenised; one that
        does not fit, by the core.
        """
        prompt = asked.prompt
        if isinstance(prompt, TokenPrompt):
            check_token_ids(prompt.token_ids, deployment.model.vocabulary_tokens)
            return prompt.token_ids
        chars, context_tokens = chars_of(prompt), deployment.context_tokens_max
        if chars > context_tokens * CHARS_PER_TOKEN_MAX:
            raise Refused(
                f"the prompt has {chars} characters; the context of {asked.deployment!r} holds "
                f"{context_tokens} tokens, of at most {CHARS_PER_TOKEN_MAX} characters each",
                reason=RefusalReason.PROMPT_TOO_LONG,
            )
        model = deployment.model
        prompt_tokens = await self._tokenizers.tokens(
            model.model_id,
            prompt,
            special_tokens_in_content=deployment.spec.special_tokens_in_content,
            is_part=is_part,
        )
        if max(prompt_tokens) >= model.vocabulary_tokens:
            named = await self._tokenizers.token_bytes(model.model_id)
            check_token_ids(prompt_tokens, model.vocabulary_tokens, named)
        return prompt_tokens

    @contextmanager
    def _asked(self, stream: ClientStream) -> Iterator[None]:
        """The request is posted; at the end it is cancelled, unless it has ended."""
        request_id = stream.request.request_id
        earlier = self._streams.get(request_id)
        if earlier is not None:
            # It broke, and nobody has told: whoever reads it still is told so.
            self._drop(earlier, Cancelled("its client has asked for it again by its key"))
        if request_id in self._cancelled:
            # A cancel that is posted later would be of the request that is asked for now.
            self._cancel_together()
        self._streams[request_id] = stream
        reader = self._readers[request_id] = running_task()
        try:
            self._ask(stream)
            yield
        except asyncio.CancelledError:
            # Unless somebody else has cancelled the task as well.
            if stream.dropped is not None and not reader.uncancel():
                raise stream.dropped from None
            raise
        finally:
            if self._streams.get(request_id) is stream:
                del self._streams[request_id]
                self._note_ended(stream)
            if self._readers.get(request_id) is reader:
                del self._readers[request_id]
            self._calls_coming.pop(request_id, None)
            if not stream.ended:
                stream.ended = True
                self._cancel(request_id)

    def _ask(self, stream: ClientStream) -> None:
        """Post the request; those of several answers to one prompt go together once all are there,
        so that nobody else gets the places of the later ones.
        """
        request, together = stream.request, [stream]
        if stream.end_known is not None:
            stream.tell_end(self._clock.now_s())
            return
        if request.answers > 1:
            self._calls_coming[request.request_id] = together
            return
        if request.call in self._calls_coming:
            together = self._calls_coming[request.call]
            together.append(stream)
            if len(together) < together[0].request.answers:
                return
            del self._calls_coming[request.call]
        for one in together:
            if not one.ended:
                asked = InvokeRequested(request=one.request, slo=one.own_slo, resumed=one.resumed)
                self._post(asked)

    def _note_ended(self, stream: ClientStream) -> None:
        """Nobody reads it any more: one with a key may be asked for again."""
        if not stream.request.keyed:
            return
        self._ended_keys.pop(stream.request.request_id, None)
        self._ended_keys[stream.request.request_id] = _EndedStream(
            stream.asked_s,
            stream.charged,
            stream.output_tokens,
            stream.finish,
            self._clock.now_s(),
            stream.has_place,
        )
        forget_oldest(self._ended_keys, ENDED_KEYS_MAX)


def _slo_of(asked: Invocation, spec: DeploymentSpec) -> Slo:
    """The SLO of a call for its caller. Raises InvalidInput."""
    if caller().best_effort:
        return next((one for one in spec.classes if one.best_effort), BEST_EFFORT)
    return slo_of(asked, spec)


def _digest_of(key: str) -> bytes:
    """The digest of a key that the caller gives: no other tenant's comes to the same."""
    return sha256(f"{caller().tenant}\0{key}".encode()).digest()


def _asked_digest(prompt_tokens: tuple[int, ...], sampling: SamplingParams) -> str:
    return sha256(repr((prompt_tokens, sampling)).encode("utf-8", "replace")).hexdigest()[:32]


def _is_keyed(asked: Invocation, answers: int, first: Call | None) -> bool:
    """Whether a call can be asked for again by its key: one of several answers cannot."""
    return bool(asked.key) and answers == 1 and first is None


def _keyed_id(asked: Invocation) -> RequestId:
    return RequestId(f"k-{_digest_of(asked.key).hex()[:24]}")


def _differs(before: Request, now: Request) -> bool:
    """Whether a call asks for something else than that of a request did. A revision's name is its
    own.
    """
    same = before.prompt_tokens == now.prompt_tokens and before.sampling == now.sampling
    return not same or public_name(before.deployment) != public_name(now.deployment)


def running_task() -> "asyncio.Task[Any]":
    """The task that this runs in; every protocol runs each call in one of its own."""
    task = asyncio.current_task()
    assert task is not None
    return task
