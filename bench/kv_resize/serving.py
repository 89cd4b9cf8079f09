"""Engines of this process that really decode: what an elastic cache costs while it is not resized.

Two serve the same requests in turns, step by step. One has a fixed cache with memory under all of
it. The other's is elastic and begins each round with no page at all, so that every page comes under
the tokens as they are written. Also: how decoding goes while pages of another instance go back.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench.demo_model import stored_model
from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.profile import IterationShape
from mesh.domain.request import SamplingParams
from mesh.domain.steps import EngineRequest, InstanceMemory, LoadOrder
from mesh_nodes.engines.openvino import KvResize, OpenVinoEngine

INSTANCE = InstanceId("served")
BATCH = 32
CONTEXT_TOKENS = 256
PROMPT_TOKENS = (17, 112)
BLOCKS = BATCH * CONTEXT_TOKENS // 32
PREFILL_TOKENS = 512


class Served:
    """One engine with one instance; `close` it."""

    def __init__(self, how: KvResize, threads: int) -> None:
        self._engine = OpenVinoEngine(threads=threads, kv_resize=how)
        self.stored = stored_model()
        self._engine.prepare(self.stored.info, self.stored.path, _no_progress)
        self._running: list[RequestId] = []

    def load(self) -> None:
        order = LoadOrder(
            instance_id=INSTANCE,
            deployment=DeploymentName("bench"),
            model=self.stored.info,
            model_path=self.stored.path,
            kv_blocks=BLOCKS,
            context_tokens_max=CONTEXT_TOKENS,
            batch_max=BATCH,
        )
        self._engine.load(order, _no_progress)

    @property
    def books(self) -> InstanceMemory:
        return self._engine.memory()[0]

    def back(self) -> None:
        """Put memory under the whole cache."""
        shape = IterationShape(decode_batch=BATCH, decode_context_tokens=CONTEXT_TOKENS)
        self._engine.measure(INSTANCE, shape)

    def empty(self) -> None:
        """Drop all requests, take all memory from the cache, and let it have its size again."""
        self.drop()
        self._engine.resize_kv(INSTANCE, 1)
        wait_until(lambda: self.books.kv_held_bytes <= self.books.kv_block_bytes)
        self._engine.resize_kv(INSTANCE, BLOCKS)

    def drop(self) -> None:
        while self._running:
            self._engine.abort(INSTANCE, self._running.pop())

    def begin(self, prompts: list[list[int]]) -> None:
        """Requests that run until they are dropped, with their prompts computed."""
        for number, prompt in enumerate(prompts):
            request = EngineRequest(
                request_id=RequestId(f"r{number}"),
                prompt_tokens=tuple(prompt),
                output_tokens=(),
                sampling=SamplingParams(max_tokens=CONTEXT_TOKENS, ignore_eos=True),
                stop_token_ids=(),
            )
            self._engine.submit(INSTANCE, request)
            self._running.append(request.request_id)
        while self._engine.step(INSTANCE, PREFILL_TOKENS).prefill_left:
            pass

    def step_s(self) -> float:
        """One decode of the whole batch."""
        start_s = time.perf_counter()
        result = self._engine.step(INSTANCE, 0)
        elapsed_s = time.perf_counter() - start_s
        if result.decode_batch != len(self._running):
            raise RuntimeError(f"{result.decode_batch} of {len(self._running)} requests decoded")
        return elapsed_s

    def unload(self) -> None:
        self._running.clear()
        self._engine.unload(INSTANCE)

    def close(self) -> None:
        self._engine.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """Mean steps of one round."""

    elastic_s: float
    fixed_s: float

    @property
    def cost_share(self) -> float:
        return self.elastic_s / self.fixed_s - 1


def decode_rounds(
    elastic: Served, fixed: Served, rounds: int, steps: int, draw: random.Random
) -> Iterator[Decoded]:
    """Which goes first changes from step to step."""
    fixed.back()
    for _ in range(rounds):
        prompts = draw_prompts(draw, BATCH)
        elastic.empty()
        for served in (elastic, fixed):
            served.begin(prompts)
        took_s = {elastic: 0.0, fixed: 0.0}
        for number in range(steps):
            for served in (elastic, fixed) if number % 2 else (fixed, elastic):
                took_s[served] += served.step_s()
        fixed.drop()
        yield Decoded(elastic_s=took_s[elastic] / steps, fixed_s=took_s[fixed] / steps)


def draw_prompts(draw: random.Random, count: int) -> list[list[int]]:
    return [
        [draw.randrange(500, 40_000) for _ in range(draw.randint(*PROMPT_TOKENS))]
        for _ in range(count)
    ]


def steps_during(served: Served, going_on: Callable[[], bool]) -> list[float]:
    """Each step of a running batch, in seconds, that begins while something goes on."""
    took_s = []
    while going_on():
        took_s.append(served.step_s())
    return took_s


def wait_until(reached: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Raises TimeoutError."""
    give_up_s = time.monotonic() + timeout_s
    while not reached():
        if time.monotonic() > give_up_s:
            raise TimeoutError("the KV cache still holds what it should give back")
        time.sleep(0.001)


def _no_progress(phase: str, share: float) -> None:
    pass
