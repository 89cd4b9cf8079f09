"""Clients as they are: short and long prompts, some that leave early, some that ask nonsense."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import grpc
import grpc.aio

from mesh.v1 import inference_pb2 as pb
from mesh.v1.inference_pb2_grpc import InferenceStub

PROMPT_TOKENS_MAX = 400
OUTPUT_TOKENS_MAX = 48
PAUSE_S_MAX = 3.0
CALL_S_MAX = 120.0
FINISHED_SHARE_MIN = 0.25
"""The least share of all requests that must finish; fewer answers than that put no load on
anything.
"""
FAILURES = ("internal", "unavailable", "unknown")
"""Outcomes that nothing in this traffic asks for, unlike refusals and missed deadlines."""


class Traffic:
    """`workers` clients, each asking again and again until told to stop."""

    def __init__(self, address: str, names: Sequence[str], *, workers: int, seed: int) -> None:
        self._address = address
        self._names = names
        self._workers = workers
        self._seed = seed
        self.outcomes: Counter[str] = Counter()
        self.tokens = 0

    def failures(self) -> list[str]:
        """What went wrong besides leaks."""
        found = [f"{self.outcomes[o]} × {o}" for o in FAILURES if self.outcomes[o]]
        finished, asked = self.outcomes["finished"], sum(self.outcomes.values())
        if finished < FINISHED_SHARE_MIN * asked or not asked:
            found.append(f"only {finished} of {asked} requests finished")
        return found

    async def run(self, stop: asyncio.Event) -> None:
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = InferenceStub(channel)
            seeds = range(self._seed, self._seed + self._workers)
            await asyncio.gather(*(self._worker(stub, random.Random(seed), stop) for seed in seeds))

    async def _worker(self, stub: InferenceStub, rng: random.Random, stop: asyncio.Event) -> None:
        while not stop.is_set():
            self.outcomes[await self._ask(stub, rng)] += 1
            try:
                async with asyncio.timeout(rng.uniform(0, PAUSE_S_MAX)):
                    await stop.wait()
            except TimeoutError:
                continue

    async def _ask(self, stub: InferenceStub, rng: random.Random) -> str:
        kind = rng.choices(
            ["whole", "leaves", "deadline", "unknown", "too long"], [60, 25, 10, 3, 2]
        )[0]
        request = self._request(rng, kind)
        timeout_s = rng.uniform(0.05, 1.0) if kind == "deadline" else CALL_S_MAX
        leave_after = rng.randint(0, 10) if kind == "leaves" else None
        call = stub.Invoke(request, timeout=timeout_s)
        try:
            async for response in call:  # type: ignore[attr-defined]
                if response.WhichOneof("event") == "tokens":
                    self.tokens += len(response.tokens.token_ids)
                    if leave_after is not None and response.tokens.first_index >= leave_after:
                        call.cancel()  # type: ignore[no-untyped-call]
                        return "left"
        except asyncio.CancelledError:
            return "left"
        except grpc.aio.AioRpcError as error:
            return str(error.code().name).lower()
        return "finished"

    def _request(self, rng: random.Random, kind: str) -> pb.InvokeRequest:
        name = "nobody" if kind == "unknown" else rng.choice(self._names)
        length = 4000 if kind == "too long" else rng.randint(1, PROMPT_TOKENS_MAX)
        return pb.InvokeRequest(
            deployment=name,
            tokens=pb.TokenIds(ids=[rng.randint(100, 2000) for _ in range(length)]),
            max_tokens=rng.randint(1, OUTPUT_TOKENS_MAX),
            temperature=rng.choice([0.0, 0.8]),
            stop=rng.choice([[], [], ["the"]]),
        )
