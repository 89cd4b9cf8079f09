"""What a person would set up by hand: llama.cpp servers in one process, swapped as calls want them.

First come, first served, so many calls at once; a model that is not there is loaded, one after the
other, and the least recently used that is idle goes for it. It answers mesh's own `Invoke`, so that
one client measures both. On SIGTERM it writes what it did when, as JSON. Before: `peer`, which
starts it. After: `seconds`.
"""

import argparse
import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc.aio

from bench.spans import Kind, Span
from mesh.v1 import inference_pb2 as pb
from mesh.v1 import inference_pb2_grpc
from mesh.wire.channel import bind, server_options

SERVER_CONTEXT_TOKENS = 256
SERVER_SLOTS = 4
"""Calls that a server computes together; further ones wait in its queue."""
SERVER_THREADS = 2


def llama_server(gguf: Path) -> Any:
    import xllamacpp  # which the tests do without

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(gguf)
    parameters.n_parallel = SERVER_SLOTS
    parameters.n_ctx = SERVER_SLOTS * SERVER_CONTEXT_TOKENS
    parameters.cpuparams.n_threads = SERVER_THREADS
    parameters.cpuparams_batch.n_threads = SERVER_THREADS
    parameters.cache_ram_mib = 0
    return xllamacpp.Server(parameters)


class Swapper(inference_pb2_grpc.InferenceServicer):
    """`load` makes a server, of which there are `resident_max` at most; it serves `at_once` calls
    at a time: of all deployments, or, where every one is resident, more than ever come.
    """

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


async def serve(swapper: Swapper, *, listen: str, preloaded: Sequence[str], threads: int) -> None:
    """Until SIGTERM; it listens once these are loaded. A call takes a thread while it is served."""
    loop, ending = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ending.set)
    loop.set_default_executor(ThreadPoolExecutor(threads))
    for name in preloaded:
        await swapper.resident(name)
    server = grpc.aio.server(options=server_options())
    inference_pb2_grpc.add_InferenceServicer_to_server(swapper, server)
    bind(server, listen)
    await server.start()
    await ending.wait()
    await server.stop(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--resident-max", type=int, required=True)
    parser.add_argument("--at-once", type=int, required=True)
    parser.add_argument("--spans", type=Path, required=True, help="written at the end")
    parser.add_argument("preloaded", nargs="*")
    options = parser.parse_args()

    async def run() -> None:
        swapper = Swapper(
            lambda: llama_server(options.gguf),
            resident_max=options.resident_max,
            at_once=options.at_once,
        )
        await serve(
            swapper,
            listen=options.listen,
            preloaded=options.preloaded,
            threads=options.at_once + 1,
        )
        options.spans.write_text(json.dumps(swapper.spans), encoding="utf-8")

    asyncio.run(run())


if __name__ == "__main__":
    main()
