"""One client for many calls: it sends each at its time and notes when every message comes.

It may run on the cores that it measures: messages are kept as bytes, and read once their call is
over. Before: whoever draws a workload. After: whoever judges the answers.
"""

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import grpc.aio

from mesh.domain.errors import Refused
from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.outcome import Outcome
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.slo import Slo
from mesh.v1 import inference_pb2 as pb
from mesh.wire.errors import EndedCall, error_of

CALL_S_MAX = 60.0
"""Whoever waits longer for the last token leaves."""
LEAD_S = 1.0
"""Until the first call."""
WATCH_S = 0.5

Invoke = Callable[..., Any]
"""A call's bytes as they come; the stubs of grpc know no such call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request that is to be sent `at_s` after the start, and what its caller expects."""

    at_s: float
    deployment: DeploymentName
    slo: Slo
    prompt_tokens: tuple[int, ...]
    output_tokens: int
    """Exactly so many."""


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
    failed: str = ""
    """The status of a call that neither finished nor was refused."""
    finishes: int = 0
    """Messages that say that it is over."""
    grace_s: float = 0.0
    """Load time that it was granted, by such a message."""
    node_id: str = ""
    """Where its last token was computed, by such a message."""
    in_order: bool = True
    """No token came twice, and none was left out."""

    @property
    def admitted(self) -> bool:
        return not self.refused or bool(self.tokens_s)

    def whole(self, call: Call) -> bool:
        """All of the call's tokens came in order, and one message said that it is over."""
        complete = len(self.tokens_s) == call.output_tokens and self.in_order
        return complete and self.finishes == 1 and not (self.refused or self.failed)


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
    return asyncio.run(_offer(address, calls, call_s_max, watch))


async def _offer(
    address: str, calls: Sequence[Call], call_s_max: float, watch: Callable[[float], None]
) -> list[Answer]:
    requests = [_request(call).SerializeToString() for call in calls]
    gc.collect()
    gc.freeze()
    async with grpc.aio.insecure_channel(address) as channel:
        invoke: Invoke = channel.unary_stream(
            "/mesh.v1.Inference/Invoke",
            request_serializer=bytes,
            response_deserializer=bytes,
        )
        start_s = time.monotonic() + LEAD_S
        answers = asyncio.gather(
            *(
                _ask(invoke, request, start_s + call.at_s, call_s_max)
                for call, request in zip(calls, requests, strict=True)
            )
        )
        while not answers.done():
            await asyncio.wait([answers], timeout=WATCH_S)
            watch(time.monotonic() - start_s)
        return answers.result()


def _request(call: Call) -> pb.InvokeRequest:
    return pb.InvokeRequest(
        deployment=call.deployment,
        tokens=pb.TokenIds(ids=call.prompt_tokens),
        max_tokens=call.output_tokens,
        ignore_eos=True,
        seed=1,
    )


async def _ask(invoke: Invoke, request: bytes, at_s: float, call_s_max: float) -> Answer:
    await asyncio.sleep(at_s - time.monotonic())
    came_s: list[float] = []
    came: list[bytes] = []
    refused = failed = ""
    sent_s = time.monotonic()
    try:
        async for raw in invoke(request, timeout=call_s_max):
            came_s.append(time.monotonic())
            came.append(raw)
    except grpc.aio.AioRpcError as error:
        raised = error_of(cast(EndedCall, error))
        refused = str(raised.reason) if isinstance(raised, Refused) else ""
        failed = "" if refused else error.code().name.lower()
    ended_s = time.monotonic() - sent_s
    messages = [pb.InvokeResponse.FromString(raw) for raw in came]
    finishes = [message.finished for message in messages if message.HasField("finished")]
    numbers = [
        message.tokens.first_index + i
        for message in messages
        for i in range(len(message.tokens.token_ids))
    ]
    return Answer(
        ended_s=ended_s,
        tokens_s=tuple(
            token_s - sent_s
            for token_s, message in zip(came_s, messages, strict=True)
            for _ in message.tokens.token_ids
        ),
        sent_s=sent_s,
        refused=refused,
        lag_s=sent_s - at_s,
        failed=failed,
        finishes=len(finishes),
        grace_s=finishes[0].grace_s if finishes else 0.0,
        node_id=finishes[0].node if finishes else "",
        in_order=numbers == list(range(len(numbers))),
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
        end = FinishReason.LENGTH
    return Outcome(
        request_id=RequestId(f"{call.deployment}@{call.at_s:.6f}"),
        deployment=call.deployment,
        slo=call.slo,
        arrival_s=sent_s,
        input_tokens=len(call.prompt_tokens),
        tokens_s=tuple(sent_s + at_s for at_s in answer.tokens_s),
        ended_s=sent_s + answer.ended_s,
        grace_s=answer.grace_s,
        end=end,
    )
