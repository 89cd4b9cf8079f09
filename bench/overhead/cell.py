"""The same questions to a whole cell, through gRPC, by one client with one event loop."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc.aio

from bench.overhead.workload import (
    BATCH,
    BATCH_TOKENS,
    PROMPT_TOKENS,
    TTFT_REPEATS,
    Answer,
    steady,
)
from mesh.v1 import inference_pb2 as pb

CALL_S_MAX = 120.0

Invoke = Callable[..., Any]
"""A call's bytes as they come; the stubs of grpc know no such call."""


def _request(name: str, max_tokens: int) -> pb.InvokeRequest:
    return pb.InvokeRequest(
        deployment=name,
        tokens=pb.TokenIds(ids=PROMPT_TOKENS),
        max_tokens=max_tokens,
        ignore_eos=True,
        seed=1,
    )


async def _times_s(invoke: Invoke, request: pb.InvokeRequest) -> list[float]:
    """When each token came. Messages are read after the stream has ended: what a client makes of
    them is not what is measured, and it runs on the same cores.
    """
    came = [(time.perf_counter(), raw) async for raw in invoke(request, timeout=CALL_S_MAX)]
    return [at_s for at_s, raw in came for _ in pb.InvokeResponse.FromString(raw).tokens.token_ids]


async def _ask(address: str, name: str) -> Answer:
    async with grpc.aio.insecure_channel(address) as channel:
        invoke: Invoke = channel.unary_stream(
            "/mesh.v1.Inference/Invoke",
            request_serializer=pb.InvokeRequest.SerializeToString,
            response_deserializer=bytes,
        )
        await _times_s(invoke, _request(name, 1))
        ttft_ms = []
        for _ in range(TTFT_REPEATS):
            start_s = time.perf_counter()
            times_s = await _times_s(invoke, _request(name, 1))
            ttft_ms.append(1e3 * (times_s[0] - start_s))
        streams = await asyncio.gather(
            *(_times_s(invoke, _request(name, BATCH_TOKENS)) for _ in range(BATCH))
        )
    return Answer(ttft_ms=tuple(ttft_ms), token_ms=steady(streams))


def ask(address: str, name: str) -> Answer:
    """One round of both questions."""
    return asyncio.run(_ask(address, name))
