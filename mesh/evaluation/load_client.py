"""One client for many calls: it sends each at its time and notes when every message comes.

It is an open loop: a call that is late says by how much, and nobody waits for it. It may run on the
cores that it measures: requests are made ready before their time, and messages kept as bytes and
read once their call is over. Before: whoever draws a workload. After: whoever judges the answers.
"""

import asyncio
import gc
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import grpc.aio
from google.protobuf.message import DecodeError

from mesh.domain.errors import InvalidInput, Refused
from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.invocation import Accepted, Finished, InvocationEvent, Tokens
from mesh.domain.outcome import Outcome
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.slo import Slo
from mesh.domain.values import dataclass
from mesh.v1 import inference_pb2 as pb
from mesh.wire.channel import dial
from mesh.wire.codec import event_from_wire
from mesh.wire.credentials import credentials
from mesh.wire.errors import EndedCall, error_of

CALL_S_MAX = 60.0
"""Whoever waits longer for the last token leaves."""
OPEN_MAX = 4_000
"""Calls at once. A further one is not sent."""
PREPARED_MAX = 64
"""Requests made ready ahead of their time."""
PREPARE_S_MIN = 0.01
"""With less time than this until the next call none is made ready."""
LEAD_S = 1.0
"""Until the first call."""
WATCH_S = 0.5
NOT_SENT = "not_sent"
STOPPED = "stopped"
MALFORMED = "malformed"

Invoke = Callable[..., Any]
"""A call's bytes as they come; the stubs of grpc know no such call."""
Events = list[tuple[float, InvocationEvent]]
"""Each with when it came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request that is to be sent `at_s` after the start, and what its caller expects."""

    at_s: float
    deployment: DeploymentName
    slo: Slo
    prompt_tokens: tuple[int, ...]
    output_tokens: int
    """Exactly so many, at most so many unless `forced`."""
    forced: bool = True
    """The answer goes on past where the model would end it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a call; times count from its sending."""

    ended_s: float
    tokens_s: tuple[float, ...]
    sent_s: float = 0.0
    """On the machine's monotonic clock."""
    lag_s: float = 0.0
    """By how much the client sent it after its time."""
    refused: str = ""
    """The reason."""
    retry_after_s: float = 0.0
    """When to come again, by a refusal; 0: that cannot help."""
    failed: str = ""
    """The status of a call that neither finished nor was refused; `not_sent` of one too many,
    `stopped` of one that was open when all of them were ended, and `malformed` of one that was
    answered with what means nothing.
    """
    finishes: int = 0
    """Messages that say that it is over."""
    finish: FinishReason = FinishReason.LENGTH
    """Why, by such a message."""
    told_tokens: int = 0
    """How long the answer is, by such a message."""
    request_id: RequestId | None = None
    """As it was told with its place, if it was."""
    grace_s: float = 0.0
    """By how much its first token would be late, as it was told then."""
    node_id: str = ""
    """Where its last token was computed, by such a message."""
    in_order: bool = True
    """No token came twice, and none was left out."""

    @property
    def accepted(self) -> bool:
        """It was told that it has a place."""
        return self.request_id is not None

    def whole(self, call: Call) -> bool:
        """All of the call's tokens came in order, and one message said that it is over."""
        expected = call.output_tokens if call.forced else self.told_tokens
        complete = len(self.tokens_s) == expected and self.in_order
        ended_well = self.finish in (FinishReason.STOP, FinishReason.LENGTH)
        return complete and ended_well and self.finishes == 1 and not (self.refused or self.failed)


Ended = Callable[[int, Call, Answer], None]
"""The client calls it when a call has ended, with the call's number, the call, and what came of it;
again for each retry of the call.
"""


def offer(
    address: str,
    calls: Sequence[Call],
    *,
    call_s_max: float = CALL_S_MAX,
    watch: Callable[[float], None] = lambda at_s: None,
) -> list[Answer]:
    """Send all calls at their times; their answers, in the same order. `watch` is told the time
    since the start now and then, and ends all of it by what it raises.
    """
    answers, _ = offer_again(address, calls, retries_max=0, call_s_max=call_s_max, watch=watch)
    return answers


def offer_again(
    address: str,
    calls: Sequence[Call],
    *,
    retries_max: int = 1,
    call_s_max: float = CALL_S_MAX,
    watch: Callable[[float], None] = lambda at_s: None,
) -> tuple[list[Answer], list[tuple[Call, Answer]]]:
    """As `offer`, by callers who come again at the Retry-After of a refusal: their retries besides,
    each with its own time, in the order of their ends.
    """
    answers: dict[int, Answer] = {}
    retries: list[tuple[Call, Answer]] = []

    def ended(number: int, call: Call, answer: Answer) -> None:
        if number in answers:
            retries.append((call, answer))
        else:
            answers[number] = answer

    send(address, calls, ended, call_s_max=call_s_max, retries_max=retries_max, watch=watch)
    return [answers[number] for number in range(len(answers))], retries


def send(
    address: str,
    calls: Iterable[Call],
    ended: Ended,
    *,
    call_s_max: float = CALL_S_MAX,
    open_max: int = OPEN_MAX,
    retries_max: int = 0,
    started: Callable[[float], None] = lambda start_s: None,
    watch: Callable[[float], None] = lambda at_s: None,
) -> None:
    """Send calls, which ascend by time, each at its time, and tell `ended` of each as it ends.

    Calls are numbered from 0, and taken from `calls` shortly before they are due. `started` is told
    the start on the machine's monotonic clock. Who is refused comes again when the refusal says so,
    `retries_max` times. What `watch` raises ends all of it: calls that are open then are cancelled,
    and told of.
    """
    client = _Client(address, ended, call_s_max, open_max, retries_max)
    asyncio.run(client.run(calls, started, watch))


class _Client:
    """One run of calls."""

    def __init__(
        self, address: str, ended: Ended, call_s_max: float, open_max: int, retries_max: int
    ) -> None:
        self._address = address
        self._ended = ended
        self._call_s_max = call_s_max
        self._open_max = open_max
        self._retries_max = retries_max
        self._open: dict[asyncio.Task[None], tuple[int, Call]] = {}
        self._prepared: deque[tuple[int, Call, bytes]] = deque()
        self._numbers = 0
        self._failure: BaseException | None = None
        """What `ended` raised, if anything."""

    async def run(
        self,
        calls: Iterable[Call],
        started: Callable[[float], None],
        watch: Callable[[float], None],
    ) -> None:
        coming = iter(calls)
        while len(self._prepared) < PREPARED_MAX and self._prepare(coming):
            pass
        gc.collect()
        gc.freeze()
        async with dial(self._address) as channel:
            invoke = invoke_of(channel)
            start_s = time.monotonic() + LEAD_S
            started(start_s)
            sending = asyncio.ensure_future(self._send(invoke, coming, start_s))
            try:
                while not sending.done():
                    await asyncio.wait([sending], timeout=WATCH_S)
                    watch(time.monotonic() - start_s)
                    if self._failure is not None:
                        raise self._failure
                await sending
            finally:
                await self._end(sending)

    async def _end(self, sending: "asyncio.Future[None]") -> None:
        left = dict(self._open)
        for task in (sending, *left):
            task.cancel()
        await asyncio.gather(sending, *left, return_exceptions=True)
        for task, (number, call) in left.items():
            if task.cancelled():  # before it, or a retry of it, had begun to wait
                self._ended(number, call, _nothing(STOPPED))

    async def _send(self, invoke: Invoke, coming: Iterator[Call], start_s: float) -> None:
        while self._prepared or self._prepare(coming):
            number, call, request = self._prepared.popleft()
            await self._until(start_s + call.at_s, coming)
            if len(self._open) >= self._open_max:
                self._ended(number, call, _nothing(NOT_SENT))
                continue
            sent_s = time.monotonic()
            ask = partial(invoke, request, timeout=self._call_s_max)
            task = asyncio.create_task(self._ask(number, call, start_s, ask, ask(), sent_s))
            self._open[task] = (number, call)
            task.add_done_callback(self._closed)
        await asyncio.gather(*self._open)

    def _closed(self, task: "asyncio.Task[None]") -> None:
        del self._open[task]
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()

    async def _until(self, due_s: float, coming: Iterator[Call]) -> None:
        """Make further requests ready in the meantime, one after the other."""
        # What was sent goes out, and answers are read, also while calls are late.
        await asyncio.sleep(0)
        while (left_s := due_s - time.monotonic()) > 0:
            ahead = len(self._prepared) < PREPARED_MAX
            if left_s < PREPARE_S_MIN or not (ahead and self._prepare(coming)):
                await asyncio.sleep(left_s)
            else:
                await asyncio.sleep(0)

    def _prepare(self, coming: Iterator[Call]) -> bool:
        """Whether there was a further call."""
        call = next(coming, None)
        if call is None:
            return False
        self._prepared.append((self._numbers, call, request_of(call).SerializeToString()))
        self._numbers += 1
        return True

    async def _ask(
        self, number: int, call: Call, start_s: float, invoke: Invoke, stream: Any, sent_s: float
    ) -> None:
        """To its end, and those of its retries; an end is told even if it is cancelled."""
        answer, _ = await heard(stream, sent_s, sent_s - start_s - call.at_s)
        self._ended(number, call, answer)
        for _ in range(self._retries_max):
            if not answer.retry_after_s:
                return
            due_s = sent_s + answer.ended_s + answer.retry_after_s
            await asyncio.sleep(due_s - time.monotonic())
            sent_s, call = time.monotonic(), replace(call, at_s=due_s - start_s)
            answer, _ = await heard(invoke(), sent_s, sent_s - due_s)
            self._ended(number, call, answer)


def invoke_of(channel: grpc.aio.Channel) -> Invoke:
    """With the credentials that are shown."""
    call: Invoke = channel.unary_stream(
        "/mesh.v1.Inference/Invoke", request_serializer=bytes, response_deserializer=bytes
    )
    return partial(call, metadata=credentials().metadata)


async def heard(stream: Any, sent_s: float, lag_s: float = 0.0) -> tuple[Answer, Events]:
    """A call of `invoke_of`, to its end."""
    came: list[tuple[float, bytes]] = []
    note = came.append
    refused = failed = ""
    retry_after_s = 0.0
    try:
        async for raw in stream:
            note((time.monotonic(), raw))
    except grpc.aio.AioRpcError as error:
        raised = error_of(cast(EndedCall, error))
        if isinstance(raised, Refused):
            refused, retry_after_s = str(raised.reason), raised.retry_after_s
        else:
            failed = error.code().name.lower()
    except asyncio.CancelledError:
        failed = STOPPED
    ended_s = time.monotonic()
    events: Events = []
    try:
        for at_s, raw in came:
            events.append((at_s, event_from_wire(pb.InvokeResponse.FromString(raw))))
    except (DecodeError, InvalidInput):
        failed = failed or MALFORMED
    answer = answer_of(
        events,
        sent_s=sent_s,
        ended_s=ended_s,
        lag_s=lag_s,
        refused=refused,
        retry_after_s=retry_after_s,
        failed=failed,
    )
    return answer, events


def _nothing(why: str) -> Answer:
    return Answer(ended_s=0.0, tokens_s=(), sent_s=time.monotonic(), failed=why)


def request_of(call: Call) -> pb.InvokeRequest:
    return pb.InvokeRequest(
        deployment=call.deployment,
        tokens=pb.TokenIds(ids=call.prompt_tokens),
        max_tokens=call.output_tokens,
        ignore_eos=call.forced,
        slo_class=call.slo.name,
        seed=1,
    )


def answer_of(
    events: Sequence[tuple[float, InvocationEvent]],
    *,
    sent_s: float,
    ended_s: float,
    lag_s: float,
    refused: str = "",
    retry_after_s: float = 0.0,
    failed: str = "",
) -> Answer:
    """The answer that a call's events amount to. Each event has the time when it came, on the clock
    of `sent_s` and `ended_s`.
    """
    tokens = [(at_s - sent_s, event) for at_s, event in events if isinstance(event, Tokens)]
    numbers = [event.first_index + i for _, event in tokens for i in range(len(event.token_ids))]
    accepted = next((event for _, event in events if isinstance(event, Accepted)), None)
    answer = Answer(
        ended_s=ended_s - sent_s,
        tokens_s=tuple(at_s for at_s, event in tokens for _ in event.token_ids),
        sent_s=sent_s,
        lag_s=lag_s,
        refused=refused,
        retry_after_s=retry_after_s,
        failed=failed,
        request_id=None if accepted is None else accepted.request_id,
        grace_s=0.0 if accepted is None else accepted.grace_s,
        in_order=numbers == list(range(len(numbers))),
    )
    finishes = [event for _, event in events if isinstance(event, Finished)]
    if not finishes:
        return answer
    return replace(
        answer,
        finishes=len(finishes),
        finish=finishes[0].reason,
        told_tokens=finishes[0].output_tokens,
        node_id=finishes[0].node_id or "",
    )


def outcome_of(call: Call, answer: Answer, start_s: float = 0.0) -> Outcome:
    """Its times count from `start_s`, a moment on the machine's clock. What did not end whole and
    was not refused has failed.
    """
    sent_s = answer.sent_s - start_s
    end: FinishReason | RefusalReason = FinishReason.FAILED
    if answer.refused:
        end = RefusalReason(answer.refused)
    elif answer.whole(call):
        end = answer.finish
    elif answer.failed == STOPPED:
        end = FinishReason.CANCELLED
    return Outcome(
        request_id=answer.request_id or RequestId(f"{call.deployment}@{call.at_s:.6f}"),
        deployment=call.deployment,
        slo=call.slo,
        arrival_s=sent_s,
        input_tokens=len(call.prompt_tokens),
        tokens_s=tuple(sent_s + at_s for at_s in answer.tokens_s),
        ended_s=sent_s + answer.ended_s,
        accepted=answer.accepted,
        grace_s=answer.grace_s,
        end=end,
    )
