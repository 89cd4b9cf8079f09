"""Instances that really decode: what an elastic cache costs while it is not resized.

Two instances of one compiled model serve the same requests in turns, step by step. One has a fixed
cache with memory under all of it. The other's is elastic and begins with no page at all, so that
every page comes under the tokens as they are written; then a second batch takes the place of the
first, as requests do that follow each other. Also: how decoding goes while pages of another
instance go back.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import mean

from bench.driving import request
from mesh.domain.ids import RequestId
from mesh.domain.profile import IterationShape
from mesh.domain.steps import InstanceMemory
from mesh_nodes.engines.openvino.instance import Instance
from mesh_nodes.engines.openvino.kv_cache import KvResize

BATCH = 32
CONTEXT_TOKENS = 1024
PROMPT_TOKENS = (17, 112)
BLOCKS = BATCH * CONTEXT_TOKENS // 32
PREFILL_TOKENS = 512
QUIET_SHARE = 0.9
"""The longest tenth of the pairs of steps met something else that the machine did: this share is
counted.
"""


class Served:
    """One instance and the requests that run in it."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._running: list[RequestId] = []

    @property
    def books(self) -> InstanceMemory:
        return self._instance.memory()

    def back(self) -> None:
        """Put memory under the whole cache, as far as a full batch could use it."""
        shape = IterationShape(decode_batch=BATCH, decode_context_tokens=CONTEXT_TOKENS - 1)
        self._instance.measure(shape)

    def empty(self) -> None:
        """Drop all requests, take all memory from the cache, and let it have its size again."""
        self.drop()
        self._instance.resize_kv(1)
        wait_until(lambda: self.books.kv_held_bytes <= self.books.kv_block_bytes)
        self._instance.resize_kv(BLOCKS)

    def drop(self) -> None:
        while self._running:
            self._instance.abort(self._running.pop())

    def begin(self, prompts: list[list[int]]) -> None:
        """Requests that run until they are dropped, with their prompts computed."""
        for number, prompt in enumerate(prompts):
            made = request(f"r{number}", prompt, CONTEXT_TOKENS)
            self._instance.submit(made)
            self._running.append(made.request_id)
        while self._instance.step(PREFILL_TOKENS).prefill_left:
            pass

    def step_s(self) -> float:
        """One decode of the whole batch."""
        start_s = time.perf_counter()
        result = self._instance.step(0)
        elapsed_s = time.perf_counter() - start_s
        if result.decode_batch != len(self._running):
            raise RuntimeError(f"{result.decode_batch} of {len(self._running)} requests decoded")
        return elapsed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """Mean steps of one round."""

    elastic_s: float
    fixed_s: float

    @property
    def cost_share(self) -> float:
        return self.elastic_s / self.fixed_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedRound:
    """One pair of instances: first while pages come under the tokens, then on the pages that those
    requests have left.
    """

    growing: Decoded
    steady: Decoded


def decode_rounds(
    make: Callable[[KvResize], Instance], rounds: int, steps: int, draw: random.Random
) -> Iterator[DecodedRound]:
    """`make` gives instances of one compiled model. Two equal ones differ by a per cent, for as
    long as they live, so each round has a pair of its own.
    """
    for number in range(rounds):
        kinds = (KvResize.ELASTIC, KvResize.COPYING)
        made = {how: make(how) for how in (kinds if number % 2 else kinds[::-1])}
        elastic, fixed = Served(made[KvResize.ELASTIC]), Served(made[KvResize.COPYING])
        fixed.back()
        elastic.empty()
        growing = _decode(elastic, fixed, steps, draw_prompts(draw, BATCH))
        steady = _decode(elastic, fixed, steps, draw_prompts(draw, BATCH))
        for instance in made.values():
            instance.close()
        yield DecodedRound(growing=growing, steady=steady)


def _decode(elastic: Served, fixed: Served, steps: int, prompts: list[list[int]]) -> Decoded:
    """A full batch each, in turns; which goes first changes from step to step."""
    for served in (elastic, fixed):
        served.begin(prompts)
    pairs = []
    for number in range(steps):
        if number % 2:
            pairs.append((elastic.step_s(), fixed.step_s()))
        else:
            pairs.append((fixed.step_s(), elastic.step_s())[::-1])
    for served in (elastic, fixed):
        served.drop()
    pairs = sorted(pairs, key=sum)[: round(steps * QUIET_SHARE)]
    return Decoded(
        elastic_s=mean(elastic_s for elastic_s, _ in pairs),
        fixed_s=mean(fixed_s for _, fixed_s in pairs),
    )


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
