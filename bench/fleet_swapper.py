"""What a person would set up by hand: llama.cpp servers in one process, swapped as calls want them.

First come, first served, so many calls at once; a model that is not there is loaded, one after the
other, and the least recently used that is idle goes for it. It answers mesh's own `Invoke`, so that
one client measures both. It runs in a process of its own, and tells what it did when.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc.aio

from bench.demo_model import demo_gguf
from bench.peer import Peer, llama_server
from bench.spans import Kind, Span
from mesh.cli.cell_plan import free_address
from mesh.domain.errors import Unavailable
from mesh.evaluation.load_client import Answer, Call, offer
from mesh.v1 import inference_pb2 as pb
from mesh.v1 import inference_pb2_grpc
from mesh.wire.channel import bind, server_options

SERVER_CONTEXT_TOKENS = 256
SERVER_SLOTS = 4
"""Calls that a server computes together; further ones wait in its queue."""
SERVER_THREADS = 2
CALLS_AT_ONCE_MAX = 1024
"""The most calls that wait for servers side by side: more than ever do."""
READY_S_MAX = 170.0


class Swapper(inference_pb2_grpc.InferenceServicer):
    """`load` makes a server, of which there are `resident_max` at most; it serves `at_once` calls
    at a time: of all deployments, or, where every one is resident, more than ever come.
    """

    InvokeMany: Any = None  # its only client calls Invoke

    def __init__(self, load: Callable[[], Any], *, resident_max: int, at_once: int) -> None:
        self._load = load
        self._resident_max = resident_max
        self._places = asyncio.Semaphore(at_once)
        self._loading = asyncio.Lock()
        self._servers: dict[str, Any] = {}
        """The least recently used first."""
        self._busy: Counter[str] = Counter()
        self.spans: list[Span] = []

    async def resident(self, name: str) -> Any:
        """The server of this deployment, the latest used from now on."""
        async with self._loading:
            if name not in self._servers:
                began_s = time.monotonic()
                if len(self._servers) >= self._resident_max:
                    del self._servers[next(idle for idle in self._servers if not self._busy[idle])]
                    self._did(Kind.UNLOAD, began_s)
                began_s = time.monotonic()
                self._servers[name] = await asyncio.to_thread(self._load)
                self._did(Kind.LOAD, began_s)
            self._servers[name] = self._servers.pop(name)
            return self._servers[name]

    async def Invoke(  # noqa: N802
        self, request: pb.InvokeRequest, context: Any
    ) -> AsyncIterator[pb.InvokeResponse]:
        made = 0
        async with self._places:
            server = await self.resident(request.deployment)
            self._busy[request.deployment] += 1
            try:
                async for count in self._complete(server, request):
                    ids = [0] * (count - made)
                    yield pb.InvokeResponse(tokens=pb.Tokens(first_index=made, token_ids=ids))
                    made = count
            finally:
                self._busy[request.deployment] -= 1
        yield pb.InvokeResponse(finished=pb.Finished(reason="length", output_tokens=made))

    async def _complete(self, server: Any, request: pb.InvokeRequest) -> AsyncIterator[int]:
        """How many tokens there are, whenever there are more."""
        loop, came = asyncio.get_running_loop(), asyncio.Queue[int | None]()
        asked = {
            "prompt": list(request.tokens.ids),
            "n_predict": request.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "cache_prompt": False,
            "stream": True,
            "timings_per_token": True,
        }

        def on_chunk(chunk: dict[str, Any]) -> bool:
            # A token that ends within a character comes with the next one: chunks are no count.
            count = chunk.get("timings", {}).get("predicted_n", 0)
            loop.call_soon_threadsafe(came.put_nowait, count)
            return False

        def compute() -> None:
            try:
                server.handle_completions(asked, on_chunk)
            finally:
                loop.call_soon_threadsafe(came.put_nowait, None)

        began_s, kind, made = time.monotonic(), Kind.PREFILL, 0
        computing = asyncio.create_task(asyncio.to_thread(compute))
        while (count := await came.get()) is not None:
            if count > made:
                yield count
                if not made:
                    self._did(kind, began_s)
                    began_s, kind = time.monotonic(), Kind.DECODE
                made = count
        await computing
        self._did(kind, began_s)

    def _did(self, kind: Kind, began_s: float) -> None:
        self.spans.append(Span(kind, began_s, time.monotonic()))


async def serve(
    swapper: Swapper, address: str, preloaded: Sequence[str], at_once: int, serves: Future[None]
) -> None:
    """It listens once these are loaded, for as long as its process runs. A call takes a thread
    while it is served.
    """
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(at_once + 1))
    for name in preloaded:
        await swapper.resident(name)
    server = grpc.aio.server(options=server_options())
    inference_pb2_grpc.add_InferenceServicer_to_server(swapper, server)
    bind(server, address)
    await server.start()
    serves.set_result(None)
    await server.wait_for_termination()


def swapping(
    gguf: Path, resident_max: int, preloaded: Sequence[str]
) -> Callable[[object], tuple[str, list[Span]]]:
    """As a `Peer` has it: it serves from now on; asked, it tells its address, and what it has done.

    What is loaded before the first call is computed side by side; where nothing is, one call at a
    time has all cores. Raises Unavailable.
    """
    address, serves = free_address("127.0.0.1:0"), Future[None]()
    at_once = CALLS_AT_ONCE_MAX if preloaded else 1
    swapper = Swapper(
        lambda: llama_server(
            gguf,
            slots=SERVER_SLOTS,
            context_tokens=SERVER_CONTEXT_TOKENS,
            threads=SERVER_THREADS,
        ),
        resident_max=resident_max,
        at_once=at_once,
    )

    def run() -> None:
        try:
            asyncio.run(serve(swapper, address, preloaded, at_once, serves))
        except Exception as error:
            serves.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        serves.result(READY_S_MAX)
    except TimeoutError as error:
        raise Unavailable(f"the swapper does not serve after {READY_S_MAX:.0f} s") from error
    return lambda _: (address, list(swapper.spans))


def swapped(
    calls: Sequence[Call], *, resident_max: int, preloaded: Sequence[str], call_s_max: float
) -> tuple[list[Answer], list[Span]]:
    """Offer a fresh swapper these calls. Raises Unavailable when it ends or does not start."""
    with Peer("the swapper", swapping, demo_gguf(), resident_max, preloaded) as peer:
        peer.wait_ready()
        address, _ = peer.ask()
        answers = offer(address, calls, call_s_max=call_s_max)
        return answers, peer.ask()[1]
