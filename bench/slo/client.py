"""One client for all calls: it sends each at its time and notes when every message comes.

It runs on the cores that it measures: messages are kept as bytes, and read once their call is over.
"""

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import grpc.aio

from bench.slo.judging import Answer
from bench.slo.workload import Call
from mesh.domain.errors import Refused
from mesh.v1 import inference_pb2 as pb
from mesh.wire.errors import EndedCall, error_of

CALL_S_MAX = 60.0
"""Whoever waits longer for the last token leaves."""
LEAD_S = 1.0
"""Until the first call."""

Invoke = Callable[..., Any]
"""A call's bytes as they come; the stubs of grpc know no such call."""


def offer(address: str, calls: Sequence[Call]) -> list[Answer]:
    """Send all calls at their times; their answers, in the same order."""
    return asyncio.run(_offer(address, calls))


async def _offer(address: str, calls: Sequence[Call]) -> list[Answer]:
    requests = [_request(call).SerializeToString() for call in calls]
    gc.collect()
    gc.freeze()
    async with grpc.aio.insecure_channel(address) as channel:
        invoke: Invoke = channel.unary_stream(
            "/mesh.v1.Inference/Invoke",
            request_serializer=bytes,
            response_deserializer=bytes,
        )
        start_s = time.perf_counter() + LEAD_S
        return await asyncio.gather(
            *(
                _ask(invoke, request, start_s + call.at_s)
                for call, request in zip(calls, requests, strict=True)
            )
        )


def _request(call: Call) -> pb.InvokeRequest:
    return pb.InvokeRequest(
        deployment=call.deployment,
        tokens=pb.TokenIds(ids=call.prompt_tokens),
        max_tokens=call.output_tokens,
        ignore_eos=True,
        seed=1,
    )


async def _ask(invoke: Invoke, request: bytes, at_s: float) -> Answer:
    await asyncio.sleep(at_s - time.perf_counter())
    came_s: list[float] = []
    came: list[bytes] = []
    refused = failed = ""
    sent_s = time.perf_counter()
    try:
        async for raw in invoke(request, timeout=CALL_S_MAX):
            came_s.append(time.perf_counter())
            came.append(raw)
    except grpc.aio.AioRpcError as error:
        raised = error_of(cast(EndedCall, error))
        refused = raised.reason if isinstance(raised, Refused) else ""
        failed = "" if refused else error.code().name.lower()
    return Answer(
        ended_s=time.perf_counter() - sent_s,
        tokens_s=tuple(
            token_s - sent_s
            for token_s, raw in zip(came_s, came, strict=True)
            for _ in pb.InvokeResponse.FromString(raw).tokens.token_ids
        ),
        refused=refused,
        lag_s=sent_s - at_s,
        failed=failed,
    )
