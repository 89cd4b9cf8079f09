"""The same questions to a whole cell, through gRPC, by one client with one event loop."""

import asyncio
import time

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
from mesh.v1.inference_pb2_grpc import InferenceStub

CALL_S_MAX = 120.0


def _request(name: str, max_tokens: int) -> pb.InvokeRequest:
    return pb.InvokeRequest(
        deployment=name,
        tokens=pb.TokenIds(ids=PROMPT_TOKENS),
        max_tokens=max_tokens,
        ignore_eos=True,
        seed=1,
    )


async def _times_s(stub: InferenceStub, request: pb.InvokeRequest) -> list[float]:
    """When each token came."""
    times_s = []
    async for response in stub.Invoke(request, timeout=CALL_S_MAX):  # type: ignore[attr-defined]
        if response.WhichOneof("event") == "tokens":
            now_s = time.perf_counter()
            times_s += [now_s] * len(response.tokens.token_ids)
    return times_s


async def _ask(address: str, name: str) -> Answer:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = InferenceStub(channel)
        await _times_s(stub, _request(name, 1))
        ttft_ms = []
        for _ in range(TTFT_REPEATS):
            start_s = time.perf_counter()
            times_s = await _times_s(stub, _request(name, 1))
            ttft_ms.append(1e3 * (times_s[0] - start_s))
        streams = await asyncio.gather(
            *(_times_s(stub, _request(name, BATCH_TOKENS)) for _ in range(BATCH))
        )
    return Answer(ttft_ms=tuple(ttft_ms), token_ms=steady(streams))


def ask(address: str, name: str) -> Answer:
    """One round of both questions."""
    return asyncio.run(_ask(address, name))
